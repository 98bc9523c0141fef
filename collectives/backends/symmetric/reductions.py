"""One-copy all_reduce, reduce, reduce_scatter, scan and exscan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.buffers import Buffer, DType
from ...base.partition import nth_pieces, ranges
from ...base.reduction import Reduction
from ..meeting import Entry, Meeting, Ranges, parts_of
from .group import Group, entry_of
from .operation import Operation
from .processor import Calls
from .staging import Stages

Array = np.ndarray[Any, Any]

_DIRECT_BLOCK = 512 << 10  # bytes of all ranks' blocks that are reduced at a time


class Reductions(Group):
    """The reductions of a group."""

    def all_reduce(self, x: Buffer, op: Reduction) -> Operation:
        """Each rank reduces its slice of all inputs and stores it into all outputs."""
        return self._reduce(entry_of("all_reduce", x, op, elements=x.size), x, op, range(self.ranks))

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Operation:
        """Each rank reduces its slice of all inputs and stores it into the root's."""
        return self._reduce(entry_of("reduce", x, op, root, x.size), x, op, (root,))

    def _reduce(self, entry: Entry, x: Buffer, op: Reduction, takers: Sequence[int]) -> Operation:
        takes = self.rank in takers
        first, last = ranges(self.slices(x.size))[self.rank]
        factors = [op.factor] * self.ranks

        def program(meeting: Meeting) -> Calls | None:
            factors[:] = meeting.factors
            if self.takes_staged_way(meeting, entry, x.nbytes):
                return None
            if meeting.pull:
                whole = [a[first:last] for a in self._arrays(meeting, x)]
                calls = self.processor.calls(op, whole, [whole[taker] for taker in takers], x.dtype, factors)
                return [*calls, self._barrier]
            return self._reduce_direct(meeting, x, (first, last), x.part(first, last) if takes else None, op, takers)

        if 0 < x.nbytes <= self.staged.whole:
            stages = self._whole(x, op, takers, factors)
        else:
            stages = self._slices(x, op, takers, factors, self.staging_of(entry).chunk_bytes)
        return Operation(self, entry, x, None, stages, program)

    def _whole(self, x: Buffer, op: Reduction, takers: Sequence[int], factors: Sequence[float]) -> Stages:
        """Each taker reduces all of x: more work than a slice of it, and one meeting less.

        All of them make the same calls on the same memory, which gives the same bits, of NaNs too.
        """
        me, takes = self.rank, self.rank in takers

        def copy_in(chunk: int, scratch: list[Array]) -> Calls:
            return [(self.processor.copy, (scratch[me][: x.size], x.flat))]

        def work(chunk: int, scratch: list[Array]) -> Calls:
            inputs = [s[: x.size] for s in scratch]
            return self.processor.calls(op, inputs, [x.flat], x.dtype, factors) if takes else []

        return Stages(1, [copy_in, work])

    def _slices(
        self, x: Buffer, op: Reduction, takers: Sequence[int], factors: Sequence[float], chunk_bytes: int
    ) -> Stages:
        """Each rank reduces its slice of each chunk, into the scratch, and the takers copy the others' slices out."""
        size = chunk_bytes // x.dtype.itemsize
        me, takes = self.rank, self.rank in takers
        copy = self.processor.copy

        def slices(chunk: int) -> tuple[Array, slice, list[slice]]:
            """The chunk of x, this rank's slice of it, and what lies before and after that."""
            part = x.flat[chunk * size : (chunk + 1) * size]
            low, high = ranges(self.slices(part.size))[me]
            rest = [run for run in (slice(0, low), slice(high, part.size)) if run.stop > run.start]
            return part, slice(low, high), rest

        def copy_in(chunk: int, scratch: list[Array]) -> Calls:
            part, _, rest = slices(chunk)
            return [(copy, (scratch[me][run], part[run])) for run in rest]

        def work(chunk: int, scratch: list[Array]) -> Calls:
            part, mine, _ = slices(chunk)
            inputs = [s[mine] for s in scratch]
            inputs[me] = part[mine]
            # Only this rank reads its slice of anyone's scratch, so that all results can take the place of rank 0's.
            outputs = [scratch[0][mine]] if any(taker != me for taker in takers) else []
            outputs = [part[mine], *outputs] if takes else outputs
            return self.processor.calls(op, inputs, outputs, x.dtype, factors)

        def copy_out(chunk: int, scratch: list[Array]) -> Calls:
            part, _, rest = slices(chunk)
            return [(copy, (part[run], scratch[0][run])) for run in rest] if takes else []

        return Stages(-(-x.size // size), [copy_in, work, copy_out])

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Operation:
        """Each rank reduces its part of all inputs."""
        parts, me = ranges(counts), self.rank
        entry = entry_of("reduce_scatter", x, op, elements=x.size, parts=parts_of(counts))
        size = max(1, self.staging_of(entry).chunk_bytes // x.dtype.itemsize // self.ranks)
        factors = [op.factor] * self.ranks
        copy = self.processor.copy

        def copy_in(chunk: int, scratch: list[Array]) -> Calls:
            return [
                (copy, (scratch[me][peer * size : peer * size + high - low], x.flat[low:high]))
                for peer, (low, high) in enumerate(nth_pieces(parts, chunk, size))
                if peer != me and high > low
            ]

        def work(chunk: int, scratch: list[Array]) -> Calls:
            low, high = nth_pieces(parts, chunk, size)[me]
            inputs = [s[me * size : me * size + high - low] for s in scratch]
            inputs[me] = x.flat[low:high]
            target = out.flat[low - parts[me][0] : high - parts[me][0]]
            return self.processor.calls(op, inputs, [target], x.dtype, factors)

        def program(meeting: Meeting) -> Calls | None:
            factors[:] = meeting.factors
            if self.takes_staged_way(meeting, entry, x.nbytes):
                return None
            if self.processor.leader is not None and meeting.scatters_in_place(parts):
                calls = self._all_parts(self._arrays(meeting, x), parts, op, x.dtype, factors)
                return [*calls, self._barrier]
            if meeting.pull:
                mine = [a[slice(*parts[me])] for a in self._arrays(meeting, x)]
                return [*self.processor.calls(op, mine, [out.flat], x.dtype, factors), self._barrier]
            return self._reduce_direct(meeting, x, parts[me], out, op, ())

        stages = Stages(-(-max(counts) // size), [copy_in, work])
        return Operation(self, entry, x, None, stages, program, private_out=out)

    def scan(self, x: Buffer, op: Reduction) -> Operation:
        """Each rank reduces the inputs of the ranks up to itself."""
        return self._prefix("scan", x, op, self.rank + 1)

    def exscan(self, x: Buffer, op: Reduction) -> Operation:
        """Each rank reduces the inputs of the ranks before it."""
        return self._prefix("exscan", x, op, self.rank)

    def _prefix(self, operation: str, x: Buffer, op: Reduction, count: int) -> Operation:
        """Each rank reduces the first `count` ranks' inputs; through the scratch, as results take the inputs' place."""
        entry, me, is_last = entry_of(operation, x, op, elements=x.size), self.rank, self.rank == self.ranks - 1
        size = self.staging_of(entry).chunk_bytes // x.dtype.itemsize
        factors = [op.factor] * self.ranks

        def calls(inputs: list[Array], out: Array) -> Calls:
            if not inputs or (operation == "scan" and count == 1 and not op.premultiplied):
                return []  # x stays as it is
            return self.processor.calls(op, inputs, [out], x.dtype, factors)

        def copy_in(chunk: int, scratch: list[Array]) -> Calls:
            part = x.flat[chunk * size : (chunk + 1) * size]
            return [] if is_last else [(self.processor.copy, (scratch[me][: part.size], part))]

        def work(chunk: int, scratch: list[Array]) -> Calls:
            part = x.flat[chunk * size : (chunk + 1) * size]
            return calls([part if rank == me else scratch[rank][: part.size] for rank in range(count)], part)

        def program(meeting: Meeting) -> Calls | None:
            factors[:] = meeting.factors
            if self.staging_of(entry).is_possible():
                return None
            assert self._peers is not None
            itemsize, places, take = x.dtype.itemsize, meeting.addresses(outputs=False), self.processor.blocks.take
            blocks = [take(f"rank {rank}", _DIRECT_BLOCK).view(x.dtype.storage) for rank in range(count)]
            steps: Calls = []
            for low in range(0, x.size, _DIRECT_BLOCK // itemsize):
                part = x.flat[low : low + _DIRECT_BLOCK // itemsize]
                inputs = [part if rank == me else blocks[rank][: part.size] for rank in range(count)]
                for rank, read in enumerate(inputs):
                    if rank != me:
                        steps.append(self._peers.read(rank, places[rank] + low * itemsize, read))
                steps += [self._barrier, *calls(inputs, part)]
            return steps

        return Operation(self, entry, x, None, Stages(-(-x.size // size), [copy_in, work]), program)

    def _all_parts(
        self, arrays: list[Array], parts: Ranges, op: Reduction, dtype: DType, factors: Sequence[float]
    ) -> Calls:
        """The leader reduces every rank's part, in place of the part of that rank's array; the others do nothing."""
        calls: Calls = []
        for rank in range(self.ranks) if self.rank == self.processor.leader else ():
            inputs = [a[slice(*parts[rank])] for a in arrays]
            calls += self.processor.calls(op, inputs, [inputs[rank]], dtype, factors)
        return calls

    def _reduce_direct(
        self, meeting: Meeting, x: Buffer, part: Sequence[int], out: Buffer | None, op: Reduction, takers: Sequence[int]
    ) -> Calls:
        """Reduces elements part[0] <= i < part[1] of all inputs, in blocks, into out and into the takers' x."""
        assert self._peers is not None
        itemsize, me, factors = x.dtype.itemsize, self.rank, meeting.factors
        places = meeting.addresses(outputs=False)
        size = max(_DIRECT_BLOCK // self.ranks, _DIRECT_BLOCK // 8) // itemsize
        take, storage = self.processor.blocks.take, x.dtype.storage
        blocks = [take(f"rank {rank}", size * itemsize).view(storage) for rank in range(self.ranks + 1)]
        first, last = part
        program: Calls = []
        for low in range(first, last, size):
            high = min(low + size, last)
            inputs = [x.flat[low:high] if peer == me else blocks[peer][: high - low] for peer in range(self.ranks)]
            for peer, block in enumerate(inputs):
                if peer != me:
                    program.append(self._peers.read(peer, places[peer] + low * itemsize, block))
            result = blocks[-1][: high - low] if out is None else out.flat[low - first : high - first]
            program += self.processor.calls(op, inputs, [result], x.dtype, factors)
            for taker in takers:
                if taker != me:
                    program.append(self._peers.write(taker, places[taker] + low * itemsize, result))
        return [*program, self._barrier]
