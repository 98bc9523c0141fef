"""One rank's view of a group: its backends, the memory that they need, and the way to its GPUs.

An operation on host memory is the call of the backend that is chosen for it (`backend`, `registry`, `selection`); one
on GPU memory goes to `cuda.backend`, which calls this object for its work on the host. Calls run in the order of
issue, one at a time, in the caller's thread or the progress thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..base.buffers import Buffer, DeviceBuffer, DType
from ..base.coalesced import PACKED_BYTES, Item, Packed, arguments_of
from ..base.float_errors import silent
from ..base.reduction import OPERATIONS as REDUCTIONS
from ..base.reduction import Reduction
from ..base.scratch import Scratch
from ..memory.counters import STRIDE, Barrier
from ..memory.shared_memory import Allocator, SharedMemory, is_one_for_all, note_one_for_all
from ..process.topology import Topology, discover, reported_ranks
from ..runtime.dropped import free_dropped
from ..runtime.positions import Positions
from ..runtime.witness import has_launcher, send_page
from .backend import Call, PartitionedCall, Resources
from .cuda.task import Task
from .meeting import Meetings, MeetsInMemory
from .mpi_functions import is_native_call
from .registry import make_backends
from .selection import Selection

if TYPE_CHECKING:  # at run time with the first array on a GPU: few programs on CPUs need them
    from .cuda.backend import GpuBackend
    from .cuda.memory import DeviceMemory

Array = np.ndarray[Any, Any]


class _MeetingCall(partial, MeetsInMemory):  # type: ignore[type-arg]
    """A partial of a call in which ranks meet in memory."""


class Dispatch:
    """The operations of one group on checked arguments.

    comm: of the group's ranks, for nothing else.
    topology: from `discover`.
    owned_comms: gets the communicators that are made.
    use_scratch: as of Resources. Collective.

    backends: by name.
    selection: the choice among them.
    positions: where the ranks show what they are doing.
    """

    def __init__(
        self, comm: MPI.Intracomm, topology: Topology, owned_comms: list[MPI.Intracomm], *, use_scratch: bool = True
    ) -> None:
        self.comm, self._owned_comms = comm, owned_comms
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.topology = topology
        self.allocator = Allocator(topology.node)
        self.scratch = Scratch()
        self._silently = silent()
        self.positions = Positions(bytearray(Positions.nbytes(1)), 0, 1)
        meetings = self._meetings()
        self.resources = Resources(comm, topology, self.allocator, self.scratch, meetings, self.positions, use_scratch)
        self.backends = make_backends(self.resources)
        self.selection = Selection(self.backends, {})
        self._symmetric_packing: Array | None = None
        self._gpu: GpuBackend | None = None
        self._parts: list[Dispatch] = []

    def _meetings(self) -> Meetings | None:
        """Sets up the page that the ranks of a node share; None if those of some node cannot share memory."""
        node, rank, ranks = self.topology.node, self.topology.local_rank, self.topology.local_size
        oversubscribed = self.topology.oversubscribed
        sizes = Positions.nbytes(ranks), Barrier.nbytes(ranks), Meetings.nbytes(ranks)
        first, second, end = accumulate(-(-size // STRIDE) * STRIDE for size in sizes)
        seen = rank == 0 and has_launcher()
        memory = self.allocator.allocate(end, shared=True, keep_file=seen)
        if memory is not None:
            self.positions = Positions(memory, rank, ranks, oversubscribed=oversubscribed)
            if seen:
                send_page(memory, self.comm, self.topology.members)
        if not self.comm.allreduce(int(memory is not None), MPI.MIN):  # on some node they cannot
            return None
        assert memory is not None
        barrier = node.Barrier  # of several nodes: while a rank waits, what it has begun to send to others must go on
        if self.topology.nodes == 1:
            barrier = Barrier(memory, first, rank, ranks, oversubscribed=oversubscribed, fence=node.Barrier)
        return Meetings(memory, second, rank, reported_ranks(node), barrier)

    # ---- operations -------------------------------------------------------------------------------------------

    def prepare(self, operation: str, algorithm: str, *arguments: Any) -> Call | Task:
        """The operation as a call that can be made again and again on the same arrays; on GPU memory it is a Task.

        algorithm: the name of a backend that serves it; on GPU memory also "auto".
        arguments: as Backend has them.
        """
        index = next((a.device for a in arguments if isinstance(a, DeviceBuffer)), None)
        if index is not None:
            return self.gpu.prepare(operation, algorithm, arguments, index)
        return self.call(operation, algorithm, arguments)

    def call(self, operation: str, algorithm: str, arguments: Sequence[Any]) -> Call:
        """The operation on host memory by the backend of that name."""
        call: Call = getattr(self.backends[algorithm], operation)(*arguments)
        native_call = None
        if isinstance(call, MeetsInMemory):
            native_call = call.native_call(self._silently if operation in REDUCTIONS else None)
        return native_call or self.silent(operation, call)

    def silent(self, operation: str, call: Call) -> Call:
        """Wraps a reducing call so that it neither raises nor warns; returns others unchanged."""
        if operation not in REDUCTIONS or is_native_call(call):
            return call
        return (_MeetingCall if isinstance(call, MeetsInMemory) else partial)(self._silently, call)

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> PartitionedCall | None:
        """An all_reduce of parts that are handed in one by one; None where no backend has a way for it. Collective."""
        found = (backend.partitioned(parts, op) for backend in self.backends.values())
        return next((made for made in found if made is not None), None)

    def announce(self, operation: str, what: str = "") -> None:
        """Compares the ranks' next operation (MPIDL_DEBUG=1, in `checks`); does nothing here."""

    # ---- lists of arrays --------------------------------------------------------------------------------------

    def prepare_batches(self, operation: str, batches: Sequence[tuple[Any, ...]], index: int | None) -> Call | Task:
        """All batches of a list as one operation; each: the arguments of `batch`. index: of the GPU they are on."""
        if index is not None:
            return self.gpu.prepare_batches(operation, batches, index)

        def run() -> None:
            for given in batches:
                self.batch(*given)

        return run

    def batch(
        self, operation: str, algorithm: str, items: Sequence[Item], root: int, op: Reduction | None, written: bool
    ) -> None:
        """One batch of a list, packed if it has several. written: whether results come back to this rank."""
        if len(items) == 1:
            item = items[0]
            self.call(operation, algorithm, arguments_of(operation, item.whole, item.own, root, op, item.counts))()
            return
        packed = Packed(items, self._packing(algorithm), self.rank)
        packed.pack(operation)
        self.call(operation, algorithm, arguments_of(operation, packed.whole, packed.own, root, op, packed.counts))()
        if written:
            packed.unpack(operation)

    def _packing(self, algorithm: str) -> Array:
        """Memory of PACKED_BYTES; symmetric, if that helps the backend."""
        if not self.backends[algorithm].shares_memory:
            return self.scratch.take("packing", PACKED_BYTES)
        if self._symmetric_packing is None:
            memory = self.allocator.allocate(PACKED_BYTES)
            self._symmetric_packing = (
                np.empty(PACKED_BYTES, np.uint8)
                if memory is None
                else memory.view(self.topology.local_rank, 0, PACKED_BYTES, np.dtype(np.uint8))
            )
        return self._symmetric_packing

    # ---- GPU memory -------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> GpuBackend:
        """The backend of GPU memory, made at first use."""
        if self._gpu is None:
            from .cuda.backend import GpuBackend

            self._gpu = GpuBackend(self)
        return self._gpu

    def takes_device_addresses(self, other: int) -> bool:
        """Returns whether messages to and from that rank may be of GPU memory; see GpuBackend."""
        return self._gpu is not None and self._gpu.takes_device_addresses(other)

    def gpu_stats(self) -> dict[str, Any] | None:
        """The entry of `Communicator.stats`; None before the first operation on GPU memory."""
        return None if self._gpu is None else self._gpu.stats()

    def close(self) -> None:
        """Gives back what the GPUs' drivers have given. Collective."""
        if self._gpu is not None:
            self._gpu.close()
        for part in self._parts:
            part.close()

    # ---- groups and memory ------------------------------------------------------------------------------------

    def part(self, color: int) -> Dispatch:
        """Makes the Dispatch of the sub-group with this colour. Collective."""
        comm = self.comm.Split(color, self.rank)
        assert isinstance(comm, MPI.Intracomm)
        self._owned_comms.append(comm)
        self._parts.append(
            Dispatch(comm, discover(comm, self._owned_comms), self._owned_comms, use_scratch=self.resources.use_scratch)
        )
        return self._parts[-1]

    def split(self, color: int, key: int) -> MPI.Comm:
        """The ranks of one colour, in the order of keys. Frees communicators that all their ranks have dropped."""
        self.announce("split")
        free_dropped(self.comm)
        return self.comm.Split(color, key)

    def allocate(self, nbytes: int, dtype: DType, *, shared: bool, reserved: bool = True) -> SharedMemory | None:
        """Memory that the ranks of this node share; None where they cannot.

        shared: one memory for all ranks of a node, on every node or on none, as ranks choose by it how to gather.
        """
        self.announce(("shared" if shared else "empty") if reserved else "pages", f" of {dtype.name}")
        alone = self.topology.local_size == 1
        memory = None if alone else self.allocator.allocate(nbytes, shared=shared, reserved=reserved)
        if shared and self.topology.nodes > 1 and not self.comm.allreduce(int(alone or memory is not None), MPI.MIN):
            return None
        if shared and memory is not None:
            note_one_for_all(memory)
        return memory

    def allocate_on_gpu(self, index: int, nbytes: int, dtype: DType, *, shared: bool) -> DeviceMemory:
        """Allocates memory on a GPU; see GpuGroup."""
        self.announce("shared" if shared else "empty", f" of {dtype.name} on a GPU")
        memory = self.gpu.group(index).allocate(nbytes, shared=shared)
        if not memory.stride:
            note_one_for_all(memory)
        return memory

    def is_shared(self, address: int) -> bool:
        """Returns whether this address lies in memory of this group that is the same for all ranks of the node."""
        if not is_one_for_all(address):
            return False
        if self._gpu is not None and self._gpu.is_shared(address):
            return True
        found = self.allocator.find(address, 1)
        return found is not None and not found[0].stride
