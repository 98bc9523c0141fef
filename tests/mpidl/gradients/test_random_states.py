"""Engines and optimizers draw from generators of their own: the program's random states stay as they are."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.optim import Adam8bit, DiLoCo, Dion, DionState, PeriodicAverager, PostLocalSGDOptimizer, dion_hook
from tests.mpidl.gradients.compression.methods import VARIANTS
from tests.mpidl.optim.one_bit_training import CLASSES

pytestmark = pytest.mark.mpi
Engine = tuple[Any, Any]  # what is called, and the optimizer
SGD: dict[str, Any] = {"lr": 0.1}


class Layers(nn.Module):
    """Matrices large enough for factors, and for moments of 8 bits, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 110), nn.Tanh(), nn.Linear(110, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


def states() -> tuple[bytes, bytes, bytes]:
    """Those of torch, numpy and Python."""
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, pickle.dumps(np.random.get_state()), pickle.dumps(random.getstate())


def ddp(comm: Communicator, model: nn.Module, compress: Any) -> Engine:
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=compress, bucket_cap_mb=0.01)
    return wrapped, torch.optim.SGD(model.parameters(), **SGD)


def dion(comm: Communicator, model: nn.Module) -> Engine:
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) == chosen] for chosen in (True, False))
    optimizer = Dion([{"params": matrices}, {"params": others, "rule": "adamw"}], process_group=comm)
    wrapped.register_comm_hook(DionState(optimizer), dion_hook)
    return wrapped, optimizer


def one_bit(comm: Communicator, model: nn.Module, name: str) -> Engine:
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    early = {"adam": {"freeze_step": 1}, "lamb": {"freeze_step": 1}, "zero_one": {"renewals": 1, "local_after": 1}}
    optimizer = CLASSES[name][0](model.parameters(), process_group=comm, **early[name])
    wrapped.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
    return wrapped, optimizer


def post_local(comm: Communicator, model: nn.Module) -> Engine:
    averager = PeriodicAverager(model.parameters(), comm, period=2)
    return model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), **SGD), averager)


def diloco(comm: Communicator, model: nn.Module, compress: str | None) -> Engine:
    return model, DiLoCo(torch.optim.SGD(model.parameters(), **SGD), 2, comm, compress=compress)


def stage_3(comm: Communicator, model: nn.Module, **settings: Any) -> Engine:
    return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, 3, process_group=comm, **SGD, **settings)


def measured(comm: Communicator, model: nn.Module) -> Engine:
    """compress="auto" as over two nodes, where it measures at construction."""
    nodes, comm.nodes = comm.nodes, 2  # type: ignore[misc]
    try:
        allow = ("int4", "powersgd:2", "topk:0.1", "randomk:0.1", "sketch:0.1")
        return ddp(comm, model, Compression("auto", where="everywhere", allow=allow))
    finally:
        comm.nodes = nodes  # type: ignore[misc]


WAYS: dict[str, Callable[[Communicator, nn.Module], Engine]] = {
    **{method: lambda c, m, how=method: ddp(c, m, Compression(how, start_step=0)) for method in VARIANTS},  # type: ignore[misc]
    "auto": lambda c, m: ddp(c, m, "auto"),
    "auto, measured": measured,
    "stage 3": lambda c, m: stage_3(c, m, compress=Compression("randomk:0.1", start_step=0)),
    "compress_parameters": lambda c, m: stage_3(c, m, compress_parameters="int8"),
    **{name: lambda c, m, name=name: one_bit(c, m, name) for name in CLASSES},  # type: ignore[misc]
    "diloco": lambda c, m: diloco(c, m, None),
    "diloco, int8": lambda c, m: diloco(c, m, "int8"),
    "post local": post_local,
    "adam8bit": lambda c, m: (mpidl.DistributedDataParallel(m, process_group=c), Adam8bit(m.parameters())),
    "dion": dion,
}


@pytest.mark.each("way")
@pytest.mark.parametrize("way", WAYS)
def test_construction_and_steps_leave_random_states_alone(comm: Communicator, way: str) -> None:
    model = Layers()
    inputs = [(torch.randn(4, 40), torch.randint(0, 3, (4,))) for _ in range(2)]
    before = states()
    call, optimizer = WAYS[way](comm, model)
    after_construction = states()
    for x, y in inputs:
        call(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [a == b for a, b in zip(after_construction, before, strict=True)] == [True] * 3, "torch, numpy, Python"
    assert [a == b for a, b in zip(states(), before, strict=True)] == [True] * 3, "torch, numpy, Python"
