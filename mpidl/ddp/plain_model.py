"""Finds the plain model inside a DistributedDataParallel and torch.compile's wrapper, in whatever order."""

import torch

from ..compiling import unwrap_compiled
from .wrapper import DistributedDataParallel


def plain_model(model: torch.nn.Module) -> tuple[DistributedDataParallel | None, torch.nn.Module]:
    """Returns the DDP wrapper, or None, and the plain model inside it and inside torch.compile's wrapper."""
    wrapper: DistributedDataParallel | None = None
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
        elif unwrap_compiled(model) is not model:
            model = unwrap_compiled(model)
        else:
            return wrapper, model
