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
    timeout     seconds that it may take; after that OperationTimeout is raised, and the communicator cannot be used
                any more, nor the arrays, to which other ranks may still write. Only synchronous operations take it:
                of the others `Work.wait` has a timeout, after which they go on
and raises ArgumentTypeError or ArgumentError for what it cannot work with.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any, overload

from mpi4py import MPI

from . import arguments, buffers, coalesced, details, reduction
from .algorithms import ALGORITHMS
from .arguments import integer, root_rank
from .backends.backend import PartitionedCall
from .backends.cuda.arrays import gpu_index
from .backends.tables import Tables
from .buffers import Buffer, DeviceBuffer, signature
from .dropped import freed_if_mpi_fails
from .errors import ArgumentError, OperationError
from .group_objects import GroupObjects
from .idle_wait import background_on_all_ranks
from .memory.shared_memory import is_one_for_all
from .ordered_group import Plain, Prepared
from .partition import Splits
from .partitioned import PartitionedAllReduce
from .positions import NO_WORDS, words
from .prepared import NOT_YET, PREPARED, PreparedOperation
from .progress import Work
from .reduction import Reduction

_KEPT_CALLS = 4096  # of a few hundred bytes each


class Communicator(GroupObjects):
    """A group of ranks and the operations among them.

    mpi: the mpi4py communicator to work over; MPI.COMM_WORLD by default. It is duplicated (collectively), so that
    messages of this class meet none of the user's. Over the world no shared memory of the MPI library is left behind if
    the job is killed (`collectives.leftovers`).

    timeout: seconds that an operation may wait for other ranks before the job is aborted with a report of where each
    rank is; by default the environment's MPIDL_TIMEOUT, or 600; 0: for ever.

    name: what errors and the watchdog's reports call the group by, the same on every rank; may be empty.

    rank, size: this rank's number and how many there are. local_rank, local_size: the same within this node.
    nodes: how many nodes. node_ranks: the ranks of this node. node_cores: how many cores these may use together.
    mpi: the communicator that was given. world_ranks: the number in MPI.COMM_WORLD of each rank of the group, in its
    order; -1 for a rank that is not in there.

    In a `with` statement it is closed at the end, with an exception as `close` does while one is handled.

    With MPIDL_DEBUG=1 in the environment the ranks compare, before every operation, what they are about to do, and
    raise the same MismatchError on all ranks where that differs.
    """

    def __enter__(self) -> Communicator:
        """Returns the communicator itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the communicator; see `close`."""
        self.close()

    def algorithms(self, operation: str) -> list[str]:
        """The values of `algorithm=` for an operation here; not every one serves every dtype and operator."""
        if operation not in ALGORITHMS:
            raise ArgumentError(f"algorithms: got {operation!r}; needs one of {', '.join(ALGORITHMS)}")
        return self._selection.names(operation)

    @property
    def tables(self) -> Tables:
        """What "auto" takes, by operation: rows of (bytes up to which, algorithm), ascending.

        The bytes are those of the operation's larger buffer. The first row that covers them and whose algorithm serves
        dtype and operator counts.
        """
        return dict(self._selection.tables)

    # ---- reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x, or each of a list, by the reduction of all ranks' x; bitwise equal on all of them."""
        if isinstance(x, list):
            return self._coalesced("all_reduce", algorithm, async_op, timeout, wholes=x, op=op)
        key = ("all_reduce", self._signature(x), op, algorithm)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "all_reduce: x", writable=True)
            self._refuse_shared("all_reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._chosen("all_reduce", algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, "all_reduce", chosen, data, reduced)
        if timeout is None and not async_op:
            return call.at_once(self, x)
        return self._issue_otherwise(call, async_op, timeout, x)

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

        self._issue("partitioned_all_reduce", task, details.of_parts(reduced, data), async_op=False)
        told = [details.of_parts(reduced, data[: count + 1]) for count in range(len(data) if made else 0)]
        complete = [self._dispatch.silent("all_reduce", found) for found in made]
        return PartitionedAllReduce(
            parts,
            lambda part: self.all_reduce(part, op, algorithm=algorithm, async_op=True),
            made[0] if made else None,
            self._next_number,
            lambda count: self._issue("all_reduce", complete[0], told[count - 1], async_op=False, arrays=parts),
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
        timeout: float | None = None,
    ) -> Work | None:
        """out becomes this rank's part of the reduction of all ranks' x; x is unchanged. Lists: each with its like.

        x: n elements. out: counts[rank] elements; it may be x's own part of that place, which is then overwritten.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(x, list):
            arguments.no_counts("reduce_scatter", counts)
            return self._coalesced("reduce_scatter", algorithm, async_op, timeout, wholes=x, owns=out, op=op)
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
        if timeout is None and not async_op:
            return call.at_once(self, (out, x))
        return self._issue_otherwise(call, async_op, timeout, (out, x))

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Replaces the root's x, or each of a list, by the reduction of all ranks' x; x is unchanged elsewhere."""
        root = root_rank("reduce", root, self.size)
        if isinstance(x, list):
            return self._coalesced("reduce", algorithm, async_op, timeout, wholes=x, root=root, op=op)
        key = ("reduce", self._signature(x), op, algorithm, root)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "reduce: x", writable=self.rank == root)
            self._refuse_shared("reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._chosen("reduce", algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, "reduce", chosen, data, root, reduced)
        if timeout is None and not async_op:
            return call.at_once(self, x)
        return self._issue_otherwise(call, async_op, timeout, x)

    def scan(
        self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x on rank r by the reduction of the x of ranks 0 to r.

        op: not "avg", whose divisor would be another one on each rank.
        """
        return self._prefix("scan", x, op, algorithm, async_op, timeout)

    def exscan(
        self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x on rank r by the reduction of the x of ranks 0 to r - 1; on rank 0 x is unchanged.

        op: not "avg".
        """
        return self._prefix("exscan", x, op, algorithm, async_op, timeout)

    def _prefix(
        self, operation: str, x: Any, op: Any, algorithm: str, async_op: bool, timeout: float | None
    ) -> Work | None:
        key = (operation, self._signature(x), op, algorithm)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, f"{operation}: x", writable=True)
            self._refuse_shared(f"{operation}: x", data)
            reduced = reduction.check(op, data.dtype)
            if reduced.averages:
                raise ArgumentError(f"{operation}: got op 'avg'; needs op='sum' and then a division on each rank")
            chosen = self._chosen(operation, algorithm, data, data.nbytes, reduced)
            call = self._prepare(key, operation, chosen, data, reduced)
        if timeout is None and not async_op:
            return call.at_once(self, x)
        return self._issue_otherwise(call, async_op, timeout, x)

    # ---- movements --------------------------------------------------------------------------------------------

    def all_gather(
        self,
        out: Any,
        x: Any,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """out becomes all ranks' x, one behind the other. Lists: each with its like.

        out: n elements. x: counts[rank] elements; it may be out's own part of that place, and is then not copied.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(out, list):
            arguments.no_counts("all_gather", counts)
            return self._coalesced("all_gather", algorithm, async_op, timeout, wholes=out, owns=x)
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
                shared = self._dispatch.composed
                if shared is not None and shared in self._selection.names("all_gather"):
                    algorithm = shared
            chosen = self._chosen("all_gather", algorithm, data, target.nbytes)
            call = self._prepare(key, "all_gather", chosen, target, data, parts)
        if timeout is None and not async_op:
            return call.at_once(self, (out, x))
        return self._issue_otherwise(call, async_op, timeout, (out, x))

    def all_to_all(
        self,
        out: Any,
        x: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
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
        if timeout is None and not async_op:
            return call.at_once(self, (out, x))
        return self._issue_otherwise(call, async_op, timeout, (out, x))

    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x, or each of a list, on every rank by the root's."""
        root = root_rank("broadcast", root, self.size)
        if isinstance(x, list):
            return self._coalesced("broadcast", algorithm, async_op, timeout, wholes=x, root=root)
        key = ("broadcast", self._signature(x), algorithm, root)
        call = self._recall(key)
        if call is None:
            data = buffers.inspect(x, "broadcast: x", writable=self.rank != root)
            chosen = self._chosen("broadcast", algorithm, data, data.nbytes)
            call = self._prepare(key, "broadcast", chosen, data, root)
        if timeout is None and not async_op:
            return call.at_once(self, x)
        return self._issue_otherwise(call, async_op, timeout, x)

    def gather(
        self,
        out: Any,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
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
        if timeout is None and not async_op:
            return call.at_once(self, (out, x))
        return self._issue_otherwise(call, async_op, timeout, (out, x))

    def scatter(
        self,
        out: Any,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
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
        if timeout is None and not async_op:
            return call.at_once(self, (out, x))
        return self._issue_otherwise(call, async_op, timeout, (out, x))

    # ---- order ------------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Returns once every rank has called it."""
        if timeout is None and not async_op:
            return self._barrier.at_once(self, None)
        return self._issue_otherwise(self._barrier, async_op, timeout, None)

    # ---- ahead ------------------------------------------------------------------------------------------------

    def prepare(self, operation: str, *arrays: Any, **arguments: Any) -> PreparedOperation:
        """Checks an operation's arguments once, for a program that makes it again and again on the same arrays.

            step = comm.prepare("all_reduce", x, op="avg")
            step()                                             # as comm.all_reduce(x, op="avg")

        operation: the name of one of the methods that move or reduce arrays, or "barrier". arrays, arguments: as that
        method has them, but no async_op and no timeout, which the call takes. Not collective.
        """
        if operation not in PREPARED:
            raise ArgumentError(f"prepare: got {operation!r}; needs one of {', '.join(PREPARED)}")
        refused = [name for name in ("async_op", "timeout") if name in arguments]
        if refused:
            raise ArgumentError(f"prepare: got {refused[0]}; needs it where the prepared operation is called")
        made: PreparedOperation = getattr(self, operation)(*arrays, **arguments, timeout=NOT_YET)
        return made

    def compound(
        self, name: str, task: Plain, *, async_op: bool = False, device: Any = "cpu", timeout: float | None = None
    ) -> Work | None:
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
        issue = self._issue if timeout is None else self._within(timeout)
        return issue("compound", call, words(name), async_op, name=name)

    # ---- groups -----------------------------------------------------------------------------------------------

    @overload
    def translate_ranks(self, ranks: int, other: Communicator | None = None) -> int | None: ...
    @overload
    def translate_ranks(self, ranks: Iterable[int], other: Communicator | None = None) -> list[int | None]: ...

    def translate_ranks(self, ranks: Any, other: Communicator | None = None) -> Any:
        """Translates ranks of this group into the numbers that the same processes have in another group.

        ranks: a rank, or several. other: another group; by default the world. Returns a number, or a list of numbers;
        None for a process that is not in the other group. Not collective, and possible after `close`.
        """
        if other is not None and not isinstance(other, Communicator):
            raise arguments.wrong_type("translate_ranks: other", other, "a Communicator")
        several = isinstance(ranks, Iterable)
        given = [integer("translate_ranks: ranks", rank, 0, self.size - 1) for rank in (ranks if several else [ranks])]
        if other is self:
            found: list[int | None] = list(given)
        else:
            numbers = [self.world_ranks[rank] for rank in given]
            there = None if other is None else {number: rank for rank, number in enumerate(other.world_ranks)}
            found = [None if n < 0 else n if there is None else there.get(n) for n in numbers]
        return found if several else found[0]

    def split(self, color: int | None, key: int = 0, *, name: str = "") -> Communicator | None:
        """A Communicator of the ranks that give the same colour, ordered by key, then rank; None for colour None.

        name: of the new group, for errors and reports. Collective over this communicator. Groups work independently,
        also at the same time.
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
            made = Communicator(group, timeout=self._timeout, name=name)
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
        made = self.split(0, self.rank, name=self.name)
        assert made is not None
        self._duplicates.append(made)
        return made

    # ---- lists of arrays --------------------------------------------------------------------------------------

    def _coalesced(
        self,
        operation: str,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
        *,
        wholes: list[Any],
        owns: Any = None,
        root: int = 0,
        op: Any = None,
    ) -> Any:
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
        if timeout is NOT_YET:
            return PreparedOperation(self, self._prepared(operation, call, detail), (wholes, owns))
        issue = self._issue if timeout is None else self._within(timeout)
        return issue(operation, call, detail, async_op, (wholes, owns))

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
            return self._prepared(operation, self._dispatch.prepare(operation, algorithm, *checked), detail)
        free = [item.unowned() if isinstance(item, Buffer) else item for item in checked]
        call = self._prepared(operation, self._dispatch.prepare(operation, algorithm, *free), detail)
        if len(self._calls) >= _KEPT_CALLS:
            self._calls.popitem(last=False)
        with contextlib.suppress(TypeError):  # an argument that is right and yet no key
            self._calls[key] = call
        return call

    def _issue_otherwise(self, call: Prepared, async_op: bool, timeout: Any, arrays: Any) -> Any:
        """Issues the call asynchronously or with a timeout, or not yet, if it is to be prepared only."""
        if timeout is NOT_YET:
            return PreparedOperation(self, call, arrays)
        return self._issue_prepared(call, async_op, timeout, arrays)

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


def _tuple(counts: Any) -> Any:
    """Counts as a part of a key: by their values, whatever holds them. What is no counts is left to the checks."""
    if counts is None:
        return None
    try:
        return tuple(operator.index(count) for count in counts)
    except TypeError:
        return [counts]  # which is no key
