"""Refuses models, meshes and optimizers that a compressor does not fit, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import ConfigurationError
from ...mesh import Mesh
from .compressor import Compressor
from .settings import Compression


def refuse_mesh(settings: Compression, mesh: Mesh) -> None:
    """Raises ConfigurationError for a method that would round values that all ranks of tp hold differently on each.

    Norms are whole on every rank of tp, and share buckets with other parts of the cut weights on each.
    """
    for compressor in [each.compressor() for each in settings.candidates()]:
        if mesh.size("tp") > 1 and not compressor.elementwise:
            raise ConfigurationError(
                f"compress: {compressor.name} rounds a value by others in its bucket, so that what is whole on every "
                f"rank of tp={mesh.size('tp')} would differ between them; needs bf16 or fp16, or tp=1"
            )


def refuse_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError for an optimizer with momentum in addition to the compressor's."""
    for group in optimizer.param_groups if compressor.momentum else ():
        name, momentum = "momentum", group.get("momentum") or 0
        if not momentum and group.get("betas"):
            name, momentum = "betas[0]", group["betas"][0]
        if momentum:
            raise ConfigurationError(
                f"compress: {compressor.name} has momentum {compressor.momentum:g}, and {type(optimizer).__name__} has "
                f"{name}={float(momentum):g}; needs one of them to be 0"
            )


def refuse_scaled(compressor: Compressor) -> None:
    """Raises ConfigurationError for a compressor that has to know the loss scale, which changes from step to step."""
    if not compressor.homogeneous:
        raise ConfigurationError(
            f"compress: {compressor.name} clips gradients before a GradScaler unscales them, so that the norm would "
            "count in another unit after each change of the scale; needs no clip=, or no GradScaler"
        )


def refuse_complex(names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raises ConfigurationError for a parameter whose gradients are complex numbers."""
    for p, name in names.items():
        if p.is_complex():
            raise ConfigurationError(f"compress: {name} is {p.dtype}; needs real gradients, or compress=None")
