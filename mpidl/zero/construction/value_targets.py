"""Destinations of initial values: ranges of a tensor's elements, each with one destination or one for each dtype.

A source computes or reads a whole tensor, and `write_all` writes what this rank keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """Elements start..stop of a tensor, flattened, are wanted in each of `tensors`, of any shape and dtype."""

    start: int
    stop: int
    tensors: tuple[torch.Tensor, ...]

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Writes elements start .. stop, `values` (1-D), to each tensor."""
        for tensor in self.tensors:
            tensor.copy_(values.view(tensor.shape))


Targets = Mapping[torch.Tensor, list[Target]]
Deliver = Callable[[torch.Tensor, torch.Tensor], None]


def write_all(targets: Iterable[Target], value: torch.Tensor) -> None:
    """Writes what the targets want of a whole tensor."""
    flat = value.detach().reshape(-1)
    for target in targets:
        target.write(flat[target.start : target.stop])


def wanted(targets: Iterable[Target]) -> bool:
    """Returns whether any element is wanted on this rank."""
    return any(target.stop > target.start for target in targets)
