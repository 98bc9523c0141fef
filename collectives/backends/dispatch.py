"""Runs checked operations by the algorithm chosen for them; one rank's view of one group.

    "mpi"            the library's own                     mpi
    "symmetric"      one copy, inside a node               symmetric
    "hierarchical"   symmetric inside nodes, a schedule    hierarchical
                     between them
    else             a schedule over messages              executor

Operations on GPU memory go to `cuda`, which comes back here for what the host does of them.
Methods run in the order of issue, one at a time, in the caller's thread or the progress thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import algorithms
from ..buffers import Buffer, DeviceBuffer, DType
from ..coalesced import PACKED_BYTES, Item, Packed
from ..counters import ORDERED, STRIDE, Barrier
from ..cuda import driver
from ..cuda.device import Event, Stream
from ..cuda.group import GpuGroup
from ..cuda.memory import DeviceMemory
from ..cuda.task import Compound, Run, Task
from ..dropped import free_dropped
from ..executor import Execution, Region, single, whole
from ..hierarchical import Hierarchy
from ..partition import Splits, cut, even_counts
from ..positions import Positions
from ..reduction import Reduction
from ..schedule import Place, Schedule
from ..scratch import Scratch
from ..symmetric import Operation, Symmetric
from ..symmetric.meeting import Meetings
from ..symmetric.partitioned import PartitionedReduction, Pool, place_of
from ..symmetric.peer_memory import connect
from ..symmetric.shared_memory import Allocator, SharedMemory, is_one_for_all, note_one_for_all
from ..topology import Topology, discover
from ..witness import show, witnessed
from . import mpi
from .selection import COMPOSED, Selection

Array = np.ndarray[Any, Any]


class Dispatch:
    """The algorithms of one group, with the memory and the communicators that they need.

    comm: of the group's ranks, for nothing else. place: from `topology.discover`. made: gets the communicators that are
    made. Collective.

    choose: of a `Selection`, for the parts of an operation on GPU memory.
    """

    def __init__(self, comm: MPI.Intracomm, place: Topology, made: list[MPI.Intracomm]) -> None:
        self.comm, self._made = comm, made
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.topology = place
        self.allocator = Allocator(place.node)
        self.scratch = Scratch()
        self._symmetric_packing: Array | None = None
        self.positions = Positions(bytearray(Positions.nbytes(1)), 0, 1)
        self._symmetric: Symmetric | None = None
        self._hierarchy: Hierarchy | None = None
        self._pool: Pool | None = None
        self._gpus: GpuGroup | None = None
        self._branches: dict[int, Stream] = {}
        self._parts: list[Dispatch] = []
        self._share()
        self.choose: Callable[..., str] = Selection(self.composed, {}).choose

    def _share(self) -> None:
        """Sets up what the ranks of a node share, if they can share memory."""
        node, rank, ranks = self.topology.node, self.topology.local_rank, self.topology.local_size
        crowded = self.topology.crowded
        sizes = Positions.nbytes(ranks), Barrier.nbytes(ranks), Meetings.nbytes(ranks)
        first, second, end = accumulate(-(-size // STRIDE) * STRIDE for size in sizes)
        seen = rank == 0 and witnessed()
        memory = self.allocator.allocate(end, shared=True, keep_file=seen)
        if memory is not None:
            self.positions = Positions(memory, rank, ranks, crowded=crowded)
            if seen:
                show(memory, self.comm, self.topology.members)
        if not self.comm.allreduce(int(memory is not None), MPI.MIN):  # on some node they cannot
            return
        assert memory is not None
        barrier = node.Barrier  # of several nodes: while a rank waits, what it has begun to send to others must go on
        if self.topology.nodes == 1:
            barrier = Barrier(memory, first, rank, ranks, crowded=crowded, settle=node.Barrier)
        meetings = Meetings(memory, second, rank, ranks, barrier)
        self._symmetric = Symmetric(meetings, self.allocator, connect(node))
        if self.topology.regular and self.topology.nodes > 1:
            self._hierarchy = Hierarchy(self.topology, self._symmetric, self.allocator, self.scratch)

    @property
    def composed(self) -> str | None:
        """The algorithm that uses shared memory here, if any does."""
        if self._symmetric is None:
            return None
        if self.topology.nodes == 1:
            return "symmetric"
        return "hierarchical" if self._hierarchy is not None else None

    @property
    def symmetric(self) -> Symmetric:
        """The one-copy collectives; only where `composed` says so."""
        assert self._symmetric is not None
        return self._symmetric

    @property
    def hierarchy(self) -> Hierarchy:
        """The hierarchical collectives; only where `composed` says so."""
        assert self._hierarchy is not None
        return self._hierarchy

    def prepare(self, operation: str, algorithm: str, *arguments: Any) -> Callable[[], None] | Task:
        """The operation as a call that can be made again and again on the same arrays; arguments: as below.

        On GPU memory it is a Task.
        """
        index = next((a.device for a in arguments if isinstance(a, DeviceBuffer)), None)
        if index is not None:
            return self._prepare_on_gpu(operation, algorithm, arguments, index)
        if algorithm == "symmetric":
            prepared: Operation = getattr(self.symmetric, operation)(*arguments)
            return prepared
        if algorithm == "mpi":
            call: Callable[[], None] = getattr(mpi, operation)(self.comm, *arguments)
            return call
        return partial(getattr(self, operation), algorithm, *arguments)

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> PartitionedReduction | None:
        """An all_reduce of parts that are handed in one by one; None where there is no better way than one by one.

        Collective. There is where the ranks fill the cores of one node and share the arrays' memory.
        """
        place = self.topology
        if self._symmetric is None or place.nodes > 1 or not place.full or not ORDERED or self.size == 1:
            return None
        own = [None if isinstance(data, DeviceBuffer) else place_of(data, self.allocator) for data in parts]
        found = self.comm.allgather((op.name, own))
        alike = [(name, [part and part._replace(start=0) for part in places]) for name, places in found]
        if op.premultiplied or None in own or any(other != alike[0] for other in alike):
            return None
        if self._pool is None:
            memory = self.allocator.allocate(Pool.nbytes(self.size), shared=True, keep_file=True)
            if memory is None:
                return None
            self._pool = Pool(self._symmetric, memory, crowded=place.crowded)
        places = [part for _, part in found]
        return PartitionedReduction(self._pool, self.allocator, parts, places, op, self.positions.has_come)

    # ---- GPU memory -------------------------------------------------------------------------------------------

    def _prepare_on_gpu(self, operation: str, algorithm: str, arguments: tuple[Any, ...], index: int) -> Task:
        made: list[Run] = []

        def run(begin: Event) -> Event:
            self._before(operation, algorithm, arguments)
            gpus = self.gpus(index)
            if not made:
                made.append(gpus.prepare(operation, algorithm, arguments))
            return gpus.run(made[0], begin)

        return self._task(operation, index, run)

    def _task(self, operation: str, index: int, run: Callable[[Event], Event]) -> Task:
        if self._gpus is not None:
            self._gpus.check(operation, index)

        def hold(end: Event, arrays: Any) -> None:
            self.gpus(index).hold(end, arrays)

        return Task(operation, run, hold, index)

    def gpus(self, index: int) -> GpuGroup:
        """What the group has set up for its GPUs. Collective at first."""
        if self._gpus is None:
            with driver.open_device(index).current():
                self._gpus = GpuGroup(self, index)
        return self._gpus

    def takes_addresses(self, other: int) -> bool:
        """Whether the MPI library has been seen to move GPU memory to and from that rank, and nothing better serves."""
        return self._gpus is not None and self._gpus.ways.pairs[self.rank][other] == "aware"

    def compound(self, name: str, parts: Callable[[], None], index: int) -> Task:
        """Operations that are ordered as one among what a GPU does; see `Communicator.compound`."""
        return Compound(name, parts, lambda: self._branch(index), index)

    def _branch(self, index: int) -> Stream:
        """The stream on which the parts of compounds follow each other."""
        if index not in self._branches:
            self._branches[index] = driver.open_device(index).stream()
        return self._branches[index]

    def _before(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> None:
        """Before an operation on GPU memory."""

    def close(self) -> None:
        """Gives back what the GPUs' drivers have given. Collective."""
        if self._gpus is not None:
            self._gpus.close()
        for part in self._parts:
            part.close()

    # ---- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, algorithm: str, x: Buffer, op: Reduction) -> None:
        """In place on every rank."""
        if algorithm == "mpi":
            mpi.all_reduce(self.comm, x, op)()
        elif algorithm == "symmetric":
            self.symmetric.all_reduce(x, op)()
        elif algorithm == "hierarchical":
            self.hierarchy.all_reduce(x, op)
        else:
            schedule = algorithms.schedule("all_reduce", algorithm, self.size, nbytes=x.nbytes)
            counts = even_counts(x.size, schedule.chunks)
            self._execute(schedule, whole(x, counts), whole(x, counts), counts, op)

    def reduce_scatter(self, algorithm: str, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> None:
        """counts[r] elements of the reduction to rank r."""
        if algorithm == "mpi":
            mpi.reduce_scatter(self.comm, out, x, op, counts)()
        elif algorithm == "symmetric":
            self.symmetric.reduce_scatter(out, x, op, counts)()
        elif algorithm == "hierarchical":
            self.hierarchy.reduce_scatter(out, x, op, counts)
        else:
            schedule = algorithms.schedule("reduce_scatter", algorithm, self.size)
            chunks = cut(counts, schedule.pieces)
            own = single(out, self.rank, self.size, schedule.pieces)
            self._execute(schedule, whole(x, chunks), own, chunks, op)

    def reduce(self, algorithm: str, x: Buffer, root: int, op: Reduction) -> None:
        """In place on the root."""
        if algorithm == "mpi":
            mpi.reduce(self.comm, x, root, op)()
        elif algorithm == "symmetric":
            self.symmetric.reduce(x, root, op)()
        else:
            schedule = algorithms.schedule("reduce", algorithm, self.size, root, x.nbytes)
            counts = even_counts(x.size, schedule.chunks)
            out = whole(x, counts) if self.rank == root else None
            self._execute(schedule, whole(x, counts), out, counts, op)

    # ---- movements --------------------------------------------------------------------------------------------

    def all_gather(self, algorithm: str, out: Buffer, x: Buffer, counts: Sequence[int]) -> None:
        """counts[r] elements from rank r."""
        if algorithm == "mpi":
            mpi.all_gather(self.comm, out, x, counts)()
        elif algorithm == "symmetric":
            self.symmetric.all_gather(out, x, counts)()
        elif algorithm == "hierarchical":
            self.hierarchy.all_gather(out, x, counts)
        else:
            schedule = algorithms.schedule("all_gather", algorithm, self.size)
            chunks = cut(counts, schedule.pieces)
            own = single(x, self.rank, self.size, schedule.pieces)
            self._execute(schedule, own, whole(out, chunks), chunks)

    def all_to_all(self, algorithm: str, out: Buffer, x: Buffer, splits: Splits) -> None:
        """leaving[q] elements to rank q, coming[q] from it."""
        if algorithm == "mpi":
            mpi.all_to_all(self.comm, out, x, splits)()
        elif algorithm == "symmetric":
            self.symmetric.all_to_all(out, x, splits)()
        else:
            schedule = algorithms.schedule("all_to_all", algorithm, self.size)
            self._execute(schedule, whole(x, splits.leaving), whole(out, splits.coming), splits.leaving)

    def broadcast(self, algorithm: str, x: Buffer, root: int) -> None:
        """The root's to all."""
        if algorithm == "mpi":
            mpi.broadcast(self.comm, x, root)()
        elif algorithm == "symmetric":
            self.symmetric.broadcast(x, root)()
        elif algorithm == "hierarchical":
            self.hierarchy.broadcast(x, root)
        else:
            schedule = algorithms.schedule("broadcast", algorithm, self.size, root, x.nbytes)
            counts = even_counts(x.size, schedule.chunks)
            self._execute(schedule, None, whole(x, counts), counts)

    def gather(self, algorithm: str, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> None:
        """counts[r] elements from rank r to the root."""
        if algorithm == "mpi":
            mpi.gather(self.comm, out, x, root, counts)()
        elif algorithm == "symmetric":
            self.symmetric.gather(out, x, root, counts)()
        else:
            schedule = algorithms.schedule("gather", algorithm, self.size, root)
            own = single(x, self.rank, self.size)
            self._execute(schedule, own, None if out is None else whole(out, counts), counts)

    def scatter(self, algorithm: str, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> None:
        """counts[r] elements from the root to rank r."""
        if algorithm == "mpi":
            mpi.scatter(self.comm, out, x, root, counts)()
        elif algorithm == "symmetric":
            self.symmetric.scatter(out, x, root, counts)()
        else:
            schedule = algorithms.schedule("scatter", algorithm, self.size, root)
            own = single(out, self.rank, self.size)
            self._execute(schedule, None if x is None else whole(x, counts), own, counts)

    # ---- lists of arrays --------------------------------------------------------------------------------------

    def prepare_batches(
        self, operation: str, batches: Sequence[tuple[Any, ...]], index: int | None
    ) -> Callable[[], None] | Task:
        """All batches of a list as one operation; each: the arguments of `batch`. index: of the GPU they are on."""
        if index is not None:
            return self._task(operation, index, lambda begin: self.gpus(index).run_batches(batches, begin))

        def run() -> None:
            for given in batches:
                self.batch(*given)

        return run

    def batch(
        self, operation: str, algorithm: str, items: Sequence[Item], root: int, op: Reduction | None, written: bool
    ) -> None:
        """One batch of a list, packed if it has several. written: whether results come back to this rank."""
        if len(items) == 1:
            self._one(operation, algorithm, items[0].whole, items[0].own, root, op, items[0].counts)
            return
        packed = Packed(items, self._packing(algorithm), self.rank if len(items[0].counts) > 1 else 0)
        if operation == "all_gather":
            packed.pack_own()
        else:
            packed.pack()
        self._one(operation, algorithm, packed.whole, packed.own, root, op, packed.counts)
        if operation == "reduce_scatter":
            packed.unpack_own()
        elif written:
            packed.unpack()

    def _one(
        self,
        operation: str,
        algorithm: str,
        whole: Buffer,
        own: Buffer | None,
        root: int,
        op: Reduction | None,
        counts: Sequence[int],
    ) -> None:
        if operation == "broadcast":
            self.broadcast(algorithm, whole, root)
        elif operation == "all_gather":
            assert own is not None
            self.all_gather(algorithm, whole, own, counts)
        else:
            assert op is not None
            if operation == "all_reduce":
                self.all_reduce(algorithm, whole, op)
            elif operation == "reduce":
                self.reduce(algorithm, whole, root, op)
            else:
                assert own is not None
                self.reduce_scatter(algorithm, own, whole, op, counts)

    def _packing(self, algorithm: str) -> Array:
        """Memory of PACKED_BYTES; symmetric, if that helps the algorithm."""
        if algorithm not in COMPOSED:
            return self.scratch.take("packing", PACKED_BYTES)
        if self._symmetric_packing is None:
            memory = self.allocator.allocate(PACKED_BYTES)
            self._symmetric_packing = (
                np.empty(PACKED_BYTES, np.uint8)
                if memory is None
                else memory.view(self.topology.local_rank, 0, PACKED_BYTES, np.dtype(np.uint8))
            )
        return self._symmetric_packing

    # ---- groups and memory ------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.comm.Barrier()

    def part(self, color: int) -> Dispatch:
        """One of the ranks that give the same colour, for what this one leaves to it. Collective."""
        comm = self.comm.Split(color, self.rank)
        assert isinstance(comm, MPI.Intracomm)
        self._made.append(comm)
        self._parts.append(Dispatch(comm, discover(comm, self._made), self._made))
        return self._parts[-1]

    def split(self, color: int, key: int) -> MPI.Comm:
        """The ranks of one colour, in the order of keys. Frees what all of some ranks have dropped."""
        free_dropped(self.comm)
        return self.comm.Split(color, key)

    def allocate(self, nbytes: int, dtype: DType, *, shared: bool, reserved: bool = True) -> SharedMemory | None:
        """Memory that the ranks of this node share; None where they cannot."""
        if self.topology.local_size == 1:
            return None
        memory = self.allocator.allocate(nbytes, shared=shared, reserved=reserved)
        if shared and memory is not None:
            note_one_for_all(memory)
        return memory

    def allocate_on_gpu(self, index: int, nbytes: int, dtype: DType, *, shared: bool) -> DeviceMemory:
        """The same on a GPU; see GpuGroup."""
        memory = self.gpus(index).allocate(nbytes, shared=shared)
        if not memory.stride:
            note_one_for_all(memory)
        return memory

    def is_shared(self, address: int) -> bool:
        """Whether an array at this address lies in memory of this group that is the same for all ranks of the node."""
        if self._gpus is not None and is_one_for_all(address) and self._gpus.is_shared(address):
            return True
        found = self.allocator.find(address, 1) if is_one_for_all(address) else None
        return found is not None and not found[0].stride

    # ---- inside -----------------------------------------------------------------------------------------------

    def _execute(
        self,
        schedule: Schedule,
        source: Region | None,
        target: Region | None,
        counts: Sequence[int],
        op: Reduction | None = None,
    ) -> None:
        given = {Place.IN: source, Place.OUT: target}
        regions = {place: region for place, region in given.items() if region is not None}
        Execution(self.comm, schedule, regions, counts, self.scratch, op).run()
