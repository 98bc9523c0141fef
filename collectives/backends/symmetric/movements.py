"""One-copy all_gather, all_to_all, broadcast, gather and scatter: they differ in who gives which part to whom."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.buffers import Buffer, unowned
from ...base.partition import Splits, ranges
from ...base.reduction import BoundCall
from ...memory.shared_memory import SharedMemory
from ..meeting import Entry, Meeting
from .group import Group, entry_of
from .operation import Operation, PartRanges
from .processor import Calls
from .staging import Stages

Array = np.ndarray[Any, Any]
_NOTHING = (0, 0)
_READ = 1 << 20  # bytes of a gather of symmetric arrays up to which the root reads them, and has them in its cache then


class Movements(Group):
    """The movements of a group."""

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Operation:
        """Each rank reads the others' x, or writes its own to theirs."""
        movement = PartRanges([(0, x.size)] * self.ranks, ranges(counts), 1)
        return self._move(entry_of("all_gather", out, elements=out.size), out, x, movement)

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Operation:
        """Each rank reads its part of the others' x, or writes its own to theirs."""
        movement = PartRanges(ranges(splits.send_counts), ranges(splits.recv_counts), self.ranks)
        return self._move(entry_of("all_to_all", x), out, x, movement)

    def broadcast(self, x: Buffer, root: int) -> Operation:
        """Each rank reads the root's."""
        everything, nothing = (0, x.size), [_NOTHING] * self.ranks
        leaving = [_NOTHING if peer == root else everything for peer in range(self.ranks)]
        arriving = [everything if peer == root else _NOTHING for peer in range(self.ranks)]
        movement = PartRanges(leaving, nothing, 1) if self.rank == root else PartRanges(nothing, arriving, 1)
        return self._move(entry_of("broadcast", x, root=root, elements=x.size), x, x, movement)

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Operation:
        """The others write their x to the root's out, all at once; the root reads small ones."""
        leaving = [(0, x.size) if peer == root else _NOTHING for peer in range(self.ranks)]
        arriving = [_NOTHING] * self.ranks if out is None else ranges(counts)
        return self._move(entry_of("gather", x, root=root), out, x, PartRanges(leaving, arriving, 1))

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Operation:
        """Each rank reads its part of the root's x."""
        leaving = [_NOTHING] * self.ranks if x is None else ranges(counts)
        arriving = [(0, out.size) if peer == root else _NOTHING for peer in range(self.ranks)]
        return self._move(entry_of("scatter", out, root=root), out, x, PartRanges(leaving, arriving, self.ranks))

    def _move(self, entry: Entry, out: Buffer | None, x: Buffer | None, movement: PartRanges) -> Operation:
        """Makes the call of a movement, which differs from others in who gives which part to whom."""
        some = x or out
        assert some is not None
        itemsize, me = some.dtype.itemsize, self.rank
        stages, staging = self._staged_movement(entry, some, out, x, movement), self.staging_of(entry)

        def own() -> Calls:
            (low, high), (start, stop) = movement.leaving[me], movement.arriving[me]
            return self._copied(x.flat[low:high], out.flat[start:stop]) if x and out and stop > start else []

        def program(meeting: Meeting) -> Calls | None:
            largest = meeting.largest()
            if not largest:
                return []
            if meeting.shared_output:  # one out for all: each puts its part there; if it is there, to meet was all
                return [] if meeting.in_place else [*own(), self._barrier]
            nbytes = itemsize * (entry.elements or largest * self.ranks)
            if self.takes_staged_way(meeting, entry, nbytes):
                stages.chunks = -(-largest // self._share(entry, some, movement))
                staged: BoundCall = (staging.run, (stages, some.dtype, meeting.filled))
                return [*own(), staged]
            if self._gives(meeting, entry, nbytes):
                calls = own()
                for peer, (low, high) in self._others(movement.leaving):
                    assert x is not None
                    calls.append(self._given(meeting, peer, x.flat[low:high]))
                return [*calls, self._barrier]
            if meeting.pull and meeting.push and self.processor.leader is not None:
                assert x is not None
                assert out is not None
                return [*self._all_moves(meeting, x, out), self._barrier]
            if meeting.pull:
                calls = own()
                assert x is not None
                sources = self._arrays(meeting, x)
                for peer, (low, high) in self._others(movement.arriving):
                    assert out is not None
                    start = meeting.leaving(peer, me)
                    calls += self._copied(sources[peer][start : start + high - low], out.flat[low:high])
                return [*calls, self._barrier]
            if meeting.push:
                calls = own()
                assert out is not None
                targets = self._arrays(meeting, out, outputs=True)
                for peer, (low, high) in self._others(movement.leaving):
                    assert x is not None
                    start = meeting.arriving(peer, me)
                    calls += self._copied(x.flat[low:high], targets[peer][start : start + high - low])
                return [*calls, self._barrier]
            assert self._peers is not None
            calls, places = own(), meeting.addresses(outputs=False)
            for peer, (low, high) in self._others(movement.arriving):
                assert out is not None
                place = places[peer] + meeting.leaving(peer, me) * itemsize
                calls.append(self._peers.read(peer, place, out.flat[low:high]))
            return [*calls, self._barrier]

        return Operation(self, entry, x, out, stages, program, movement)

    def _gives(self, meeting: Meeting, entry: Entry, nbytes: int) -> bool:
        """Returns whether ranks write to the output of others: in a large gather, so that not the root alone copies."""
        may = self._peers is not None and self.processor.leader is None and entry.operation == "gather"
        return may and (not meeting.pull or nbytes > _READ)

    def _given(self, meeting: Meeting, taker: int, source: Array) -> BoundCall:
        """Makes the call that writes this rank's part to the taker.

        That is a plain copy where this rank maps its memory, else the kernel's.
        """
        assert self._peers is not None
        offset = meeting.arriving(taker, self.rank) * source.itemsize
        by_kernel = self._peers.write(taker, meeting.addresses(outputs=True)[taker] + offset, source)
        number, place = meeting.output(taker)
        memory = self._allocator.find_by_number(number)
        if memory is None:
            return by_kernel
        target = unowned(memory.address + memory.offset(taker) + place + offset, source.size, source.dtype)
        return self._copy_while_mapped, (weakref.ref(memory), target, source, by_kernel)

    def _copy_while_mapped(
        self, memory: weakref.ref[SharedMemory], target: Array, source: Array, otherwise: BoundCall
    ) -> None:
        """target = source. memory: that of the target, which this rank may have freed, though its owner has not."""
        kept = memory()
        if kept is not None:
            self.processor.copy(target, source)
        else:
            function, arguments = otherwise
            function(*arguments)

    def _all_moves(self, meeting: Meeting, x: Buffer, out: Buffer) -> Calls:
        """The leader copies for every rank; the others do nothing."""
        calls: Calls = []
        if self.rank == self.processor.leader:
            sources, targets = self._arrays(meeting, x), self._arrays(meeting, out, outputs=True)
            for giver, source in enumerate(sources):
                for taker, target in enumerate(targets):
                    size, low = meeting.elements(giver, taker), meeting.leaving(giver, taker)
                    start = meeting.arriving(taker, giver)
                    if size:
                        calls += self._copied(source[low : low + size], target[start : start + size])
        return calls

    def _share(self, entry: Entry, data: Buffer, movement: PartRanges) -> int:
        """Elements of a chunk that one rank gets."""
        return max(1, self.staging_of(entry).chunk_bytes // data.dtype.itemsize // movement.fan)

    def _staged_movement(
        self, entry: Entry, some: Buffer, out: Buffer | None, x: Buffer | None, movement: PartRanges
    ) -> Stages:
        size = self._share(entry, some, movement)
        slots = [0] * self.ranks if movement.fan == 1 else [peer * size for peer in range(self.ranks)]
        leaving = {slots[peer]: movement.leaving[peer] for peer, _ in self._others(movement.leaving)}
        arriving, copy = self._others(movement.arriving), self.processor.copy

        def copy_in(chunk: int, scratch: list[Array]) -> Calls:
            calls: Calls = []
            for slot, (start, stop) in leaving.items():
                assert x is not None
                part = x.flat[min(start + chunk * size, stop) : min(start + (chunk + 1) * size, stop)]
                if part.size:
                    calls.append((copy, (scratch[self.rank][slot : slot + part.size], part)))
            return calls

        def copy_out(chunk: int, scratch: list[Array]) -> Calls:
            calls: Calls = []
            for peer, (start, stop) in arriving:
                assert out is not None
                part = out.flat[min(start + chunk * size, stop) : min(start + (chunk + 1) * size, stop)]
                slot = slots[self.rank]
                if part.size:
                    calls.append((copy, (part, scratch[peer][slot : slot + part.size])))
            return calls

        return Stages(1, [copy_in, copy_out])
