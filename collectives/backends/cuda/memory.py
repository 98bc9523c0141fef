"""GPU memory that the ranks of a node reach directly: each maps the others' allocations by their IPC handles.

    symmetric (`comm.empty`)      every rank allocates, exports, and opens all others' allocations
    shared (`comm.shared`)        rank 0 allocates and exports, and all others open that

Memory must not go while another process has it open, and ranks drop their arrays at different times. So an allocation
goes in two steps: when a rank drops it, it closes the others' mappings and says so on a page of host memory, one for
each allocation; its own part is freed when all have said so. Both happen at the next operation of any group on that
GPU, never inside Python's garbage collection, and without any rank waiting for another.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import unowned
from ...memory.shared_memory import Allocator, SharedMemory
from .device import Device

_ALIGNMENT = 2 << 20  # bytes; the driver packs smaller ones together, and would export their neighbours with them


@dataclass
class Dropped:
    """An allocation that this rank no longer uses, and others may still have mapped.

    own: address of its own part, or 0.
    closed: where each of so many ranks writes that it has closed its mappings.
    """

    own: int
    opened: list[int]
    closed: SharedMemory | None = None
    rank: int = 0
    ranks: int = 1

    def close(self, device: Device) -> None:
        """Ends this rank's mappings."""
        for address in self.opened:
            device.close(address)
        self.opened = []
        if self.closed is not None:
            self.closed[self.rank] = 1

    def is_free(self) -> bool:
        """Returns whether no rank has it open any more."""
        return self.closed is None or all(self.closed[: self.ranks])


class Retired:
    """The allocations on one GPU that this process has dropped."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._dropped: deque[Dropped] = deque()  # by finalizers, in any thread
        self._waiting: list[Dropped] = []
        self._sweeping = threading.Lock()

    def add(self, dropped: Dropped) -> None:
        """Keeps a dropped allocation for `sweep`; calls no driver, as finalizers run it."""
        self._dropped.append(dropped)

    def sweep(self) -> None:
        """Closes and frees what can be, unless another thread is at it."""
        if not (self._dropped or self._waiting) or not self._sweeping.acquire(blocking=False):
            return
        try:
            self._sweep()
        finally:
            self._sweeping.release()

    def _sweep(self) -> None:
        if self._dropped:
            self._device.synchronize()  # whatever still uses it
            while self._dropped:
                dropped = self._dropped.popleft()
                dropped.close(self._device)
                self._waiting.append(dropped)
        if self._waiting:
            for dropped in self._waiting:
                if dropped.own and dropped.is_free():
                    self._device.free(dropped.own)
                    dropped.own = 0
            self._waiting = [dropped for dropped in self._waiting if dropped.own]


@lru_cache
def retired(device: Device) -> Retired:
    """Returns the retired allocations of a GPU, for all groups of this process."""
    return Retired(device)


class DeviceMemory:
    """One allocation, as this rank maps it; arrays over it keep it alive.

    number, stride: as of SharedMemory.
    address: of this rank's part.
    bases: of every rank's part, in this process.
    """

    def __init__(self, number: int, nbytes: int, bases: list[int], rank: int, shared: bool) -> None:
        self.number, self.stride = number, 0 if shared else nbytes
        self.address, self._bases, self._nbytes = bases[rank], bases, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def offset(self, rank: int) -> int:
        """The distance in bytes from this rank's part to another's; they do not lie side by side."""
        return self._bases[rank] - self.address

    def view(self, rank: int, start: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """`size` elements of a rank's part, from byte `start` of it; the host cannot look into it."""
        return unowned(self._bases[rank] + start, size, dtype)


class DeviceAllocator(Allocator):
    """Makes a group of ranks' allocations, and finds the one that an array lies in. host: of the same ranks."""

    def __init__(self, node: MPI.Intracomm, host: Allocator, device: Device, retired: Retired) -> None:
        super().__init__(node)
        self._host, self._device, self._retired = host, device, retired

    def allocate(self, nbytes: int, *, shared: bool = False, **_: Any) -> Any:
        """Implements `Allocator.allocate`, whose other arguments are about files. Collective.

        None on all ranks if a GPU lacks room or cannot map others'.
        """
        self._made += 1
        self._retired.sweep()
        part = -(-max(1, self._node.allreduce(nbytes, MPI.MAX)) // _ALIGNMENT) * _ALIGNMENT
        closed = self._host.allocate(self._ranks, shared=True)
        mine, handle = self._export(part) if not shared or self._rank == 0 else (0, b"")
        handles = self._node.allgather(handle)
        bases = self._open(mine, handles, shared) if closed is not None else []
        opened = [base for rank, base in enumerate(bases) if rank != self._rank and base]
        opened = list(dict.fromkeys(opened))
        dropped = Dropped(mine, [base for base in opened if base != mine], closed, self._rank, self._ranks)
        if not self._node.allreduce(int(len(bases) == self._ranks), MPI.MIN):
            self._retired.add(dropped)
            return None
        memory = DeviceMemory(self._made, part, bases, self._rank, shared)
        weakref.finalize(memory, self._retired.add, dropped).atexit = False
        self._register(memory)  # type: ignore[arg-type]
        return memory

    def _export(self, nbytes: int) -> tuple[int, bytes | None]:
        """Memory of this rank's and its handle; None where there is no room or it cannot be exported."""
        mine = 0
        try:
            mine = self._device.allocate(nbytes)
            return mine, self._device.export(mine) if self._ranks > 1 else b""
        except (MemoryError, OSError):
            return mine, None

    def _open(self, mine: int, handles: list[bytes | None], shared: bool) -> list[int]:
        """Every rank's part in this process; fewer if some cannot be opened."""
        bases: list[int] = []
        if None in handles:
            return bases
        for rank, handle in enumerate(handles):
            if rank == self._rank and mine:
                bases.append(mine)
            elif shared and rank > 0:
                bases.append(bases[0])
            else:
                assert handle is not None
                try:
                    bases.append(self._device.open(handle))
                except OSError:
                    return bases
        return bases


def own_memory(device: Device, retired: Retired, nbytes: int) -> DeviceMemory:
    """Memory that no other rank reaches."""
    memory = DeviceMemory(0, nbytes, [device.allocate(nbytes)], 0, shared=False)
    weakref.finalize(memory, retired.add, Dropped(memory.address, [])).atexit = False
    return memory
