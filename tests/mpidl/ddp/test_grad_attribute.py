"""Changes of `.grad` by the program change that gradient alone, and no later one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.reference import check, data, made, mean_gradients

pytestmark = pytest.mark.mpi


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def loss(model: Callable[..., torch.Tensor], rank: int) -> torch.Tensor:
    return model(data(rank)).square().sum()


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data.clamp(-1e-3, 1e-3)


def to_and_fro(model: nn.Module) -> None:
    model.double()
    model.float()


@pytest.mark.parametrize("moved", [False, True], ids=["", "moved to new buckets"])
@pytest.mark.parametrize("change", [clamp, to_and_fro])
def test_other_memory_in_a_gradient_leaves_its_place_in_the_bucket(
    comm, change: Callable[[nn.Module], None], moved: bool
) -> None:
    model = made(layers)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for _ in range(2):
        if not moved:
            model.zero_grad()
        loss(wrapped, comm.rank).backward()
    change(model)
    expected = mean_gradients(layers, loss, comm.size)
    for _ in range(2):
        model.zero_grad()
        loss(wrapped, comm.rank).backward()
        check(model, expected)
