"""Refuses combinations of 1-bit optimizers with what they do not support."""

from __future__ import annotations

import torch

from ...errors import ConfigurationError
from .options import ZeroOptions


def refuse_combinations(model: torch.nn.Module, optimizer_class: type, options: ZeroOptions) -> None:
    """Refuses what optimizers that send one bit an element cannot be combined with. optimizer_class: one of these."""
    name = optimizer_class.__name__
    if options.stage != 1:
        raise ConfigurationError(
            f"stage: got {options.stage} with {name}, which needs each rank's own gradients whole, and stage "
            f"{options.stage} cuts them over the ranks; needs stage=1"
        )
    for option in ("offload", "shard_group", "precision", "compress"):
        if getattr(options, option) is not None:
            raise ConfigurationError(f"{option}: {name} keeps whole fp32 states and sends them itself; needs None")
    if options.step_in_backward:
        raise ConfigurationError(f"step_in_backward: {name} exchanges all gradients at once; needs False")
    if options.mesh is not None and options.mesh.layout.model_axes:
        raise ConfigurationError(f"mesh: {name} needs all ranks to hold the same parameters; needs dp and cp alone")
    for parameter, p in model.named_parameters():
        if p.requires_grad and p.dtype != torch.float32:
            raise ConfigurationError(
                f"{parameter}: is {p.dtype}, of which ZeRO cuts the fp32 masters, and {name} updates whole ones; needs "
                "float32, or DistributedDataParallel"
            )
