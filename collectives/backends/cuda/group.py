"""Set-up of a group's GPUs at the first operation on one, and the choice of each operation's transport."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer, address
from ...base.coalesced import PACKED_BYTES, Item, Packed, arguments_of
from ...base.reduction import Reduction
from ...errors import ArgumentError
from . import driver
from .aware import Aware
from .device import Event
from .host import Host
from .levels import Levels
from .memory import DeviceAllocator, DeviceMemory, own_memory, retired
from .probe import discover
from .staged import Staged
from .symmetric import Ipc
from .task import Enqueue
from .transports import Transport

Array = np.ndarray[Any, Any]


class GpuGroup:
    """One group's GPUs, as seen by one of its ranks. host: its operations on host memory. Collective."""

    def __init__(self, host: Host, index: int) -> None:
        self._device, self.rank, self.size = driver.open_device(index), host.rank, host.size
        self._host = host
        self._retired = retired(self._device)
        self._stream = self._device.stream()  # for work of no transport
        self._held: deque[tuple[Event, Any]] = deque()
        self._packing: DeviceMemory | None = None
        self.transports = discover(host, self._device)
        self._allocator: DeviceAllocator | None = None
        self._place = 0  # of this rank's part in memory from `allocate`
        self._ipc: Ipc | None = None
        self._set_up: list[Transport] = []  # the first that serves an operation takes it
        self._parts: list[GpuGroup] = []
        if self.transports.common == "ipc":
            self._allocator = DeviceAllocator(host.topology.node, host.allocator, self._device, self._retired)
            self._ipc = Ipc(host, self._device, self._allocator)
            self._place = host.topology.local_rank
            self._set_up.append(self._ipc)
        elif self.transports.island:
            island, place = divmod(host.rank, self.transports.island)
            inner, outer = self._parts = [GpuGroup(host.part(color), index) for color in (island, place)]
            self._set_up.append(Levels(inner, outer, self._device, self._retired))
            self._allocator, self._place = inner._allocator, place
        if self.transports.common == "aware":
            self._set_up.append(Aware(host, self._device, self._retired))

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """The operation by the group's transport for "auto", or for the algorithm that is asked for. Collective.

        It can be run again and again on the same arrays.

        arguments: as `Backend` has them.
        """
        transport = next((t for t in self._set_up if t.serves(operation, algorithm)), None)
        if transport is None:  # the one that always works, with memory that is needed only now
            transport = Staged(self._host, self._device)
            self._set_up.append(transport)
        return transport.prepare(operation, algorithm, arguments)

    def run(self, prepared: Enqueue, begin: Event) -> Event:
        """Carries it out after an event; gives that of its end. Collective."""
        self._release_done()
        return prepared(begin)

    def run_batches(self, batches: Sequence[tuple[Any, ...]], begin: Event) -> Event:
        """Runs operations on lists of arrays; each: as the arguments of `Dispatch.batch`. Collective."""
        self._release_done()
        for given in batches:
            begin = self._batch(begin, *given)
        return begin

    def _batch(
        self,
        begin: Event,
        operation: str,
        algorithm: str,
        items: Sequence[Item],
        root: int,
        op: Reduction | None,
        written: bool,
    ) -> Event:
        """One batch, packed on the GPU if it has several arrays."""

        def run(whole: Buffer, own: Buffer | None, counts: Sequence[int], begin: Event) -> Event:
            given = arguments_of(operation, whole, own, root, op, counts)
            return self.prepare(operation, algorithm, given)(begin)

        if len(items) == 1:
            return run(items[0].whole, items[0].own, items[0].counts, begin)
        packed = Packed(items, self._packing_memory(), self.rank, self._copy)
        self._stream.wait(begin)
        packed.pack(operation)
        self._stream.wait(run(packed.whole, packed.own, packed.counts, self._stream.record()))
        if written:
            packed.unpack(operation)
        return self._stream.record()

    def hold(self, end: Event, arrays: Any) -> None:
        """Keeps arrays alive until an event, and a little longer."""
        self._held.append((end, arrays))

    def allocate(self, nbytes: int, *, shared: bool) -> DeviceMemory:
        """Memory that the ranks reach directly, where they can; else this rank's own. Collective.

        Raises MemoryError on every rank if one has no room.
        """
        memory = None
        with self._device.current():
            if self._allocator is not None:
                memory = self._allocator.allocate(nbytes, shared=shared)
            else:
                with contextlib.suppress(MemoryError):
                    memory = own_memory(self._device, self._retired, nbytes)
            failed = memory is None
            if self._ipc is None:  # the others do not know yet
                failed = bool(self._host.comm.allreduce(int(failed), MPI.MAX))
        if failed:
            raise MemoryError(f"a GPU has no room for {nbytes} bytes that ranks share")
        assert memory is not None
        return memory

    def array(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array over this rank's part."""
        with self._device.current():
            return self._device.array(memory.address, shape, dtype, memory)

    @property
    def streams_wait(self) -> bool:
        """Tells if the streams of the ranks' GPUs wait for each other."""
        return self._ipc is not None and self._ipc.streams_wait

    def is_shared(self, pointer: int) -> bool:
        """Returns whether an array at this address lies in memory of this group that is the same for all ranks."""
        found = self._allocator.find(pointer, 1) if self._allocator is not None else None
        return found is not None and not found[0].stride

    def check(self, operation: str, index: int) -> None:
        """Raises ArgumentError for an array on another GPU."""
        if index != self._device.index:
            raise ArgumentError(
                f"{operation}: got an array on GPU {index}; needs one on GPU {self._device.index}, which this "
                "communicator works with since its first operation on a GPU"
            )

    def close(self) -> None:
        """Waits for what is under way here, and gives back what the driver has given."""
        with self._device.current():
            for end, _ in self._held:
                end.wait()
            self._held.clear()
            for transport in self._set_up:
                transport.close()
            self._packing = None
            self._retired.sweep()
        for group in self._parts:
            group.close()

    def _release_done(self) -> None:
        self._retired.sweep()
        while self._held and self._held[0][0].is_done():
            self._held.popleft()

    def _copy(self, target: Array, source: Array) -> None:
        self._device.copy(address(target), address(source), source.nbytes, self._stream)

    def _packing_memory(self) -> Array:
        """Memory of PACKED_BYTES; symmetric, if ranks have such. Collective at first."""
        if self._packing is None:
            self._packing = self.allocate(PACKED_BYTES, shared=False)
        return self._packing.view(self._place, 0, PACKED_BYTES, np.dtype(np.uint8))
