"""A small model that is cut over tp=2, trained by ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.tensor import ColumnParallel, RowParallel


@pytest.fixture
def mesh(comm: Communicator) -> Iterator[Mesh]:
    with Mesh(tp=2, comm=comm) as made:
        yield made


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def made(
    mesh: Mesh, optimizer_class: Any = torch.optim.SGD, frozen: int | None = None, **settings: Any
) -> tuple[nn.Sequential, Any]:
    """The model and its optimizer. frozen: the number of a module that does not train."""
    model = whole()
    if frozen is not None:
        model[frozen].requires_grad_(False)
    mpidl.parallelize(model, mesh, {"1": ColumnParallel(), "3": RowParallel()})
    given = {"stage": 1, "lr": 0.1, **settings}
    return model, mpidl.ZeroOptimizer(model, optimizer_class, mesh=mesh, **given)


def backward(model: nn.Module, step: int) -> None:
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
