"""Operations that ranks leave to the others: a task before the end, and waits that the watchdog does not count."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from collectives import Communicator, OperationError
from collectives.draining import exempt_from_watchdog, register_drain_hook

pytestmark = pytest.mark.mpi


def test_a_drain_hook_runs_once_before_a_group_is_closed(comm: Communicator) -> None:
    group, x = comm.duplicate(), np.ones(3)
    register_drain_hook(group, partial(group.all_reduce, x))
    group.close()
    group.close()
    assert (x == comm.size).all()


def test_a_drain_hook_of_a_duplicate_runs_as_its_group_is_closed(comm: Communicator) -> None:
    group, x = comm.duplicate(), np.ones(3)
    inner = group.duplicate()
    register_drain_hook(inner, partial(inner.all_reduce, x))
    group.close()
    assert (x == comm.size).all()


def test_a_drain_hook_can_be_taken_back(comm: Communicator) -> None:
    group, x = comm.duplicate(), np.ones(3)
    register_drain_hook(group, partial(group.all_reduce, x))
    register_drain_hook(group, None)
    group.close()
    assert (x == 1).all()


@pytest.mark.parametrize("fails", ["group", "duplicate"])
def test_a_group_is_closed_though_its_drain_hook_can_no_longer_run(comm: Communicator, fails: str) -> None:
    group = comm.duplicate()
    inner = group.duplicate()
    failed, ran = group if fails == "group" else inner, []

    def fail() -> None:
        raise FloatingPointError("deliberate")

    def hook() -> None:
        ran.append(1)
        failed.barrier()

    register_drain_hook(failed, hook)
    with pytest.raises(FloatingPointError):
        failed.compound("step", fail)
    group.close()
    assert not ran
    for closed in (group, inner):
        with pytest.raises(OperationError, match="it was closed"):
            closed.barrier()


def test_a_drain_hook_that_raises_is_not_run_again(comm: Communicator) -> None:
    group = comm.duplicate()

    def hook() -> None:
        raise FloatingPointError("deliberate")

    register_drain_hook(group, hook)
    with pytest.raises(FloatingPointError):
        group.close()
    group.close()
    with pytest.raises(OperationError, match="it was closed"):
        group.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_group_whose_drain_hook_raises_on_one_rank_is_closed_by_a_second_call_there(comm: Communicator) -> None:
    group = comm.duplicate()

    def hook() -> None:
        if comm.rank == 0:
            raise FloatingPointError("deliberate")

    register_drain_hook(group, hook)
    if comm.rank == 0:
        with pytest.raises(FloatingPointError):
            group.close()
    group.close()
    comm.barrier()
    with pytest.raises(OperationError, match="it was closed"):
        group.barrier()


def test_the_watchdog_sees_no_wait_of_a_rank_that_is_exempt(comm: Communicator) -> None:
    inside: list[bool] = []
    with comm.duplicate() as group:
        positions = group._dispatch.positions

        def look() -> None:
            inside.append(positions.all()[positions.rank].inside)

        group.compound("look", look)
        exempt_from_watchdog(group)
        group.compound("look", look)
        exempt_from_watchdog(group, False)
        group.compound("look", look)
    assert inside == [True, False, True]
