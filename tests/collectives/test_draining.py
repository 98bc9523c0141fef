"""Operations that ranks leave to the others: a task before the end, and waits that the watchdog does not count."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from collectives import Communicator
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
