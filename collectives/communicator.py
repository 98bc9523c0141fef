"""The Communicator: the collectives that a user calls.

    from collectives import Communicator
    comm = Communicator()                  # all ranks that mpirun started
    comm.all_reduce(x, op="avg")           # in place; x: a numpy, cupy or torch array, contiguous, of any shape

Arrays are seen as flat runs of elements in C order; shapes need not agree, element counts and dtypes must. Where a
list of arrays is taken, the operation runs on all of them as one (`coalesced`). Every rank must call the same
operations in the same order, with the same dtype, op, root, algorithm, and sizes that fit each other. Each call
checks what this rank can see before anything is sent.

Arrays may be on a GPU (`backends.cuda`), then on all ranks. The operation comes after what the caller's current stream
holds, and what is queued there later sees its result.

Every operation takes
    algorithm   "auto" (default), "mpi" for the MPI library's own, or another of `Communicator.algorithms`
    async_op    True: return a Work at once; the arrays must not be touched until it is complete (on a GPU: by
                nothing that is queued before `Work.wait`)
and raises ArgumentTypeError or ArgumentError for what it cannot work with.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from . import arguments, buffers, coalesced, details, reduction
from .algorithms import ALGORITHMS
from .arguments import integer, root_rank
from .backends.backend import PartitionedCall
from .backends.checks import CheckedDispatch, is_debugging
from .backends.cuda.arrays import gpu_index
from .backends.cuda.pages import DevicePages
from .backends.cuda.task import Task
from .backends.dispatch import Dispatch
from .backends.meeting import MeetsInMemory
from .backends.selection import Selection, read_tables
from .buffers import Buffer, DeviceBuffer, signature
from .dropped import Left, free_dropped, freed_if_mpi_fails, when_dropped
from .errors import ArgumentError, MismatchError, OperationError
from .forked import is_forked, refuse_if_forked, why
from .idle_wait import background_on_all_ranks
from .labels import is_profiled, label, record_function
from .leftovers import remove_names
from .lifetime import keep_for_ever
from .memory.pages import Pages
from .memory.shared_memory import SharedMemory, is_one_for_all
from .messages import Messages
from .partition import Splits
from .partitioned import PartitionedAllReduce
from .positions import NO_WORDS, words
from .progress import Progress, Work
from .reduction import Reduction
from .topology import discover, world_ranks
from .watchdog import Guard, limit_of, watch

_KEPT_CALLS = 1024
_CLOSE_AFTER_ERROR = 2.0  # seconds
Plain = Callable[[], None]
Call = Plain | Task
Prepared = tuple[Call, bytes]  # and its words, from `details`
Made = TypeVar("Made")


class Communicator:
    """A group of ranks and the operations among them.

    mpi: the mpi4py communicator to work over; MPI.COMM_WORLD by default. It is duplicated (collectively), so that
    messages of this class meet none of the user's. Over the world no shared memory of the MPI library is left behind if
    the job is killed (`collectives.leftovers`).

    timeout: seconds that an operation may wait for other ranks before the job is aborted with a report of where each
    rank is; by default the environment's MPIDL_TIMEOUT, or 600; 0: for ever.

    rank, size: this rank's number and how many there are. local_rank, local_size: the same within this node.
    nodes: how many nodes. node_ranks: the ranks of this node. mpi: the communicator that was given.

    With MPIDL_DEBUG=1 in the environment the ranks compare, before every operation, what they are about to do, and
    raise the same MismatchError on all ranks where that differs.
    """

    def __init__(self, mpi: MPI.Intracomm | None = None, *, timeout: float | None = None) -> None:
        refuse_if_forked("Communicator")
        if mpi is not None and not isinstance(mpi, MPI.Intracomm):
            raise arguments.wrong_type("mpi", mpi, "an mpi4py intracommunicator")
        self.mpi: MPI.Intracomm = MPI.COMM_WORLD if mpi is None else mpi
        limit = self._agreed(lambda: limit_of(timeout))
        free_dropped(self.mpi)
        self._made: list[MPI.Intracomm] = []  # by this object, to be freed
        with freed_if_mpi_fails("Communicator", self._made):
            self._collective = self._duplicated(self.mpi)
            self._for_messages = self._duplicated(self.mpi)
            place = discover(self._collective, self._made)
        self._progress = Progress()
        self._issued = 0
        self._calls: dict[tuple[Any, ...], Prepared] = {}
        self._unusable, self._failed = "", False
        self._refusal: type[MismatchError | OperationError] = OperationError
        self._closed = self._exempt = False
        self._compound_in: int | None = None  # the thread that runs one
        self._duplicates: list[Communicator] = []
        weakref.finalize(self, self._progress.abandon).atexit = False  # there everything queued is waited for
        self._timeout = timeout
        self.rank: int = self.mpi.Get_rank()
        self.size: int = self.mpi.Get_size()
        self.local_rank, self.local_size, self.nodes = place.local_rank, place.local_size, place.nodes
        self.node_ranks: tuple[int, ...] = place.members
        if mpi is None and place.local_rank == 0:  # all ranks have come through MPI_Init
            remove_names()
        self._crowded = place.crowded
        self._progress.may_sleep = place.nodes > 1 or place.full
        self._progress.follows = place.full and not place.crowded and place.nodes == 1
        self._dispatch = (CheckedDispatch if is_debugging() else Dispatch)(self._collective, place, self._made)
        self._positions = self._dispatch.positions
        self._messages = Messages(self._for_messages, self._positions, self._dispatch.takes_addresses)
        tables = self._agreed(lambda: read_tables(place.nodes, place.local_size) if self.rank == 0 else {})
        tables, number = self._collective.bcast((tables, next(_numbers)))
        self._selection = self._dispatch.selection = Selection(self._dispatch.backends, tables)
        self._choose = self._selection.choose
        self._barrier = self._dispatch.prepare("barrier", "mpi")
        world = world_ranks(self.mpi)
        self._guard: Guard | None = None
        if self.size > 1 and limit < inf:
            seen = list(place.members) if self._positions.shared else [self.rank]
            named = world if min(world) >= 0 else list(range(self.size))
            self._guard = Guard(self._for_messages, self._positions, seen, named, limit)
            watch(self._guard)
        guard = weakref.ref(self._guard) if self._guard is not None else lambda: None
        left = Left(world, self._made, self._messages.channels, guard)
        self._when_dropped = when_dropped(self, (world[0], number), left)
        _alive.add(self)

    def _duplicated(self, mpi: MPI.Intracomm) -> MPI.Intracomm:
        made = mpi.Dup()
        self._made.append(made)
        return made

    def _agreed(self, make: Callable[[], Made]) -> Made:
        """Returns `make()`; if it raises on some rank, the first such rank's error is raised on all. Collective."""
        made, error = None, None
        try:
            made = make()
        except ArgumentError as failure:
            error = failure
        for found in self.mpi.allgather(error):
            if found is not None:
                raise found
        return made  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size})"

    def algorithms(self, operation: str) -> list[str]:
        """The values of `algorithm=` for an operation here; not every one serves every dtype and operator."""
        if operation not in ALGORITHMS:
            raise ArgumentError(f"algorithms: got {operation!r}; needs one of {', '.join(ALGORITHMS)}")
        return self._selection.names(operation)

    # ---- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
        """Replaces x, or each of a list, by the reduction of all ranks' x; bitwise equal on all of them."""
        if isinstance(x, list):
            return self._coalesced("all_reduce", algorithm, async_op, wholes=x, op=op)
        key = ("all_reduce", self._signature(x), op, algorithm)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "all_reduce: x", writable=True)
            self._refuse_shared("all_reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._chosen("all_reduce", algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, "all_reduce", chosen, data, reduced)
        return self._issue("all_reduce", *call, async_op, x)

    def partitioned_all_reduce(
        self, parts: Sequence[Any], op: str = "sum", *, algorithm: str = "auto"
    ) -> PartitionedAllReduce:
        """Prepares an all_reduce of several arrays, in which a rank hands in one after the other as it has them.

        It can be made again and again (`partitioned`). Collective.

        Where the ranks fill the cores of one node and all arrays are symmetric (`empty`), a rank reduces only once it
        waits, and one that is early does the others' share meanwhile. Elsewhere each part is an asynchronous
        all_reduce by `algorithm`. The bits are those of an all_reduce of each part.
        """
        data = [buffers.inspect(x, f"partitioned_all_reduce: part {i}", writable=True) for i, x in enumerate(parts)]
        if not data:
            raise ArgumentError("partitioned_all_reduce: got no arrays; needs at least one")
        for number, part in enumerate(data):
            self._refuse_shared(f"partitioned_all_reduce: part {number}", part)
            reduced = reduction.check(op, part.dtype)
        made: list[PartitionedCall] = []

        def task() -> None:
            found = self._dispatch.partitioned([part.unowned() for part in data], reduced)
            made.extend([found] if found is not None else [])

        self._issue("partitioned_all_reduce", task, NO_WORDS, async_op=False)
        complete = [self._dispatch.silent("all_reduce", found) for found in made]
        return PartitionedAllReduce(
            parts,
            lambda part: self.all_reduce(part, op, algorithm=algorithm, async_op=True),
            made[0] if made else None,
            self._next_number,
            lambda: self._issue("all_reduce", complete[0], NO_WORDS, async_op=False, arrays=parts),
        )

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """out becomes this rank's part of the reduction of all ranks' x; x is unchanged. Lists: each with its like.

        x: n elements. out: counts[rank] elements; it may be x's own part of that place, which is then overwritten.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(x, list):
            arguments.no_counts("reduce_scatter", counts)
            return self._coalesced("reduce_scatter", algorithm, async_op, wholes=x, owns=out, op=op)
        key = ("reduce_scatter", self._signature(x), self._signature(out), op, algorithm, _tuple(counts))
        call = self._recall(key)
        if call is None:
            target = buffers.inspect(out, "reduce_scatter: out", writable=True)
            data = buffers.inspect(x, "reduce_scatter: x", writable=False)
            self._refuse_shared("reduce_scatter: x", data)
            reduced = reduction.check(op, data.dtype)
            parts = arguments.parts("reduce_scatter", counts, data.size, self.size)
            arguments.same_dtype("reduce_scatter", target, data)
            arguments.own_part("reduce_scatter: out", target, parts, self.rank)
            arguments.refuse_overlap("reduce_scatter", target, data, parts, self.rank)
            chosen = self._chosen("reduce_scatter", algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, "reduce_scatter", chosen, target, data, reduced, parts)
        return self._issue("reduce_scatter", *call, async_op, (out, x))

    def reduce(
        self, x: Any, root: int = 0, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """Replaces the root's x, or each of a list, by the reduction of all ranks' x; x is unchanged elsewhere."""
        root = root_rank("reduce", root, self.size)
        if isinstance(x, list):
            return self._coalesced("reduce", algorithm, async_op, wholes=x, root=root, op=op)
        key = ("reduce", self._signature(x), op, algorithm, root)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "reduce: x", writable=self.rank == root)
            self._refuse_shared("reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._chosen("reduce", algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, "reduce", chosen, data, root, reduced)
        return self._issue("reduce", *call, async_op, x)

    # ---- movements --------------------------------------------------------------------------------------------

    def all_gather(
        self,
        out: Any,
        x: Any,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """out becomes all ranks' x, one behind the other. Lists: each with its like.

        out: n elements. x: counts[rank] elements; it may be out's own part of that place, and is then not copied.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(out, list):
            arguments.no_counts("all_gather", counts)
            return self._coalesced("all_gather", algorithm, async_op, wholes=out, owns=x)
        key = ("all_gather", self._signature(out), self._signature(x), algorithm, _tuple(counts))
        call = self._recall(key)
        if call is None:
            target = buffers.inspect(out, "all_gather: out", writable=True)
            data = buffers.inspect(x, "all_gather: x", writable=False)
            parts = arguments.parts("all_gather", counts, target.size, self.size)
            arguments.same_dtype("all_gather", target, data)
            arguments.own_part("all_gather: x", data, parts, self.rank)
            arguments.refuse_overlap("all_gather", data, target, parts, self.rank)
            if algorithm == "auto" and self._dispatch.is_shared(target.address):
                algorithm = self._dispatch.composed or "auto"
            chosen = self._chosen("all_gather", algorithm, data, target.nbytes)
            call = self._prepare(key, "all_gather", chosen, target, data, parts)
        return self._issue("all_gather", *call, async_op, (out, x))

    def all_to_all(
        self,
        out: Any,
        x: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Part q of x goes to rank q; part q of out comes from rank q. out and x must not overlap.

        output_splits, input_splits: elements of each part; given on all ranks or on none, and not with "bruck". By
        default every rank's x has the same number of elements, cut as evenly as possible, so that out has
        size * (this rank's part) elements.
        """
        key = (
            "all_to_all",
            self._signature(out),
            self._signature(x),
            algorithm,
            _tuple(output_splits),
            _tuple(input_splits),
        )
        call = self._recall(key)
        if call is None:
            target = buffers.inspect(out, "all_to_all: out", writable=True)
            data = buffers.inspect(x, "all_to_all: x", writable=False)
            arguments.same_dtype("all_to_all", target, data)
            even = output_splits is None and input_splits is None
            leaving = arguments.parts("all_to_all: x, input_splits", input_splits, data.size, self.size)
            if even:
                output_splits = [leaving[self.rank]] * self.size
            coming = arguments.parts("all_to_all: out, output_splits", output_splits, target.size, self.size)
            arguments.refuse_overlap("all_to_all", target, data)
            self._refuse_shared("all_to_all: out", target)
            chosen = self._chosen("all_to_all", algorithm, data, data.nbytes, even=even)
            arguments.even_only("all_to_all", chosen, even=even)
            splits = Splits(leaving, coming, uniform=even and data.size % self.size == 0)
            call = self._prepare(key, "all_to_all", chosen, target, data, splits)
        return self._issue("all_to_all", *call, async_op, (out, x))

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
        """Replaces x, or each of a list, on every rank by the root's."""
        root = root_rank("broadcast", root, self.size)
        if isinstance(x, list):
            return self._coalesced("broadcast", algorithm, async_op, wholes=x, root=root)
        key = ("broadcast", self._signature(x), algorithm, root)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "broadcast: x", writable=self.rank != root)
            chosen = self._chosen("broadcast", algorithm, data, data.nbytes)
            call = self._prepare(key, "broadcast", chosen, data, root)
        return self._issue("broadcast", *call, async_op, x)

    def gather(
        self,
        out: Any,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """The root's out becomes all ranks' x, one behind the other; out is None on the others.

        counts: elements of each rank's x, the same on every rank; by default all ranks give as many as this one.
        """
        root = root_rank("gather", root, self.size)
        key = (
            "gather",
            self._signature(out) if self.rank == root else out is None,
            self._signature(x),
            algorithm,
            root,
            _tuple(counts),
        )
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "gather: x", writable=False)
            parts = arguments.given_parts("gather", counts, data.size, self.size)
            arguments.own_part("gather: x", data, parts, self.rank)
            target = self._root_only("gather: out", out, root, sum(parts), writable=True)
            if target is not None:
                arguments.same_dtype("gather", target, data)
                arguments.refuse_overlap("gather", data, target, parts, self.rank)
            chosen = self._chosen("gather", algorithm, data, sum(parts) * data.dtype.itemsize)
            call = self._prepare(key, "gather", chosen, target, data, root, parts)
        return self._issue("gather", *call, async_op, (out, x))

    def scatter(
        self,
        out: Any,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """out becomes this rank's part of the root's x; x is None on the others.

        counts: elements of each rank's out, the same on every rank; by default all get as many as this one.
        """
        root = root_rank("scatter", root, self.size)
        key = (
            "scatter",
            self._signature(x) if self.rank == root else x is None,
            self._signature(out),
            algorithm,
            root,
            _tuple(counts),
        )
        call = self._recall(key)
        if call is None:
            target = buffers.inspect(out, "scatter: out", writable=True)
            parts = arguments.given_parts("scatter", counts, target.size, self.size)
            arguments.own_part("scatter: out", target, parts, self.rank)
            data = self._root_only("scatter: x", x, root, sum(parts), writable=False)
            if data is not None:
                arguments.same_dtype("scatter", target, data)
                arguments.refuse_overlap("scatter", target, data, parts, self.rank)
            chosen = self._chosen("scatter", algorithm, target, sum(parts) * target.dtype.itemsize)
            call = self._prepare(key, "scatter", chosen, target, data, root, parts)
        return self._issue("scatter", *call, async_op, (out, x))

    # ---- messages ---------------------------------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Sends x to rank `dest`, which must receive as many elements of the same dtype with the same tag.

        Messages do not queue behind collectives: two ranks may both receive first and then send, asynchronously.
        """
        self._refuse_if_unusable("send")
        with label("collectives::send"):
            return self._messages.send(x, dest, tag, async_op=async_op)

    def recv(self, x: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Fills x with the next message of the same tag from rank `source`.

        Raises OperationError if the message is longer or shorter than x, or of another dtype; x may then hold anything.
        """
        self._refuse_if_unusable("recv")
        with label("collectives::recv"):
            return self._messages.recv(x, source, tag, async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns once every rank has called it."""
        return self._issue("barrier", self._barrier, NO_WORDS, async_op)

    def compound(self, name: str, task: Plain, *, async_op: bool = False, device: Any = "cpu") -> Work | None:
        """Runs `task` as one operation: the operations that it calls on this Communicator run at once, as its parts.

        So that what comes later may depend on what came first, and nothing comes in between. name: for errors. task:
        calls operations, none of them asynchronous, the same on every rank; with async_op it runs in another thread.

        device: as torch has it, where the arrays are. On a GPU the parts come after what torch's current stream holds
        now, and what is queued there later, or after `Work.wait`, sees what they did; while they run, and for all that
        `task` computes, another stream is torch's current one.
        """
        index = gpu_index("compound", device)

        def parts() -> None:
            self._compound_in = threading.get_ident()
            try:
                with background_on_all_ranks() if async_op else contextlib.nullcontext():
                    task()
            finally:
                self._compound_in = None

        call = parts if index is None else self._dispatch.gpu.compound(name, parts, index)
        return self._issue("compound", call, words(name), async_op, name=name)

    # ---- groups and memory ------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A Communicator of the ranks that give the same colour, ordered by key, then rank; None for colour None.

        Collective over this communicator. Groups work independently, also at the same time.
        """
        chosen = MPI.UNDEFINED if color is None else integer("split: color", color, 0, 2**31 - 1)
        key = integer("split: key", key, -(2**31), 2**31 - 1)
        groups: list[MPI.Comm] = []
        failures: list[OperationError] = []  # on all ranks: this communicator goes on

        def task() -> None:
            try:
                with freed_if_mpi_fails("split", []):
                    groups.append(self._dispatch.split(chosen, key))
            except OperationError as error:
                failures.append(error)

        self._issue("split", task, NO_WORDS, async_op=False)
        if failures:
            raise failures[0]
        group = groups[0]
        if group == MPI.COMM_NULL:
            return None
        assert isinstance(group, MPI.Intracomm)
        try:
            made = Communicator(group, timeout=self._timeout)
        except OperationError:
            group.Free()
            raise
        made._made.append(group)
        return made

    def split_by_node(self) -> tuple[Communicator, Communicator]:
        """Two Communicators: of this rank's node, and of the ranks with its local rank on every node. Collective.

        Raises ArgumentError on every rank unless each node has as many ranks, numbered node by node.
        """
        place = self._dispatch.topology
        if not place.regular:
            raise ArgumentError("split_by_node: needs as many ranks on every node, numbered node by node")
        within, across = self.split(place.members[0]), self.split(self.local_rank)
        assert within is not None
        assert across is not None
        return within, across

    def split_self(self) -> Communicator:
        """A Communicator of this rank only. Not collective."""
        return Communicator(MPI.COMM_SELF, timeout=self._timeout)

    def duplicate(self) -> Communicator:
        """Makes a Communicator of the same ranks with a queue of its own; closed along with this one. Collective."""
        made = self.split(0, self.rank)
        assert made is not None
        self._duplicates.append(made)
        return made

    def empty(self, shape: int | Sequence[int], dtype: Any, *, device: Any = "cpu") -> Any:
        """An uninitialised array in symmetric memory: the node's other ranks reach it without a copy of their own.

        A torch tensor for a torch dtype, else a numpy array; freed like any other. Collective: every rank makes the
        same calls in the same order, with the same dtype. Where the node cannot share memory it is an ordinary array.
        device: as torch has it; on a GPU ("cuda", "cuda:1") it is a torch or cupy array.
        """
        return self._allocate("empty", shape, dtype, device, shared=False)

    def shared(self, shape: int | Sequence[int], dtype: Any, *, device: Any = "cpu") -> Any:
        """An uninitialised array that is the same memory on all ranks of the node; otherwise like `empty`.

        For the output of all_gather: each rank writes its part in place, and to gather is only to wait. Where the node
        cannot share memory every rank has an array of its own, and the same all_gather sends messages. Reductions
        refuse such an array, as all ranks' contributions would be one.
        """
        return self._allocate("shared", shape, dtype, device, shared=True)

    def pages(self, nbytes: int, *, shared: bool = True, device: Any = "cpu") -> Pages | DevicePages:
        """Memory without pages as yet, which `Pages.reserve` and `Pages.discard` bring and take. Collective.

        shared: the same memory on all ranks of the node, as of `shared`, where they can share memory. Ranks of a node
        that do not reserve the pages before they write to shared ones risk to be killed where there is no room.
        device: as torch has it; on a GPU each rank has its own, in which addresses change (`backends.cuda.pages`).
        """
        if gpu_index("pages", device) is not None:
            return DevicePages(device)
        size = arguments.elements("pages: nbytes", nbytes)
        made: list[SharedMemory] = []
        self._calls.clear()  # as for any new memory

        def task() -> None:
            kind = buffers.describe(np.uint8)
            memory = self._dispatch.allocate(size, kind, shared=True, reserved=False) if shared else None
            if memory is not None:
                made.append(memory)

        self._issue("pages", task, NO_WORDS, async_op=False)
        return Pages(made[0], made[0].file) if made else Pages.private(size)

    def is_shared(self, array: Any) -> bool:
        """Returns whether an array is from `shared`, and one memory for all ranks of the node indeed."""
        return self._dispatch.is_shared(buffers.inspect(array, "is_shared", writable=False).address)

    @property
    def exempt_from_watchdog(self) -> bool:
        """Exempts this rank's waits from the watchdog: the other ranks may come late without an error. May be set."""
        return self._exempt

    @exempt_from_watchdog.setter
    def exempt_from_watchdog(self, on: bool) -> None:
        self._exempt = on
        if on and not self._unusable:
            self._positions.leave()

    def register_drain_hook(self, task: Plain | None) -> None:
        """Registers a task to run before the last wait for what is queued here; to be called on every rank.

        That is in `close`, or at the end of the program. There it comes after the end of all groups that have no such
        task, which the other ranks are told of: they may still be in the middle of their program.
        """
        self._progress.drain_hook = task
        if self._guard is not None:
            self._guard.late = task is not None

    def close(self) -> None:
        """Finishes what is queued and frees the duplicated communicators. Collective; the object is unusable after.

        Messages that were sent are delivered, or dropped if their receiver has not asked for them. Receives that
        nothing was sent for end with an OperationError.

        While an exception is handled, as in a `finally` block, it waits two seconds for the other ranks. If they do not
        come it frees nothing, so that the exception goes on and ends the job.
        """
        if self._closed:
            return
        self._when_dropped.detach()
        everywhere = MPI.REQUEST_NULL if self._failed else self._for_messages.Ibarrier()
        if not _all_arrive(everywhere):
            self._leave_open(everywhere)
            return
        if self._progress.drain_hook is not None:
            self._progress.drain_hook()
            self.register_drain_hook(None)
        self._closed, self._unusable = True, "it was closed"
        for made in self._duplicates:
            made.close()
        self._progress.close()
        if not self._failed:  # else the other ranks may never come here
            self._positions.enter(self._issued + 1, "close")
            everywhere.Wait()
            self._messages.channels.close()
            self._positions.leave()
        if self._guard is not None:
            self._guard.close()
        self._dispatch.close()
        for comm in self._made:
            comm.Free()

    def _leave_open(self, everywhere: MPI.Request) -> None:
        """Makes this rank's object unusable and frees nothing, as other ranks are elsewhere and may use the memory."""
        self._closed, self._unusable = True, "it was closed after an exception, while other ranks were elsewhere"
        self.register_drain_hook(None)
        for made in self._duplicates:
            made._when_dropped.detach()
            made._leave_open(MPI.REQUEST_NULL)
        self._progress.abandon()
        self._positions.leave(failed=True)
        keep_for_ever((self._dispatch, self._made, everywhere))

    def abort(self, status: int = 1) -> None:
        """Ends all processes of the job at once with an exit status. Does not return. From any thread."""
        refuse_if_forked("abort")
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
            os._exit(status)  # mpirun then ends the other ranks
        self.mpi.Abort(status)

    # ---- lists of arrays --------------------------------------------------------------------------------------

    def _coalesced(
        self,
        operation: str,
        algorithm: str,
        async_op: bool,
        *,
        wholes: list[Any],
        owns: Any = None,
        root: int = 0,
        op: Any = None,
    ) -> Work | None:
        """Checks every array, chooses for every batch, and issues all of it as one operation."""
        written = operation in ("all_reduce", "all_gather") or (operation == "reduce") == (self.rank == root)
        items = coalesced.inspect(operation, wholes, owns, self.rank, self.size, writable=written)
        if operation in reduction.OPERATIONS:
            for number, item in enumerate(items):
                self._refuse_shared(coalesced.name(operation, number), item.whole)
        steps: list[tuple[Any, ...]] = []
        for batch in coalesced.batches(items):
            data = batch[0].whole
            reduced = None if op is None else reduction.check(op, data.dtype)
            nbytes = sum(item.whole.nbytes for item in batch)
            chosen = self._chosen(operation, algorithm, data, nbytes, reduced)
            steps.append((operation, chosen, batch, root, reduced, written))
        call = self._dispatch.prepare_batches(operation, steps, coalesced.device(operation, items))
        sizes, rooted = [item.whole.size for item in items], operation in ("reduce", "broadcast")
        detail = details.of_list(op, sizes, root, rooted, [step[1] for step in steps])
        return self._issue(operation, call, detail, async_op, (wholes, owns))

    # ---- inside -----------------------------------------------------------------------------------------------

    def _chosen(
        self, operation: str, algorithm: str, data: Buffer, nbytes: int, op: Reduction | None = None, even: bool = True
    ) -> str:
        """The algorithm; on a GPU "auto" stays what it is, as the way decides first."""
        if algorithm == "auto" and isinstance(data, DeviceBuffer):
            return algorithm
        return self._choose(operation, algorithm, data.dtype, nbytes, op, even)

    def _signature(self, array: Any) -> tuple[Any, ...] | None:
        """Returns the array's signature, another one for memory that all ranks of the node share."""
        seen = signature(array)
        return seen if seen is None or not is_one_for_all(seen[0]) else (*seen, "one for all")

    def _recall(self, key: tuple[Any, ...]) -> Prepared | None:
        """The call that was prepared for the same arrays and arguments, which need no second check."""
        try:
            return self._calls.get(key)
        except TypeError:  # an argument that cannot be a key; the checks will say what is wrong with it
            return None

    def _prepare(self, key: tuple[Any, ...], operation: str, algorithm: str, *checked: Any) -> Prepared:
        """The call for checked arguments, kept for the next time if the arrays can be told by their signatures.

        key: the operation, the signatures, and all that the checks and the choice depend on.

        It refers to the arrays by their addresses, so as not to keep them alive.
        """
        self._refuse_if_unusable(operation)
        detail = details.of_arrays(algorithm, checked)
        if None in key[1:3]:
            return self._dispatch.prepare(operation, algorithm, *checked), detail
        free = [item.unowned() if isinstance(item, Buffer) else item for item in checked]
        call = self._dispatch.prepare(operation, algorithm, *free), detail
        if len(self._calls) >= _KEPT_CALLS:
            self._calls.clear()
        with contextlib.suppress(TypeError):  # an argument that is right and yet no key
            self._calls[key] = call
        return call

    def _issue(
        self, operation: str, task: Call, detail: bytes, async_op: bool, arrays: Any = None, name: str | None = None
    ) -> Work | None:
        """Runs the operation now if nothing is before it, else queues it, with the arrays that it must keep alive.

        detail: from `details`.
        """
        if self._unusable:
            self._refuse_if_unusable(operation)
        if isinstance(task, Task):
            started = task.start(arrays, hold=async_op)
            return started.finish(self._issue(operation, started.run, detail, async_op, arrays, name))
        if self._compound_in is not None and self._compound_in == threading.get_ident():
            if async_op:
                raise ArgumentError(f"{operation}: async_op inside a compound operation, whose parts run at once")
            task()
            return None
        number = self._issued = self._issued + 1
        if async_op or not self._progress.take_turn():
            called = self._name(name or operation, number)
            run = partial(self._run_queued, operation, number, task, detail, async_op, arrays)
            work = self._progress.submit(called, run)
            if async_op:
                return work
            work.wait()
            return None
        try:
            if is_profiled():
                with record_function(f"collectives::{operation}", name):
                    self._run(operation, number, task, detail, arrays)
            else:
                self._run(operation, number, task, detail, arrays)
        finally:
            self._progress.end_turn()
        return None

    def _refuse_if_unusable(self, operation: str) -> None:
        if self._unusable:
            raise self._refusal(f"{operation}: this communicator cannot be used any more: {self._unusable}")

    def _next_number(self) -> int:
        """The number of the next operation that is issued here."""
        self._refuse_if_unusable("hand_in")
        return self._issued + 1

    def _run(self, operation: str, number: int, task: Plain, detail: bytes, arrays: Any, queued: bool = False) -> None:
        if self._failed:  # since this operation was issued
            self._refuse_if_unusable(operation)
        self._positions.enter(number, operation, detail, queued)
        if self._exempt:
            self._positions.leave()  # for the watchdog it waits for no rank
        try:
            if (queued or self._crowded) and not isinstance(task, MeetsInMemory):
                self._positions.wait_for_all(number)
            task()
        except MismatchError:  # on all ranks, before anything was sent
            self._positions.leave()
            raise
        except BaseException as error:  # the other ranks may be anywhere in the operation, and write to its memory
            keep_for_ever((arrays, self._dispatch))
            self._positions.leave(failed=True)
            self._give_up(f"{self._name(operation, number)} failed: {error!r}")
            if isinstance(error, MPI.Exception):
                raise OperationError(f"{self._name(operation, number)} failed: {error}") from error
            raise
        self._positions.leave()

    def _run_queued(self, operation: str, number: int, task: Plain, detail: bytes, async_op: bool, arrays: Any) -> None:
        """Runs an operation in its turn. arrays: to be kept alive until then.

        A MismatchError of an asynchronous operation makes the communicator unusable: each rank must find the same
        before the same operation, and when a rank waits for the error is up to its program.
        """
        try:
            self._run(operation, number, task, detail, arrays, queued=True)
        except MismatchError as error:
            if async_op:
                self._refusal = MismatchError
                self._give_up(f"{self._name(operation, number)} failed: {error}")
            raise

    def _give_up(self, why: str) -> None:
        """Refuses every operation from here on, also those that are queued."""
        self._unusable, self._failed = why, True
        self._when_dropped.detach()  # MPI may still be at work in it

    def _name(self, operation: str, number: int) -> str:
        return f"{operation} (operation {number} of this communicator, rank {self.rank} of {self.size})"

    def _allocate(self, operation: str, shape: int | Sequence[int], dtype: Any, device: Any, *, shared: bool) -> Any:
        kind = buffers.describe(dtype)
        elements = arguments.elements(f"{operation}: shape", shape)
        index = gpu_index(operation, device)
        of_dtype = f"of {kind.name}"
        made: list[Any] = []
        self._calls.clear()  # an array that is freed may have had an address that is now of this memory

        def on_gpu() -> None:
            assert index is not None
            with contextlib.suppress(MemoryError):
                nbytes = elements * kind.itemsize
                made.append(self._dispatch.allocate_on_gpu(index, nbytes, kind, shared=shared))

        if index is not None:
            self._issue(operation, on_gpu, words(of_dtype), async_op=False)
            if not made:
                raise OperationError(f"{operation}: a GPU of this group has no room for {elements} of {kind.name}")
            sizes = (shape,) if isinstance(shape, int) else tuple(shape)
            return self._dispatch.gpu.group(index).array(made[0], sizes, dtype)

        def task() -> None:
            memory = self._dispatch.allocate(elements * kind.itemsize, kind, shared=shared)
            if memory is not None:
                made.append(buffers.over(memory, memory.offset(self.local_rank), shape, dtype))

        self._issue(operation, task, words(of_dtype), async_op=False)
        return made[0] if made else buffers.empty(shape, dtype)

    def _refuse_shared(self, name: str, data: Buffer) -> None:
        if is_one_for_all(data.address):
            raise ArgumentError(f"{name}: got an array of `Communicator.shared`, one for all ranks; needs one a rank")

    def _root_only(self, name: str, array: Any, root: int, size: int, *, writable: bool) -> Buffer | None:
        """The root's large array; the others must give none."""
        if self.rank != root:
            if array is not None:
                raise ArgumentError(f"{name}: got an array on rank {self.rank}; only the root, {root}, gives one")
            return None
        data = buffers.inspect(array, name, writable=writable)
        if data.size != size:
            raise ArgumentError(f"{name}: got {data.size} elements; needs {size}, the sum of all ranks' parts")
        return data


_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()
_numbers = itertools.count()


def _all_arrive(everywhere: MPI.Request) -> bool:
    """True unless an exception is being handled and the request does not complete within `_CLOSE_AFTER_ERROR`."""
    if sys.exc_info()[0] is None:
        return True
    limit = time.monotonic() + _CLOSE_AFTER_ERROR
    while not everywhere.Test():
        if time.monotonic() > limit:
            return False
        time.sleep(1e-3)
    return True


def _close_in_child() -> None:
    """Refuses operations in a forked child of a rank, which frees nothing."""
    if is_forked():
        for comm in _alive:
            comm._closed, comm._unusable = True, why()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _tuple(counts: Any) -> Any:
    """Counts as a part of a key: by their values, whatever holds them. What is no counts is left to the checks."""
    if counts is None:
        return None
    try:
        return tuple(operator.index(count) for count in counts)
    except TypeError:
        return [counts]  # which is no key
