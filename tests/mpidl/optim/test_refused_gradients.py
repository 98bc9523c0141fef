"""Sparse gradients and complex parameters: one clear error on every rank, and the weights as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.errors import ConfigurationError
from mpidl.job.objects import all_gather_object
from mpidl.optim import (
    LAMB,
    Adam8bit,
    AdamW8bit,
    DiLoCo,
    Dion,
    DionState,
    OneBitAdam,
    OneBitLamb,
    PeriodicAverager,
    ZeroOneAdam,
    dion_hook,
    one_bit_hook,
)
from mpidl.optim.one_bit import OneBitOptimizer

pytestmark = pytest.mark.mpi
CLASSES = {each.__name__: each for each in (OneBitAdam, ZeroOneAdam, OneBitLamb, Adam8bit, AdamW8bit, Dion, LAMB)}
classes = pytest.mark.parametrize("name", CLASSES)
ENGINES = ("ddp", "stage 1")
engines = pytest.mark.parametrize("engine", ENGINES)


class Table(nn.Module):
    """A layer, and a table after it in the order of parameters, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 6), nn.Embedding(9, 4, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(tokens)).square().sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).abs().sum()


def made(comm: Communicator, engine: str, name: str, model: nn.Module) -> tuple[Any, Any]:
    """Makes what is called, and the optimizer."""
    chosen: Any = CLASSES[name]
    parameters = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() != 2], **({"rule": "adamw"} if chosen is Dion else {})},
    ]
    if engine != "ddp":
        return model, mpidl.ZeroOptimizer(model, chosen, 1, parameters, comm)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    if chosen is Dion:
        optimizer: Any = Dion(parameters, process_group=comm)
        wrapped.register_comm_hook(DionState(optimizer), dion_hook)
    elif issubclass(chosen, OneBitOptimizer):
        optimizer = chosen(parameters, process_group=comm)
        wrapped.register_comm_hook(optimizer, one_bit_hook)
    else:
        optimizer = chosen(parameters)
    return wrapped, optimizer


def same_on_all_ranks(comm: Communicator, error: Exception) -> None:
    told = all_gather_object(comm, str(error))
    assert set(told) == {told[0]}


@engines
@classes
def test_a_sparse_gradient_is_one_error_and_changes_nothing(comm: Communicator, engine: str, name: str) -> None:
    model = Table()
    with pytest.raises(ConfigurationError) as raised:  # noqa: PT012 - where depends on the engine
        call, optimizer = made(comm, engine, name, model)
        before = [p.detach().clone() for p in model.parameters()]
        call(torch.tensor([1, 2 + comm.rank])).backward()
        optimizer.step()
    same_on_all_ranks(comm, raised.value)
    if engine == "ddp":
        assert str(raised.value) == f"{name}: got a sparse gradient; needs dense ones"
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    else:
        assert "table.weight belongs to an embedding with sparse=True" in str(raised.value)


@pytest.mark.mpi(min_size=2)
def test_a_sparse_gradient_of_one_rank_alone_is_an_error_of_dion_on_every_rank(comm: Communicator) -> None:
    matrix = nn.Parameter(torch.ones(3, 3))
    optimizer = Dion([matrix], process_group=comm)
    matrix.grad = torch.ones(3, 3).to_sparse() if comm.rank == 1 else torch.ones(3, 3)
    with pytest.raises(ConfigurationError, match="Dion: got a sparse gradient; needs dense ones"):
        optimizer.step()
    assert torch.equal(matrix, torch.ones(3, 3))


@engines
@classes
def test_complex_parameters_are_one_error(comm: Communicator, engine: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.complex64.*; needs (floating-point|parameters|float32)") as r:
        made(comm, engine, name, Complex())
    same_on_all_ranks(comm, r.value)


def test_complex_parameters_cannot_be_averaged(comm: Communicator) -> None:
    model = Complex()
    with pytest.raises(ConfigurationError, match=r"parameters: got torch\.complex64; needs floating-point") as raised:
        DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), 2, comm)
    same_on_all_ranks(comm, raised.value)
    with pytest.raises(ConfigurationError, match=r"parameters: got torch\.complex64; needs floating-point"):
        PeriodicAverager(model.parameters(), comm)
