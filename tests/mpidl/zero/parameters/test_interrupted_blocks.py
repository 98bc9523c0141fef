"""Exceptions in `gathered`: of one rank inside, and of all as a block begins or ends; training goes on after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.gradients.buckets import BucketLayout
from mpidl.zero.parameters import round_waits
from mpidl.zero.parameters.gathered_unit import FlatParameters
from mpidl.zero.parameters.held_units import HeldUnits
from mpidl.zero.parameters.sharded import ShardedParameters
from tests.mpidl.zero.reference import Several, after_failure, check, engine, made
from tests.mpidl.zero.ways import every_part

pytestmark = pytest.mark.mpi

GATHERED, SHARED = "stage 3 gathered", "stage 3"
BEGINS = {
    "gather": (GATHERED, HeldUnits, "unshard"),
    "hold": (GATHERED, FlatParameters, "hold"),
    "copy": (GATHERED, torch.Tensor, "clone"),
    "copy of shared": (SHARED, torch.Tensor, "clone"),
    "views of shared": (SHARED, BucketLayout, "views"),
}
ENDS = {"keep": (GATHERED, BucketLayout, "shard"), "keep of shared": (SHARED, BucketLayout, "shard")}


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Lets the call of that number, from 1 on, raise KeyboardInterrupt."""
    plain, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    patch.setattr(owner, name, counted)


def open_and_close(optimizer: Any, change: Callable[[], Any] = lambda: None) -> None:
    with optimizer.gathered():
        change()


@pytest.mark.ranks(2, 3)  # one rank gathers nothing
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("where", BEGINS)
def test_an_interrupt_as_a_block_begins_leaves_nothing_open(comm, where: str, at: int) -> None:
    way, owner, name = BEGINS[where]
    model, optimizer = engine(comm, Several, way)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, owner, name, at)
        with pytest.raises(KeyboardInterrupt):
            open_and_close(optimizer)
    after_failure(comm, model, optimizer, Several)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", BEGINS)
def test_an_interrupt_as_an_inner_block_begins_leaves_the_outer_one(comm, where: str) -> None:
    way, owner, name = BEGINS[where]
    model, optimizer = engine(comm, Several, way)
    plain = made(Several)
    with optimizer.gathered(model.head):
        nn.init.constant_(model.head.weight, 3.0)
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, owner, name, 2)
            with pytest.raises(KeyboardInterrupt):
                open_and_close(optimizer)
        assert (model.head.weight == 3.0).all()
        nn.init.constant_(model.head.bias, 5.0)
    nn.init.constant_(plain.head.weight, 3.0)
    nn.init.constant_(plain.head.bias, 5.0)
    check(model, optimizer, plain)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("where", ENDS)
def test_an_interrupt_as_a_block_ends_leaves_no_copy(comm, where: str, at: int) -> None:
    way, owner, name = ENDS[where]
    model, optimizer = engine(comm, Several, way)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        open_and_close(optimizer, lambda: interrupt(patch, owner, name, at))
    after_failure(comm, model, optimizer, Several)


@pytest.mark.limit(60)
@every_part
@pytest.mark.parametrize("writable", [False, True])
def test_an_error_of_one_rank_inside_a_block_is_raised_and_others_go_on(
    comm, monkeypatch: pytest.MonkeyPatch, writable: bool, way: str
) -> None:
    model, optimizer = engine(comm, Several, way)

    def fail(rank: int | None) -> None:
        with optimizer.gathered(writable=writable):
            if rank in (None, comm.rank):
                raise KeyError("deliberate")

    if way == GATHERED:  # an error of all ranks, which hangs in no case
        drained: list[None] = []
        drain = ShardedParameters.drain
        monkeypatch.setattr(ShardedParameters, "drain", lambda self: [drained.append(None), drain(self)][1])
        optimizer.flush()
        each = len(drained)
        with pytest.raises(KeyError, match="deliberate"):
            fail(None)
        assert len(drained) == 3 * each  # before the block and after it
    if comm.rank == 0:
        with pytest.raises(KeyError, match="deliberate"):
            fail(0)
    else:
        fail(0)
    after_failure(comm, model, optimizer, Several)


@pytest.mark.limit(60)
@pytest.mark.ranks(2, 3)
def test_an_error_inside_a_block_in_which_others_wait_for_the_rank_is_not_hidden(
    comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 raises the error while the other ranks wait for it in a barrier."""
    if comm.size == 1:
        return
    monkeypatch.setattr(round_waits, "_DEADLOCK_POLL_S", 0.05)
    model, optimizer = engine(comm, Several, GATHERED)

    def generate() -> None:
        with optimizer.gathered(writable=False):
            if comm.rank == 0:
                raise KeyError("deliberate")
            comm.barrier()

    if comm.rank == 0:
        with pytest.raises(mpidl.TrainingError, match=r"^rank 0 waits .* rank 1 is in barrier") as raised:
            generate()
        assert isinstance(raised.value.__context__, KeyError)
        comm.barrier()
    else:
        generate()
    after_failure(comm, model, optimizer, Several)
