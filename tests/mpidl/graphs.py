"""Graphs that are no plain chain of modules: models and their losses, on which every engine is tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.mpidl.zero.reference import Several, data, plainly


@dataclass(frozen=True)
class Graph:
    """loss: of what is called, a rank and a step. unused: a rank leaves parameters out, which DDP must be told."""

    loss: Callable[[Any, int, int], torch.Tensor]
    make: Callable[[], nn.Module] = Several
    unused: bool = False


class Sometimes(Several):
    """Reaches no parameter where it is idle."""

    def forward(self, x: torch.Tensor, idle: bool) -> torch.Tensor:  # type: ignore[override]
        return x * 2 if idle else super().forward(x)


class Checkpointed(Several):
    """All blocks but the first in checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Shares(Several):
    """A block in two checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.requires_grad_()
        for number in (0, 1, 0, 2):
            x = checkpoint(self.blocks[number], x, use_reentrant=False)
        return self.head(x)


def on_some_ranks(m: Any, rank: int, step: int) -> torch.Tensor:
    orders = [(0,), (2, 1), (0, 0), (1,)]
    return m(data(rank), orders[(rank + step) % 4]).square().sum()


def two_forward_passes(m: Any, rank: int, step: int) -> torch.Tensor:
    a, b = m(data(rank), (0, 1)), m(data(rank + 10), (1, 2))
    return (a * b).sum() + a.square().sum()


def slope_at_the_input(m: Any, rank: int, step: int) -> torch.Tensor:
    """torch.autograd.grad to an input is no synchronised pass, and a penalty on it is part of the next one."""
    x = data(rank, step).requires_grad_()
    out = m(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square().sum() + out.sum()


GRAPHS = {
    "a block several times": Graph(lambda m, rank, step: m(data(rank, step), (0, 1, 0, 2, 0)).square().sum()),
    "other blocks on each rank": Graph(on_some_ranks, unused=True),
    "no parameter on a rank": Graph(
        lambda m, rank, step: m(data(rank).requires_grad_(), rank == step).square().sum(), Sometimes, unused=True
    ),
    "several forward passes before one backward": Graph(two_forward_passes),
    "checkpoints": Graph(plainly, partial(Checkpointed, reentrant=False)),
    "re-entrant checkpoints": Graph(plainly, partial(Checkpointed, reentrant=True)),
    "a block in two checkpoints": Graph(plainly, Shares),
    "a slope at the input": Graph(slope_at_the_input),
}
