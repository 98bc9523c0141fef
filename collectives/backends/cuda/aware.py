"""The aware transport: device addresses for an MPI library that takes them.

Movements are the library's own. Of reductions it only moves the parts; they are added here, in the order of ranks:

    x of each rank     | a | b | c |        parts go to their rank (all_to_all), one kernel combines what came,
                         \\  |  /            and where all want the result, the parts go to all (all_gather)
    scratch of rank 0  | a0| a1| a2|

So every element type and operator is served, results are the same bits on every rank, and each link carries as little
as it can. The library knows nothing of streams: the host waits for what comes before, and for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer
from ...base.partition import Range, even_counts
from ...base.reduction import Reduction
from ..mpi import Library, datatype
from .chunks import chunk_ranges
from .device import Device, Event
from .host import Host
from .memory import Retired, own_memory
from .task import Enqueue

SCRATCH_BYTES = 64 << 20


class Aware:
    """The operations of one group whose MPI library reaches GPU memory. Collective."""

    def __init__(self, host: Host, device: Device, retired: Retired) -> None:
        self._comm, self._device = host.comm, device
        self._library = Library(host.comm)
        self._rank, self._ranks = host.rank, host.size
        self._stream = device.stream()
        self._retired = retired
        self._scratch: Any = None

    def serves(self, operation: str, algorithm: str) -> bool:
        """Implements `Transport.serves`."""
        return algorithm in ("auto", Library.name) and operation not in ("scan", "exscan")

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """Implements `Transport.prepare`."""
        return partial(self._run, operation, arguments)

    def close(self) -> None:
        """Implements `Transport.close`; there is nothing to give back."""

    def _run(self, operation: str, arguments: tuple[Any, ...], begin: Event) -> Event:
        begin.wait()
        if operation == "all_reduce":
            self._reduce_slices(arguments[0], arguments[1], None)
        elif operation == "reduce":
            self._reduce_slices(arguments[0], arguments[2], arguments[1])
        elif operation == "reduce_scatter":
            out, x, op, counts = arguments
            start = sum(counts[: self._rank])
            for parts in chunk_ranges(counts, SCRATCH_BYTES // x.dtype.itemsize):
                first = parts[self._rank][0]
                self._combine(x, parts, op, out.address + (first - start) * x.dtype.itemsize)
        else:
            seen = [self._for_mpi(given) if isinstance(given, Buffer) else given for given in arguments]
            getattr(self._library, operation)(*seen)()
        return self._stream.record()

    def _reduce_slices(self, x: Buffer, op: Reduction, root: int | None) -> None:
        """The reduction of all x, in place, on the root or on all."""
        for parts in chunk_ranges(even_counts(x.size, self._ranks), SCRATCH_BYTES // x.dtype.itemsize):
            first, last = parts[self._rank]
            takes = root is None or root == self._rank
            done: Any = MPI.IN_PLACE
            if takes:
                self._combine(x, parts, op, x.address + first * x.dtype.itemsize)
            else:
                result = self._combine(x, parts, op, None)
                done = [self._device.for_mpi(result, (last - first) * x.dtype.itemsize), datatype(x.dtype)]
            whole = self._parts_for_mpi(x, parts)
            if root is None:
                self._comm.Allgatherv(MPI.IN_PLACE, whole)
            else:
                self._comm.Gatherv(done, whole if takes else None, root)

    def _combine(self, x: Buffer, parts: Sequence[Range], op: Reduction, target: int | None) -> int:
        """Reduces this rank's part of all x to an address, by default in scratch; gives the address."""
        first, last = parts[self._rank]
        size, itemsize = last - first, x.dtype.itemsize
        scratch, nbytes = self._memory(), (last - first) * itemsize
        came = [scratch + rank * nbytes for rank in range(self._ranks)]
        counts = [size] * self._ranks
        memory = self._device.for_mpi(scratch, nbytes * self._ranks)
        self._comm.Alltoallv(self._parts_for_mpi(x, parts), [memory, counts, datatype(x.dtype)])
        factors = self._comm.allgather(op.factor) if op.premultiplied else [1.0] * self._ranks
        found = came[0] if target is None else target
        self._device.combine(op, x.dtype, came, [found], size, factors, self._stream)
        self._stream.record().wait()
        return found

    def _parts_for_mpi(self, x: Buffer, parts: Sequence[Range]) -> list[Any]:
        """The arguments by which MPI takes parts of an array."""
        counts, starts = [last - first for first, last in parts], [first for first, _ in parts]
        return [self._device.for_mpi(x.address, x.nbytes), counts, starts, datatype(x.dtype)]

    def _for_mpi(self, data: Buffer) -> Buffer:
        """The array at the address by which the MPI library reaches it."""
        if not data.size:
            return Buffer(np.empty(0, data.flat.dtype), data.dtype)
        memory = self._device.for_mpi(data.address, data.nbytes)
        return Buffer(np.frombuffer(memory, data.flat.dtype), data.dtype)

    def _memory(self) -> int:
        if self._scratch is None:
            self._scratch = own_memory(self._device, self._retired, SCRATCH_BYTES)
        return int(self._scratch.address)
