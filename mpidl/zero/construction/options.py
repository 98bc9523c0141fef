"""The options of a ZeroOptimizer, as its constructor is given them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collectives import Communicator

from ...gradients.compression import Compression, Compressor
from ...mesh import Mesh
from ..offload import Offload
from ..parameters.units import UnitRule
from ..stepping.precision import Precision
from .arguments import Params
from .initial_values import Weights
from .module_values import InitFn


@dataclass(frozen=True)
class ZeroOptions:
    """Arguments of ZeroOptimizer except the model, the optimizer's class and its settings; documented there."""

    stage: int
    params: Params
    process_group: Communicator | None
    units: UnitRule
    bucket_cap_mb: float
    broadcast_buffers: bool
    share_in_node: bool
    reshard_after_forward: bool
    prefetch: int
    shard_group: Communicator | str | None
    precision: Precision | None
    offload: Offload | str | None
    init_fn: InitFn | None
    weights: Weights
    device: torch.device | str | None
    step_in_backward: bool
    mesh: Mesh | None
    compress: Compression | Compressor | str | None
    compress_parameters: str | None

    def flags(self) -> dict[str, bool]:
        """Returns the options that are True or False."""
        return {
            "share_in_node": self.share_in_node,
            "reshard_after_forward": self.reshard_after_forward,
            "broadcast_buffers": self.broadcast_buffers,
            "step_in_backward": self.step_in_backward,
        }
