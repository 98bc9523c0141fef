"""Times calls of all ranks in turn, for the benchmarks and the tuner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI


class TimedGroup(Protocol):
    """Part of a Communicator that timing uses."""

    mpi: MPI.Intracomm
    rank: int
    size: int

    def all_reduce(self, x: Any, op: str) -> Any:
        """Replaces x by the reduction of all ranks' x. Collective."""


def repetitions(nbytes: int) -> int:
    """Enough for a steady median, few enough to be done soon."""
    return 100 if nbytes <= 64 << 10 else 40 if nbytes <= 4 << 20 else 9


class Clock:
    """The host's clock."""

    def ready(self) -> None:
        """Prepares for a call, before the ranks meet."""

    def seconds(self, call: Callable[[], Any]) -> float:
        """Times a call."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def sample(
    comm: TimedGroup,
    steps: Sequence[tuple[Callable[[], Any], Callable[[], Any]]],
    count: int,
    warmup: int = 3,
    clock: Clock | None = None,
) -> np.ndarray[Any, Any]:
    """This rank's seconds of each call (columns), `count` times (rows). Collective.

    steps: (ready, call), the same on every rank; `ready` runs untimed before the ranks meet for the call.

    The calls take turns, repetition by repetition, so that drift of the machine hits all equally, and in an order that
    is drawn anew each time, as each finds the caches as the one before has left them. A time is that between a barrier
    and the call's own end.
    """
    clock = clock or Clock()
    times = np.zeros((count, len(steps)))
    order = list(enumerate(steps))
    draw = random.Random(count)  # the same on every rank
    for number in range(-warmup, count):
        draw.shuffle(order)
        for column, (ready, call) in order:
            ready()
            comm.mpi.Barrier()
            seconds = clock.seconds(call)
            if number >= 0:
                times[number, column] = seconds
    return times


def measure(
    comm: TimedGroup,
    calls: Mapping[str, Callable[[], Any]],
    count: int,
    warmup: int = 3,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Median over `count` repetitions of the slowest rank's seconds, by name; see `sample`. Collective."""
    clock = clock or Clock()
    times = sample(comm, [(clock.ready, call) for call in calls.values()], count, warmup, clock)
    comm.all_reduce(times, "max")
    return dict(zip(calls, np.median(times, 0).tolist(), strict=True))
