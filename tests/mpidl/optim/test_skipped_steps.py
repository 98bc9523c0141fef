"""Steps that a GradScaler or NonfiniteGuard skips leave no trace in what sends less, on any rank: DiLoCo, Dion, ..."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import mpidl
from collectives import Communicator
from mpidl.optim import DiLoCo, Dion, DionState, PeriodicAverager, PostLocalSGDOptimizer, dion_hook, one_bit_hook
from tests.mpidl.optim.test_dion import groups
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
ONE_BIT = {  # frozen, or with local steps, before the step that is skipped
    "onebitadam": (mpidl.optim.OneBitAdam, {"freeze_step": 2}),
    "onebitlamb": (mpidl.optim.OneBitLamb, {"freeze_step": 2}),
    "zerooneadam": (mpidl.optim.ZeroOneAdam, {"local_after": 2, "local_interval_steps": 1, "max_local_interval": 2}),
}
KINDS = (
    *("dion", "post local", "diloco", "diloco in nodes", "diloco stage 1", "diloco stage 2", "diloco stage 3"),
    *ONE_BIT,
)
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
BAD = 3  # the step that is skipped, between outer steps


class Run:
    """Training of a small model; four ranks are nodes of two where nodes train together, others nodes of one."""

    def __init__(self, comm: Communicator, kind: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.comm, self.dtype = comm, dtype
        self.model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
        self.call: Any = self.model
        self.node = comm.split(comm.rank // (2 if comm.size == 4 else 1)) if "node" in kind or "stage" in kind else None
        if kind == "dion":
            self.call = mpidl.DistributedDataParallel(self.model, process_group=comm)
            self.optimizer: Any = Dion(groups(self.model), process_group=comm)
            self.call.register_comm_hook(DionState(self.optimizer), dion_hook)
        elif kind in ONE_BIT:
            made, settings = ONE_BIT[kind]
            self.call = mpidl.DistributedDataParallel(self.model, process_group=comm)
            self.optimizer = made(self.model.parameters(), lr=0.01, process_group=comm, **settings)
            self.call.register_comm_hook(self.optimizer, one_bit_hook)
        elif kind == "post local":
            averager = PeriodicAverager(self.model.parameters(), comm, period=2)
            self.optimizer = PostLocalSGDOptimizer(torch.optim.SGD(self.model.parameters(), **SGD), averager)
        elif "stage" in kind:
            way = WAYS[kind.removeprefix("diloco ")]
            zero = mpidl.ZeroOptimizer(self.model, torch.optim.SGD, process_group=self.node, **way, **SGD)
            self.optimizer = DiLoCo(zero, 2, comm)
        else:
            if self.node is not None:
                self.call = mpidl.DistributedDataParallel(self.model, process_group=self.node)
            self.optimizer = DiLoCo(torch.optim.SGD(self.model.parameters(), **SGD), 2, comm, self.node)

    def loss(self, step: int) -> torch.Tensor:
        """Computes the loss, which in the bad step is no number on the last rank alone."""
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + self.comm.rank)).to(self.dtype)
        loss: torch.Tensor = self.call(x).float().square().mean()
        return loss * torch.nan if step == BAD and self.comm.rank == self.comm.size - 1 else loss

    def scaled_step(self, scaler: mpidl.GradScaler, step: int) -> None:
        scaler.scale(self.loss(step)).backward()
        scaler.step(self.optimizer)
        scaler.update(scaler.get_scale())
        self.optimizer.zero_grad()

    def guarded_step(self, guard: mpidl.NonfiniteGuard, step: int) -> bool:
        loss = self.loss(step)
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            allowed = guard.allows(loss.item())
        if allowed:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return allowed

    def held(self) -> list[torch.Tensor]:
        """Weights, states of the optimizer and of its averager. Collective."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(inner, mpidl.ZeroOptimizer):
            found: list[Any] = [inner.model_state_dict(), inner.state_dict()]
        else:
            found = [self.model.state_dict(), list(inner.state.values())]
            if isinstance(inner, mpidl.optim.OneBitAdam | mpidl.optim.OneBitLamb | mpidl.optim.ZeroOneAdam):
                found.append(inner.held_tensors()["optimizer"])  # errors too
        if inner is not self.optimizer:
            found.append(self.optimizer.averager.state_dict())
        return [leaf.clone() for leaf in tree_leaves(found) if torch.is_tensor(leaf)]


def check_same(found: Run, expected: Run) -> None:
    mine, theirs = found.held(), expected.held()
    assert len(mine) == len(theirs) > 0 or found.node is not None  # of a node rank 0 alone has whole ones
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    if hasattr(found.optimizer, "averager"):
        assert found.optimizer.averager.steps == expected.optimizer.averager.steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_scaler_skips_leaves_no_trace(comm: Communicator, kind: str) -> None:
    plain, skipping = Run(comm, kind), Run(comm, kind)
    scalers = [mpidl.GradScaler(init_scale=8.0, process_group=comm) for _ in range(2)]
    for step in range(7):
        skipping.scaled_step(scalers[1], step)
        if step != BAD:
            plain.scaled_step(scalers[0], step)
        check_same(skipping, plain)
    assert [scaler.skipped_steps for scaler in scalers] == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_guard_skips_leaves_no_trace(comm: Communicator, kind: str) -> None:
    """All ranks between which the optimizer averages skip it, also where a node's ranks train together."""
    plain, skipping = Run(comm, kind), Run(comm, kind)
    guards = [mpidl.NonfiniteGuard(each.call, each.optimizer, "skip") for each in (plain, skipping)]
    for step in range(7):
        assert skipping.guarded_step(guards[1], step) == (step != BAD)
        if step != BAD:
            assert plain.guarded_step(guards[0], step)
        check_same(skipping, plain)
    for guard in guards:
        guard.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_16_bits_in_a_diloco_are_unscaled_in_fp32(comm: Communicator, stage: int) -> None:
    """By the ZeroOptimizer, as without the DiLoCo: torch refuses to unscale them."""
    run = Run(comm, f"diloco stage {stage}", torch.float16)
    scaler = mpidl.GradScaler(init_scale=8.0, process_group=comm)
    for step in range(5):
        run.scaled_step(scaler, step)
    assert scaler.skipped_steps == 1
    assert all(values.isfinite().all() for values in run.held())
