"""Logits of which each rank has a part of the vocabulary, for tests of them and of their losses."""

from __future__ import annotations

import torch

from collectives import Communicator
from mpidl.tensor import VocabLogits
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.sizes import run_of


def logits_of(
    comm: Communicator, whole: torch.Tensor, group: TensorGroup | None = None
) -> tuple[torch.Tensor, VocabLogits]:
    """This rank's part of logits, which trains, and what a model makes of it. group: of comm's ranks."""
    start, stop = run_of(whole.shape[-1], comm.size, comm.rank)
    part = whole.detach()[..., start:stop].clone().requires_grad_(whole.requires_grad)
    return part, VocabLogits.of(part * 1, group or TensorGroup(comm), whole.shape[-1])


def random_logits(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> torch.Tensor:
    """Random logits, equal on every rank."""
    random = torch.Generator().manual_seed(0)
    return (scale * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()


def part_of_gradient(comm: Communicator, whole: torch.Tensor) -> torch.Tensor:
    assert whole.grad is not None
    start, stop = run_of(whole.shape[-1], comm.size, comm.rank)
    return whole.grad[..., start:stop]


TARGETS = torch.tensor([0, 12, 5, -100, 3, 7, -100, 12])
