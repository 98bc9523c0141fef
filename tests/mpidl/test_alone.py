"""Forward passes on one rank alone, between those that all ranks train with: nothing waits, and nothing changes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "copies": {"gradient_as_bucket_view": False},
}
HOW = ["no_grad", "eval", "train"]
ways = pytest.mark.parametrize("way", [*DDP, "join", "deepcopy", *WAYS])


def data(rank: int, step: int = 0) -> torch.Tensor:
    """Enough rows for a norm that does not magnify rounding."""
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(100 * step + rank + 1))


class Normed(nn.Module):
    """With running statistics, which are rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([zero.Block(), zero.Block()])
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return self.head(x)


def evaluate(model: nn.Module, how: str) -> torch.Tensor:
    """Outputs of one rank alone; a training pass moves its running statistics."""
    model.train(how == "train")
    with torch.set_grad_enabled(how != "no_grad"):
        found = model(data(9)).detach()
    model.train()
    return found


class Single:
    """Training in one process; `first` sees what rank 0 sees alone."""

    def __init__(self, ranks: int) -> None:
        self.plain = zero.Plain(Normed, ranks)
        self.first = copy.deepcopy(self.plain.model)

    def step(self, step: int, how: str) -> torch.Tensor:
        """Makes a step; returns what rank 0 finds before it."""
        found = evaluate(self.first, how)
        self.first(data(0, step))
        self.plain.step(lambda m, rank: m(data(rank, step)).square().mean().backward())
        for own, trained in zip(self.first.parameters(), self.plain.model.parameters(), strict=True):
            own.data.copy_(trained)
        return found


def trains(comm: Communicator, way: str) -> tuple[Any, nn.Module, Any]:
    """Returns the callable, the plain model and its optimizer."""
    if way in WAYS:
        model, optimizer = zero.engine(comm, Normed, way)
        return model, model, optimizer
    model = zero.made(Normed, comm.rank)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **DDP.get(way, {}))
    if way == "deepcopy":
        wrapped = copy.deepcopy(wrapped)
    return wrapped, wrapped.module, torch.optim.SGD(wrapped.parameters(), **zero.SGD)


@ways
@pytest.mark.parametrize("how", HOW)
def test_training_goes_on(comm, way: str, how: str) -> None:
    """Before the first step, in between and after the last. The other ranks do not wait for the evaluation."""
    called, model, optimizer = trains(comm, way)
    single = Single(comm.size)
    gathers = way == "stage 3 gathered" or (way == "stage 3" and comm.nodes > 1)
    with called.join() if way == "join" else contextlib.nullcontext():
        for step in range(4):
            expected = single.step(step, how)
            with optimizer.gathered(writable=False) if gathers else contextlib.nullcontext():
                if comm.rank == 0:
                    torch.testing.assert_close(evaluate(called, how), expected, rtol=1e-5, atol=1e-6)
                if not gathers:
                    comm.barrier()
            called(data(comm.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with optimizer.gathered(writable=False) if way in WAYS else contextlib.nullcontext():
        for name, expected in single.first.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("waits", [False, True], ids=["", "waits"])
def test_what_is_gathered_by_all(comm, how: str, waits: bool) -> None:
    """Others take part in it when they gather; where they wait for this rank, it is an error at once.

    So it is between nodes, where a rank's watchdog is asked for its position.
    """
    model, optimizer = zero.engine(comm, zero.Several, "stage 3 gathered")
    if comm.rank == 0 and comm.size > 1 and waits:
        with pytest.raises(mpidl.TrainingError, match=r"rank 1 is in barrier .*optimizer.gathered\(writable=False\)"):
            evaluate(model, how)
    elif comm.rank == 0:
        torch.testing.assert_close(evaluate(model, how), zero.made(zero.Several)(data(9)))
    if waits:
        comm.barrier()
    zero.after_failure(comm, model, optimizer, zero.Several)


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.limit(60)
def test_others_that_wait_among_all_ranks_of_a_mesh(comm) -> None:
    """Not in the group over which parameters are cut."""
    with mpidl.Mesh(dp=2, tp=2, comm=comm) as mesh:
        model = zero.made(zero.Several)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=3, share_in_node=False, mesh=mesh, **zero.SGD)
        if comm.rank == 0:
            with pytest.raises(
                mpidl.TrainingError, match=r"rank 2 is in barrier .*optimizer.gathered\(writable=False\)"
            ):
                evaluate(model, "no_grad")
        comm.barrier()
        zero.after_failure(mesh["dp"], model, optimizer, zero.Several)
