"""Collectives and bytes a step of every engine, counted where the Communicator is called, against the formulas."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator, PartitionedAllReduce
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

WIDTH, BLOCKS = 48, 4  # which 1 to 4 ranks cut into whole cache lines
BLOCK, OWN = WIDTH * WIDTH, WIDTH * 12  # elements
PSI = BLOCKS * BLOCK + OWN
SHARE = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # of a buffer's bytes, times (N - 1) / N


class Block(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(trains)
        self.adapter = None if trains else nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + (0 if self.adapter is None else self.adapter(x).sum()))


class Stack(nn.Module):
    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(trains) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Counter:
    """Counts the large collectives of this process's Communicators since `clear`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        self.share = 0.0
        for name, share in SHARE.items():
            monkeypatch.setattr(Communicator, name, self._counted(name, share, getattr(Communicator, name)))
        monkeypatch.setattr(PartitionedAllReduce, "hand_in", self._handed_in(PartitionedAllReduce.hand_in))

    def clear(self) -> None:
        self.calls, self.share = dict.fromkeys(SHARE, 0), 0.0

    def _counted(self, name: str, share: float, method: Any) -> Any:
        def call(comm: Communicator, first: Any, *args: Any, **kwargs: Any) -> Any:
            whole = args[0] if name == "reduce_scatter" else first
            moves = name != "all_gather" or comm.nodes > 1 or not comm.is_shared(whole)
            if torch.is_tensor(whole) and whole.numel() >= OWN // 2 and moves:
                self.calls[name] += 1
                self.share += share * whole.numel()
            return method(comm, first, *args, **kwargs)

        return call

    def _handed_in(self, method: Any) -> Any:
        """Where no all_reduce is called for what is handed in."""

        def call(averages: PartitionedAllReduce, part: torch.Tensor) -> None:
            if averages.waits and part.numel() >= OWN // 2:
                self.calls["all_reduce"] += 1
                self.share += SHARE["all_reduce"] * part.numel()
            method(averages, part)

        return call


def engine(comm, way: str, model: nn.Module) -> tuple[Any, Any, Any]:
    """Returns the callable, the optimizer, and the object with no_sync."""
    if way == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=comm)
        trained = [p for p in model.parameters() if p.requires_grad]
        return call, torch.optim.SGD(trained, lr=0.1), call
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, lr=0.1, **WAYS[way])
    return model, optimizer, optimizer


def one_step(call: Any, optimizer: Any, quiet: Any, micro: int, sync_each: bool) -> None:
    for number in range(micro):
        silent = not sync_each and number < micro - 1
        with quiet.no_sync() if silent else contextlib.nullcontext():
            call(torch.ones(2, WIDTH).requires_grad_()).backward()
    optimizer.step()
    optimizer.zero_grad()


# What each sends a step, in Psi (N - 1) / N, for k micro-steps; DDP and stage 1 save by reducing sums alone.
# In stage 3 the last two blocks and the model's own stay from forward to backward, once the order is known.
FORMULAS = {
    ("ddp", False): lambda k: 2.0,
    ("stage 1", False): lambda k: 2.0,
    ("stage 2", True): lambda k: k + 1.0,
    ("stage 3 gathered", True): lambda k: 3.0 * k - k * (2 * BLOCK + OWN) / PSI,
    ("stage 3", True): lambda k: 1.0 * k,
}


@pytest.fixture(autouse=True)
def ranks_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the ranks in step, so that none has to help another out before its turn, however busy the machine is."""
    monkeypatch.setattr("mpidl.zero.parameters.sharded.FIRST_POLL_S", 60.0)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("way", "sync_each"), FORMULAS)
def test_bytes_a_step_follow_the_formulas(comm, monkeypatch, way: str, sync_each: bool, micro: int) -> None:
    """On one node stage 3 only reduces; one rank's DDP asks for nothing."""
    counter = Counter(monkeypatch)
    call, optimizer, quiet = engine(comm, way, Stack())
    for _ in range(2):
        counter.clear()
        one_step(call, optimizer, quiet, micro, sync_each)
    if comm.size == 1 and way == "stage 3 gathered":
        return  # nothing is gathered there
    expected = FORMULAS[way, sync_each](micro)
    if comm.nodes > 1 and way == "stage 3":
        expected = FORMULAS["stage 3 gathered", sync_each](micro)
    if comm.size == 1 and way == "ddp":
        expected = 0.0
    assert counter.share == pytest.approx(expected * PSI, rel=1e-6)


def test_collectives_a_step_of_stage_3(comm, monkeypatch) -> None:
    """L blocks and the model's own: L + 1 gathers forward, L - 2 backward, L + 1 reduce-scatters."""
    if comm.size == 1:
        return
    counter = Counter(monkeypatch)
    model = Stack()
    call, optimizer, quiet = engine(comm, "stage 3 gathered", model)
    forward: list[int] = []
    model.register_forward_hook(lambda *_: forward.append(counter.calls["all_gather"]))
    share = 0.0
    for _ in range(3):
        counter.clear()
        one_step(call, optimizer, quiet, 1, sync_each=True)
        share += counter.share
    assert forward[-1] in (BLOCKS + 1, BLOCKS + 2)  # the last prediction may be under way
    assert counter.calls == {"all_reduce": 0, "reduce_scatter": BLOCKS + 1, "all_gather": 2 * BLOCKS - 1}
    traffic = optimizer.traffic()
    first = 2 * BLOCKS  # in which the order is not known, so that only the last block stays
    assert (traffic.gathers, traffic.reductions) == (first + 2 * (2 * BLOCKS - 1), 3 * (BLOCKS + 1))
    assert traffic.sent_bytes(comm.size) == pytest.approx(share * 4 * (comm.size - 1) / comm.size)


@pytest.mark.parametrize("way", ["ddp", "stage 1", "stage 2", "stage 3", "stage 3 gathered"])
def test_of_adapters_only_what_trains_is_reduced(comm, monkeypatch, way: str) -> None:
    """Frozen parameters are gathered in stage 3, and never sent otherwise."""
    counter = Counter(monkeypatch)
    call, optimizer, quiet = engine(comm, way, Stack(trains=False))
    counter.clear()
    one_step(call, optimizer, quiet, 1, sync_each=True)
    trained = (BLOCKS + 1) * OWN
    reduced = counter.share
    if comm.size == 1 and way == "ddp":
        assert reduced == 0
    elif way == "ddp" or way in ("stage 1", "stage 2"):
        assert reduced == pytest.approx(2 * trained)
    elif way == "stage 3" and comm.nodes == 1:
        assert reduced == pytest.approx(trained)
    elif comm.size > 1:
        assert optimizer.traffic().reduced_bytes == 4 * trained
