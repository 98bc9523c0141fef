"""The staged transport: GPU memory goes through pinned host memory, where the collectives of the host work on it.

Chunks take turns in three slots, so that at any time one is copied to the host, one is sent or reduced, and one is
copied back; GPUs copy in both directions at once:

    to the host      |   A     |   B     |   C     |   A     |
    host's operation |         |   A     |   B     |   C     |
    to the GPU       |         |         |   A     |   B     |

The slots are symmetric memory of the host where the node has such, so that the host's operation is the one-copy one, or
over several nodes the hierarchical one. The host waits for a chunk's arrival by its event, and queues its copy back; a
slot is filled again after the event of its last copy back.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...base.buffers import Buffer, DType, address
from ...base.reduction import Reduction
from . import chunks
from .chunks import Chunk, CopyPiece
from .device import Device, Event, Stream
from .host import Host
from .task import Enqueue

SLOT_BYTES = 4 << 20
_SLOTS = 3
_KEPT_CALLS = 512


class Staged:
    """The staged operations of one group. host: the group's operations on host memory. Collective."""

    def __init__(self, host: Host, device: Device) -> None:
        self._host, self._device = host, device
        self._down, self._up = device.stream(), device.stream()
        memory = _pinned_memory(host, device)
        self._slots = [memory[slot * SLOT_BYTES :][:SLOT_BYTES] for slot in range(_SLOTS)]
        self._unpin = weakref.finalize(self, _unpin, device, self._up, memory)
        self._unpin.atexit = False
        self._freed: list[Event | None] = [None] * _SLOTS
        self._turn = 0
        self._calls: dict[tuple[Any, ...], Callable[[], None]] = {}

    def serves(self, operation: str, algorithm: str) -> bool:
        """Implements `Transport.serves`."""
        return True

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """Implements `Transport.prepare`."""
        return partial(self._run, operation, algorithm, arguments)

    def close(self) -> None:
        """Implements `Transport.close`."""
        self._unpin()

    def _run(self, operation: str, algorithm: str, arguments: tuple[Any, ...], begin: Event) -> Event:
        try:
            return self._run_chunks(operation, algorithm, arguments, begin)
        except BaseException:
            # The arrays are the caller's again, whose stream waits for none of the copies.
            with contextlib.suppress(Exception):  # where it is the GPU that has failed
                for stream in (self._down, self._up):
                    stream.record().wait()
            raise

    def _run_chunks(self, operation: str, algorithm: str, arguments: tuple[Any, ...], begin: Event) -> Event:
        arrays = {"x": _input(operation, arguments), "out": _output(arguments)}
        some = arrays["x"] or arrays["out"]
        assert some is not None
        plan = self._plan(operation, arguments, some.dtype)
        self._down.wait(begin)
        self._up.wait(begin)
        if plan.own is not None:
            self._keep_own(arrays["x"], arrays["out"], plan.own)
        under_way: tuple[Chunk, int, Event] | None = None
        for chunk in (*plan.chunks, None):
            begun = self._fetch(chunk, arrays["x"], some.dtype) if chunk is not None else None
            if under_way is not None:
                done, slot, arrived = under_way
                arrived.wait()
                self._call(operation, algorithm, done, slot, some.dtype, arguments)()
                self._deliver(done, slot, arrays["out"], some.dtype)
            under_way = begun
        return self._up.record()

    def _plan(self, operation: str, arguments: tuple[Any, ...], dtype: DType) -> chunks.StagingPlan:
        comm, largest = self._host.comm, 0
        if operation == "all_to_all":
            largest = max(arguments[2].send_counts)
            if not arguments[2].uniform:  # each rank knows its own parts alone
                largest = max(comm.allgather(largest))
        return chunks.plan(operation, comm.rank, SLOT_BYTES // dtype.itemsize, arguments, largest)

    def _keep_own(self, x: Buffer | None, out: Buffer | None, own: tuple[int, int, int]) -> None:
        first, last, place = own
        assert x is not None
        assert out is not None
        if last > first:
            size = x.dtype.itemsize
            target, source = out.address + place * size, x.address + first * size
            if target != source:
                self._device.copy(target, source, (last - first) * size, self._up)

    def _fetch(self, chunk: Chunk, x: Buffer | None, dtype: DType) -> tuple[Chunk, int, Event]:
        """Queues the copies to the host."""
        slot = self._turn
        self._turn = (slot + 1) % _SLOTS
        freed = self._freed[slot]
        if freed is not None:
            self._down.wait(freed)
        for piece in chunk.gives:
            assert x is not None
            there, here, nbytes = self._places(piece, x, slot, dtype)
            self._device.copy(here, there, nbytes, self._down)
        return chunk, slot, self._down.record()

    def _deliver(self, chunk: Chunk, slot: int, out: Buffer | None, dtype: DType) -> None:
        """Queues the copies back to the GPU."""
        for piece in chunk.takes:
            assert out is not None
            there, here, nbytes = self._places(piece, out, slot, dtype)
            self._device.copy(there, here, nbytes, self._up)
        self._freed[slot] = self._up.record()

    def _places(self, piece: CopyPiece, array: Buffer, slot: int, dtype: DType) -> tuple[int, int, int]:
        """Addresses on the GPU and on the host, and bytes."""
        size = dtype.itemsize
        here = address(self._slots[slot]) + piece.place * size
        return array.address + piece.first * size, here, (piece.last - piece.first) * size

    def _call(
        self, operation: str, algorithm: str, chunk: Chunk, slot: int, dtype: DType, arguments: tuple[Any, ...]
    ) -> Callable[[], None]:
        """The host's operation, prepared once for each slot and shape of chunk."""
        rest = tuple(a for a in arguments if not isinstance(a, (Buffer, list, tuple)) and a is not None)
        if operation == "all_to_all":
            rest = (arguments[2].uniform,)
        shape = chunk.x, chunk.out, chunk.counts, chunk.arriving
        key = operation, algorithm, slot, dtype, shape, rest
        call = self._calls.get(key)
        if call is None:
            memory = Buffer(self._slots[slot].view(dtype.storage), dtype)
            given = chunks.on_host(operation, chunk, memory, arguments)
            op = next((a for a in given if isinstance(a, Reduction)), None)
            even = operation != "all_to_all" or arguments[2].uniform
            nbytes = chunk.elements * dtype.itemsize
            chosen = self._host.selection.choose(operation, algorithm, dtype, nbytes, op, even)
            call = self._host.call(operation, chosen, given)
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.clear()
            self._calls[key] = call
        return call


def _input(operation: str, arguments: tuple[Any, ...]) -> Buffer | None:
    """The array that is read."""
    found = arguments[0] if operation in chunks.IN_PLACE else arguments[1]
    return found if isinstance(found, Buffer) else None


def _output(arguments: tuple[Any, ...]) -> Buffer | None:
    """The array that is written."""
    return arguments[0] if isinstance(arguments[0], Buffer) else None


def _pinned_memory(host: Host, device: Device) -> np.ndarray[Any, Any]:
    """Memory of all slots: symmetric where ranks share such and it can be pinned, else this process's own.

    Where it lies in a file on a disk, for want of room, it cannot: the kernel keeps no such page in place for a GPU.
    """
    nbytes = _SLOTS * SLOT_BYTES
    memory = host.allocator.allocate(nbytes) if host.topology.local_size > 1 else None
    if memory is not None:
        shared = memory.view(host.topology.local_rank, 0, nbytes, np.dtype(np.uint8))
        with contextlib.suppress(OSError):
            device.pin(address(shared), nbytes)
            return shared
    own = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    device.pin(address(own), nbytes)
    return own


def _unpin(device: Device, stream: Stream, memory: np.ndarray[Any, Any]) -> None:
    """Unpins the memory once all copies have ended; the memory itself is freed afterwards."""
    with device.current():
        stream.record().wait()
        device.unpin(address(memory))
