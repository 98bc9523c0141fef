"""Schedules of messages as backends, one for each algorithm of `algorithms`; `executor` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..base.buffers import Buffer, DType
from ..base.partition import Splits, even_counts, even_pieces
from ..base.reduction import Reduction
from ..schedules import algorithms
from ..schedules.algorithms import ALGORITHMS, EVEN_ONLY
from ..schedules.schedule import Role, Schedule
from .backend import Backend, Call, Resources
from .executor import Execution, Region, single, whole


class ScheduleBackend(Backend):
    """The operations by the schedules of one name."""

    def __init__(self, name: str, resources: Resources) -> None:
        self.name = name
        self._comm, self._scratch = resources.comm, resources.scratch
        self._rank, self._size = resources.comm.Get_rank(), resources.comm.Get_size()

    def serves(self, operation: str) -> bool:
        """Returns whether there is such a schedule."""
        return self.name in ALGORITHMS.get(operation, ())

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Declines different cuts on the ranks where the schedule needs the same on all."""
        return even or (operation, self.name) not in EVEN_ONLY

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        """Reduces and distributes every chunk by the schedule."""
        return self._in_place("all_reduce", x, op)

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Call:
        """Reduces every rank's part by the schedule, which cuts it into pieces."""
        schedule = self._schedule("reduce_scatter")
        chunks = even_pieces(counts, schedule.pieces)
        own = single(out, self._rank, self._size, schedule.pieces)
        return self._call(schedule, whole(x, chunks), own, chunks, op)

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Call:
        """Reduces every chunk as it travels to the root."""
        schedule = self._schedule("reduce", root, x.nbytes)
        counts = even_counts(x.size, schedule.chunks)
        out = whole(x, counts) if self._rank == root else None
        return self._call(schedule, whole(x, counts), out, counts, op)

    def scan(self, x: Buffer, op: Reduction) -> Call:
        """Reduces the prefix of every chunk."""
        return self._in_place("scan", x, op)

    def exscan(self, x: Buffer, op: Reduction) -> Call:
        """Reduces the prefix of every chunk without this rank's own."""
        return self._in_place("exscan", x, op)

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Call:
        """Gathers every rank's part by the schedule, which cuts it into pieces."""
        schedule = self._schedule("all_gather")
        chunks = even_pieces(counts, schedule.pieces)
        own = single(x, self._rank, self._size, schedule.pieces)
        return self._call(schedule, own, whole(out, chunks), chunks)

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """Sends a chunk from each rank to each."""
        schedule = self._schedule("all_to_all")
        return self._call(schedule, whole(x, splits.send_counts), whole(out, splits.recv_counts), splits.send_counts)

    def broadcast(self, x: Buffer, root: int) -> Call:
        """Sends every chunk from the root to all."""
        schedule = self._schedule("broadcast", root, x.nbytes)
        counts = even_counts(x.size, schedule.chunks)
        return self._call(schedule, None, whole(x, counts), counts)

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """Sends a chunk from each rank to the root."""
        own = single(x, self._rank, self._size)
        return self._call(self._schedule("gather", root), own, None if out is None else whole(out, counts), counts)

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """Sends a chunk from the root to each rank."""
        own = single(out, self._rank, self._size)
        return self._call(self._schedule("scatter", root), None if x is None else whole(x, counts), own, counts)

    def _in_place(self, operation: str, x: Buffer, op: Reduction) -> Call:
        schedule = self._schedule(operation, nbytes=x.nbytes)
        counts = even_counts(x.size, schedule.chunks)
        return self._call(schedule, whole(x, counts), whole(x, counts), counts, op)

    def _schedule(self, operation: str, root: int = 0, nbytes: int = 0) -> Schedule:
        return algorithms.schedule(operation, self.name, self._size, root, nbytes)

    def _call(
        self,
        schedule: Schedule,
        source: Region | None,
        target: Region | None,
        counts: Sequence[int],
        op: Reduction | None = None,
    ) -> Call:
        given = {Role.IN: source, Role.OUT: target}
        regions = {role: region for role, region in given.items() if region is not None}
        return partial(_run, self._comm, schedule, regions, counts, self._scratch, op)


def _run(comm: Any, schedule: Schedule, regions: dict[Role, Region], *rest: Any) -> None:
    """Runs a schedule once; an Execution adds the region of its work."""
    Execution(comm, schedule, dict(regions), *rest).run()
