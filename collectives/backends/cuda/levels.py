"""Collectives over islands of GPUs that do not reach each other: ipc inside each, messages between them.

    all-reduce, 2 islands of 2 ranks; rank r works on slice r mod 2 only, which crosses the network once an island

                    island 0                island 1
        1           0 <---- ipc ----> 1     2 <---- ipc ----> 3       reduce-scatter inside the island
        2           0 <--------------------> 2                        all-reduce of slice 0, staged or aware
                    1 <--------------------------------------> 3      all-reduce of slice 1, at the same time
        3           0 <---- ipc ----> 1     2 <---- ipc ----> 3       all-gather inside the island

Islands are hosts as a rule, and on one host GPUs that cannot map each other's memory. It is what the hierarchical
collectives of the host do, each level a group with its own transport; events order what they queue on streams.

What is reduced inside an island goes on in the accumulating dtype, fp32 for fp16 and bf16, and is averaged and rounded
when it is complete. A large array goes in chunks: one is reduced inside the islands while another is between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, Protocol

import numpy as np

from ...base.buffers import Buffer, DType, unowned
from ...base.partition import even_counts
from ...base.reduction import Reduction, operator_on_partials, partial_of
from ..hierarchical.hierarchy import Hierarchy
from .device import Device, Event
from .memory import DeviceMemory, Retired, own_memory
from .task import Enqueue

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
CHUNK_BYTES = 64 << 20  # of the array


@dataclass(frozen=True)
class _ChunkSteps:
    """The steps of a chunk of an all-reduce: inside, between the islands, and inside again."""

    reduce: Enqueue
    across: Enqueue
    finish: Enqueue
    gather: Enqueue


class Level(Protocol):
    """A group of ranks with a transport of its own (`group.GpuGroup`)."""

    rank: int
    size: int

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """The operation, to be given to `run` again and again. Collective."""

    def run(self, prepared: Enqueue, begin: Event) -> Event:
        """Carries it out after an event; gives that of its end. Collective."""


class Levels:
    """The operations of one group.

    inner: of this rank's island.
    outer: of the ranks in its place of every island.
    """

    def __init__(self, inner: Level, outer: Level, device: Device, retired: Retired) -> None:
        self.inner, self.outer = inner, outer
        self._device, self._retired = device, retired
        self._stream = device.stream()
        self._memory: dict[str, DeviceMemory] = {}

    def serves(self, operation: str, algorithm: str) -> bool:
        """Implements `Transport.serves`."""
        return algorithm in ("auto", Hierarchy.name) and operation in OPERATIONS

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """Implements `Transport.prepare`."""
        steps: Enqueue = getattr(self, f"_{operation}")(*arguments)

        def run(begin: Event) -> Event:
            self._stream.wait(begin)  # and comes after what is still in the memory that operations share
            self._stream.wait(steps(self._stream.record()))
            return self._stream.record()

        return run

    def _all_reduce(self, x: Buffer, op: Reduction) -> Enqueue:
        size = CHUNK_BYTES // x.dtype.itemsize
        starts = range(0, x.size, size)
        chunks = [
            self._chunk(x.part(start, min(start + size, x.size)), op, turn % 2) for turn, start in enumerate(starts)
        ]

        def run(begin: Event) -> Event:
            reduced = deque(self.inner.run(chunk.reduce, begin) for chunk in chunks[:1])
            end = begin
            for chunk, following in zip_longest(chunks, chunks[1:]):
                if following is not None:
                    reduced.append(self.inner.run(following.reduce, begin))
                complete = chunk.finish(self.outer.run(chunk.across, reduced.popleft()))
                end = self.inner.run(chunk.gather, complete)
            return end

        return run

    def _chunk(self, x: Buffer, op: Reduction, turn: int) -> _ChunkSteps:
        counts, me = even_counts(x.size, self.inner.size), self.inner.rank
        start = sum(counts[:me])
        mine = x.part(start, start + counts[me])
        own = mine if not x.dtype.widened else self._take(f"slice {turn}", counts[me], x.dtype.wide)
        return _ChunkSteps(
            self.inner.prepare("reduce_scatter", "auto", (own, x, partial_of(op), counts)),
            self.outer.prepare("all_reduce", "auto", (own, operator_on_partials(op))),
            partial(self._finish, op, own, mine),
            self.inner.prepare("all_gather", "auto", (x, mine, counts)),
        )

    def _reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Enqueue:
        mine = self._of_place(counts)
        island = self._take("partial", sum(mine), x.dtype.wide)
        own = out if not x.dtype.widened else self._take("own", out.size, x.dtype.wide)
        inside = [
            self.inner.prepare("reduce_scatter", "auto", (here, x.part(first, last), partial_of(op), within))
            for here, (first, last), within in self._islands(island, counts)
        ]
        across = self.outer.prepare("reduce_scatter", "auto", (own, island, operator_on_partials(op), mine))

        def run(begin: Event) -> Event:
            for step in inside:
                begin = self.inner.run(step, begin)
            return self._finish(op, own, out, self.outer.run(across, begin))

        return run

    def _all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Enqueue:
        mine = self._of_place(counts)
        gathered = self._take("gathered", sum(mine), x.dtype)
        across = self.outer.prepare("all_gather", "auto", (gathered, x, mine))
        inside = [
            self.inner.prepare("all_gather", "auto", (out.part(first, last), here, within))
            for here, (first, last), within in self._islands(gathered, counts)
        ]

        def run(begin: Event) -> Event:
            end = self.outer.run(across, begin)
            for step in inside:
                end = self.inner.run(step, end)
            return end

        return run

    def _broadcast(self, x: Buffer, root: int) -> Enqueue:
        island, place = divmod(root, self.inner.size)
        across = self.outer.prepare("broadcast", "auto", (x, island)) if self.inner.rank == place else None
        inside = self.inner.prepare("broadcast", "auto", (x, place))

        def run(begin: Event) -> Event:
            return self.inner.run(inside, begin if across is None else self.outer.run(across, begin))

        return run

    def _finish(self, op: Reduction, accumulated: Buffer, out: Buffer, begin: Event) -> Event:
        if accumulated is out and not op.averages:
            return begin
        self._stream.wait(begin)
        ranks = self.inner.size * self.outer.size
        self._device.finish(op, out.dtype, accumulated.address, out.address, out.size, ranks, self._stream)
        return self._stream.record()

    def _of_place(self, counts: Sequence[int]) -> list[int]:
        """The counts of the ranks in this rank's place of every island, out of those of all ranks."""
        return list(counts[self.inner.rank :: self.inner.size])

    def _islands(self, own: Buffer, counts: Sequence[int]) -> list[tuple[Buffer, tuple[int, int], Sequence[int]]]:
        """Lists for each island its part of `own`, its range in the whole array, and its ranks' counts."""
        size, mine = self.inner.size, (0, *accumulate(self._of_place(counts)))
        starts = (0, *accumulate(counts))
        return [
            (
                own.part(mine[island], mine[island + 1]),
                (starts[island * size], starts[(island + 1) * size]),
                counts[island * size : (island + 1) * size],
            )
            for island in range(self.outer.size)
        ]

    def _take(self, purpose: str, size: int, dtype: DType) -> Buffer:
        """Memory that operations use in turn, and that grows to the largest. It lives as long as the Buffer."""
        nbytes = size * dtype.itemsize
        if not size:
            return Buffer(np.empty(0, dtype.storage), dtype)
        memory = self._memory.get(purpose)
        if memory is None or len(memory) < nbytes:
            memory = self._memory[purpose] = own_memory(self._device, self._retired, nbytes)
        return Buffer(unowned(memory.address, size, dtype.storage), dtype, memory)

    def close(self) -> None:
        """Implements `Transport.close`; the levels are closed by their group."""
        self._stream.record().wait()
        self._memory.clear()
