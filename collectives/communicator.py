"""The Communicator: the collectives that a user calls.

    from collectives import Communicator
    comm = Communicator()                  # all ranks that mpirun started
    comm.all_reduce(x, op="avg")           # in place; x: a numpy, cupy or torch array, contiguous, of any shape

Arrays are seen as flat runs of elements in C order; shapes need not agree, element counts and dtypes must. Where a
list of arrays is taken, the operation runs on all of them as one (`coalesced`); what it writes shares no memory with
another array of the list, except in a broadcast. Every rank must call the same operations in the same order, with the
same dtype, op, root, algorithm, and sizes that fit each other. Each call checks what this rank can see before anything
is sent.

Arrays may be on a GPU (`backends.cuda`), then on all ranks. The operation comes after what the caller's current stream
holds, and what is queued there later sees its result.

Every operation takes
    algorithm   "auto" (default), "mpi" for the MPI library's own, or another of `Communicator.algorithms`
    async_op    True: return a Work at once; the arrays must not be touched until it is complete (on a GPU: by
                nothing that is queued before `Work.wait`)
    timeout     seconds that it may take; after that OperationTimeout is raised, and the communicator cannot be used
                any more, nor the arrays, to which other ranks may still write. Only synchronous operations take it;
                `Work.wait` of an asynchronous one has its own timeout, after which the operation continues
and raises ArgumentTypeError or ArgumentError for what it cannot work with.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Sequence
from typing import Any

from .backends.backend import PartitionedCall, in_shared_memory
from .backends.cuda.arrays import gpu_index
from .backends.tables import Tables
from .base import arguments, buffers, reduction
from .base.arguments import root_rank
from .base.partition import Splits
from .errors import ArgumentError
from .group import details
from .group.calls import inspect_root_array, refuse_shared, shortcut, signature_of
from .group.division import GroupDivision
from .group.issue import Plain
from .group.memory import GroupMemory
from .group.objects import GroupObjects
from .group.prepared import PREPARABLE, PREPARE_ONLY, PreparedOperation
from .partitioned import PartitionedAllReduce
from .process.idle_wait import background_on_all_ranks
from .runtime.positions import words
from .runtime.progress import Work
from .schedules.algorithms import ALGORITHMS, refuse_splits


class Communicator(GroupMemory, GroupObjects, GroupDivision):
    """A group of ranks and the operations among them.

    mpi: the mpi4py communicator to work over; MPI.COMM_WORLD by default. It is duplicated (collectively), so that
    messages of this class meet none of the user's. Over the world no shared memory of the MPI library is left behind if
    the job is killed (`collectives.memory.leftovers`).

    timeout: seconds that an operation may wait for other ranks before the job is aborted with a report of where each
    rank is; by default the environment's MPIDL_TIMEOUT, or 600; 0: for ever.

    name: what errors and the watchdog's reports call the group by, the same on every rank; may be empty.

    scratch: whether one-copy operations on arrays of up to 1 MiB that are not in symmetric memory copy them through a
    scratch in shared memory on one node, which is faster. False: the kernel copies from array to array at any size,
    where it lets ranks read each other's memory; the bits of results are the same. The same on every rank; groups made
    from this one have it too.

    rank, size: this rank's number and how many there are.
    local_rank, local_size: the same within this node.
    nodes: how many nodes.
    node_ranks: the ranks of this node.
    node_cores: how many cores these may use together.
    layout: nodes and their ranks, by which tables of algorithms are kept: "2x4", or "3+1" where nodes differ.
    is_debugging: whether the ranks compare each operation before it begins, as MPIDL_DEBUG=1 on any rank asks for.
    mpi: the communicator that was given.
    world_ranks: the number in MPI.COMM_WORLD of each rank of the group, in its order; -1 for a rank that is not in
        there.

    In a `with` statement it is closed at the end, with an exception as `close` does while one is handled.

    With MPIDL_DEBUG=1 in the environment of any rank the ranks compare, before every operation, what they are about to
    do, and raise the same MismatchError on all ranks where that differs.
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
        return self._dispatch.selection.names(operation)

    @property
    def tables(self) -> Tables:
        """Tables of "auto" by operation: rows of (largest size in bytes, algorithm), ascending.

        The bytes are those of the operation's larger buffer. The first row that covers them and whose algorithm serves
        dtype and operator counts.
        """
        return dict(self._dispatch.selection.tables)

    def stats(self) -> dict[str, Any]:
        """Describes what the group has done and holds now on this rank, as JSON values for a log. Not collective.

        operations: how many were issued; a list of arrays is one, as is a compound, and messages are none.
        allocations: how many pieces of memory shared by the node's ranks live, those of duplicates and the group's own
            among them.
        gpu: None before the first operation on GPU memory, then a dictionary: `transports`, "ipc", "aware" or "staged"
            to each rank; `transport`, the one that serves all of them; `streams_wait`, whether with ipc the GPUs'
            streams wait for each other, and not the hosts.
        """
        return {
            "operations": self._issuer.issued,
            "allocations": self._end.count_allocations(),
            "gpu": self._dispatch.gpu_stats(),
        }

    # ---- reductions -------------------------------------------------------------------------------------------

    @shortcut
    def all_reduce(
        self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x, or each of a list, by the reduction of all ranks' x; bitwise equal on all of them."""
        if isinstance(x, list):
            return self._calls.issue_list("all_reduce", algorithm, async_op, timeout, wholes=x, op=op)
        key = ("all_reduce", signature_of(x), op, algorithm)
        prepared = self._calls.recall(key)
        if prepared is None:
            data = buffers.inspect(x, "all_reduce: x", writable=True)
            refuse_shared("all_reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._calls.choose("all_reduce", algorithm, data, data.nbytes, reduced)
            prepared = self._calls.prepare(key, "all_reduce", chosen, data, reduced)
        return self._calls.issue(prepared, async_op, timeout, x)

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
            refuse_shared(f"partitioned_all_reduce: part {number}", part)
            reduced = reduction.check(op, part.dtype)
        made: list[PartitionedCall] = []

        def task() -> None:
            found = self._dispatch.partitioned([part.unowned() for part in data], reduced)
            made.extend([found] if found is not None else [])

        self._issuer.issue("partitioned_all_reduce", task, details.describe_parts(reduced, data), async_op=False)
        descriptions = [details.describe_parts(reduced, data[: count + 1]) for count in range(len(data) if made else 0)]
        complete = [self._dispatch.silent("all_reduce", found) for found in made]
        return PartitionedAllReduce(
            parts,
            lambda part: self.all_reduce(part, op, algorithm=algorithm, async_op=True),
            made[0] if made else None,
            self._issuer.next_number,
            lambda count: self._issuer.issue(
                "all_reduce", complete[0], descriptions[count - 1], async_op=False, arrays=parts
            ),
        )

    @shortcut
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
        """Reduces all ranks' x and writes this rank's part to out; x is unchanged. Lists: entry by entry.

        x: n elements.
        out: counts[rank] elements; it may be x's own part of that place, which is then overwritten.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(x, list):
            arguments.refuse_counts("reduce_scatter", counts)
            return self._calls.issue_list("reduce_scatter", algorithm, async_op, timeout, wholes=x, owns=out, op=op)
        key = ("reduce_scatter", signature_of(x), signature_of(out), op, algorithm, _tuple(counts))
        prepared = self._calls.recall(key)
        if prepared is None:
            target = buffers.inspect(out, "reduce_scatter: out", writable=True)
            data = buffers.inspect(x, "reduce_scatter: x", writable=False)
            refuse_shared("reduce_scatter: x", data)
            reduced = reduction.check(op, data.dtype)
            parts = arguments.parts("reduce_scatter", counts, data.size, self.size)
            arguments.check_same_dtype("reduce_scatter", target, data)
            arguments.check_own_part("reduce_scatter: out", target, parts, self.rank)
            arguments.refuse_overlap("reduce_scatter", target, data, parts, self.rank)
            chosen = self._calls.choose("reduce_scatter", algorithm, data, data.nbytes, reduced)
            prepared = self._calls.prepare(key, "reduce_scatter", chosen, target, data, reduced, parts)
        return self._calls.issue(prepared, async_op, timeout, (out, x))

    @shortcut
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
            return self._calls.issue_list("reduce", algorithm, async_op, timeout, wholes=x, root=root, op=op)
        key = ("reduce", signature_of(x), op, algorithm, root)
        prepared = self._calls.recall(key)
        if prepared is None:
            data = buffers.inspect(x, "reduce: x", writable=self.rank == root)
            refuse_shared("reduce: x", data)
            reduced = reduction.check(op, data.dtype)
            chosen = self._calls.choose("reduce", algorithm, data, data.nbytes, reduced)
            prepared = self._calls.prepare(key, "reduce", chosen, data, root, reduced)
        return self._calls.issue(prepared, async_op, timeout, x)

    @shortcut
    def scan(
        self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x on rank r by the reduction of the x of ranks 0 to r.

        op: not "avg", whose divisor would be another one on each rank.
        """
        return self._prefix("scan", x, op, algorithm, async_op, timeout)

    @shortcut
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
        key = (operation, signature_of(x), op, algorithm)
        prepared = self._calls.recall(key)
        if prepared is None:
            data = buffers.inspect(x, f"{operation}: x", writable=True)
            refuse_shared(f"{operation}: x", data)
            reduced = reduction.check(op, data.dtype)
            if reduced.averages:
                raise ArgumentError(f"{operation}: got op 'avg'; needs op='sum' and then a division on each rank")
            chosen = self._calls.choose(operation, algorithm, data, data.nbytes, reduced)
            prepared = self._calls.prepare(key, operation, chosen, data, reduced)
        return self._calls.issue(prepared, async_op, timeout, x)

    # ---- movements --------------------------------------------------------------------------------------------

    @shortcut
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
        """Gathers all ranks' x into out, in the order of ranks. Lists: entry by entry.

        out: n elements; from `shared` on all ranks or on none.
        x: counts[rank] elements; it may be out's own part of that place, and is then not copied.
        counts: elements of each rank's part; by default as even as possible (`even_counts`).
        """
        if isinstance(out, list):
            arguments.refuse_counts("all_gather", counts)
            return self._calls.issue_list("all_gather", algorithm, async_op, timeout, wholes=out, owns=x)
        key = ("all_gather", signature_of(out), signature_of(x), algorithm, _tuple(counts))
        prepared = self._calls.recall(key)
        if prepared is None:
            target = buffers.inspect(out, "all_gather: out", writable=True)
            data = buffers.inspect(x, "all_gather: x", writable=False)
            parts = arguments.parts("all_gather", counts, target.size, self.size)
            arguments.check_same_dtype("all_gather", target, data)
            arguments.check_own_part("all_gather: x", data, parts, self.rank)
            arguments.refuse_overlap("all_gather", data, target, parts, self.rank)
            if algorithm == "auto" and self._dispatch.is_shared(target.address):
                shared = in_shared_memory(self._dispatch.backends)
                if shared is not None and shared in self._dispatch.selection.names("all_gather"):
                    algorithm = shared
            chosen = self._calls.choose("all_gather", algorithm, data, target.nbytes)
            prepared = self._calls.prepare(key, "all_gather", chosen, target, data, parts)
        return self._calls.issue(prepared, async_op, timeout, (out, x))

    @shortcut
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
        """Sends part q of x to rank q and receives part q of out from it. out and x must not overlap.

        output_splits, input_splits: elements of each part; given on all ranks or on none, and not with "bruck". By
        default every rank's x has the same number of elements, cut as evenly as possible, so that out has
        size * (this rank's part) elements.
        """
        key = (
            "all_to_all",
            signature_of(out),
            signature_of(x),
            algorithm,
            _tuple(output_splits),
            _tuple(input_splits),
        )
        prepared = self._calls.recall(key)
        if prepared is None:
            target = buffers.inspect(out, "all_to_all: out", writable=True)
            data = buffers.inspect(x, "all_to_all: x", writable=False)
            arguments.check_same_dtype("all_to_all", target, data)
            even = output_splits is None and input_splits is None
            leaving = arguments.parts("all_to_all: x, input_splits", input_splits, data.size, self.size)
            if even:
                output_splits = [leaving[self.rank]] * self.size
            arriving = arguments.parts("all_to_all: out, output_splits", output_splits, target.size, self.size)
            arguments.refuse_overlap("all_to_all", target, data)
            refuse_shared("all_to_all: out", target)
            chosen = self._calls.choose("all_to_all", algorithm, data, data.nbytes, even=even)
            if not even:
                refuse_splits("all_to_all", chosen)
            splits = Splits(leaving, arriving, uniform=even and data.size % self.size == 0)
            prepared = self._calls.prepare(key, "all_to_all", chosen, target, data, splits)
        return self._calls.issue(prepared, async_op, timeout, (out, x))

    @shortcut
    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Replaces x, or each of a list, on every rank by the root's."""
        root = root_rank("broadcast", root, self.size)
        if isinstance(x, list):
            return self._calls.issue_list("broadcast", algorithm, async_op, timeout, wholes=x, root=root)
        key = ("broadcast", signature_of(x), algorithm, root)
        prepared = self._calls.recall(key)
        if prepared is None:
            data = buffers.inspect(x, "broadcast: x", writable=self.rank != root)
            chosen = self._calls.choose("broadcast", algorithm, data, data.nbytes)
            prepared = self._calls.prepare(key, "broadcast", chosen, data, root)
        return self._calls.issue(prepared, async_op, timeout, x)

    @shortcut
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
        """Gathers all ranks' x into the root's out, in the order of ranks; out is None on the others.

        counts: elements of each rank's x, the same on every rank; by default all ranks give as many as this one.
        """
        root = root_rank("gather", root, self.size)
        key = (
            "gather",
            signature_of(out) if self.rank == root else out is None,
            signature_of(x),
            algorithm,
            root,
            _tuple(counts),
        )
        prepared = self._calls.recall(key)
        if prepared is None:
            data = buffers.inspect(x, "gather: x", writable=False)
            parts = arguments.given_parts("gather", counts, data.size, self.size)
            arguments.check_own_part("gather: x", data, parts, self.rank)
            target = inspect_root_array("gather: out", out, root, self.rank, sum(parts), writable=True)
            if target is not None:
                arguments.check_same_dtype("gather", target, data)
                arguments.refuse_overlap("gather", data, target, parts, self.rank)
            chosen = self._calls.choose("gather", algorithm, data, sum(parts) * data.dtype.itemsize)
            prepared = self._calls.prepare(key, "gather", chosen, target, data, root, parts)
        return self._calls.issue(prepared, async_op, timeout, (out, x))

    @shortcut
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
        """Scatters the root's x: out receives this rank's part; x is None on the others.

        counts: elements of each rank's out, the same on every rank; by default all get as many as this one.
        """
        root = root_rank("scatter", root, self.size)
        key = (
            "scatter",
            signature_of(x) if self.rank == root else x is None,
            signature_of(out),
            algorithm,
            root,
            _tuple(counts),
        )
        prepared = self._calls.recall(key)
        if prepared is None:
            target = buffers.inspect(out, "scatter: out", writable=True)
            parts = arguments.given_parts("scatter", counts, target.size, self.size)
            arguments.check_own_part("scatter: out", target, parts, self.rank)
            data = inspect_root_array("scatter: x", x, root, self.rank, sum(parts), writable=False)
            if data is not None:
                arguments.check_same_dtype("scatter", target, data)
                arguments.refuse_overlap("scatter", target, data, parts, self.rank)
            chosen = self._calls.choose("scatter", algorithm, target, sum(parts) * target.dtype.itemsize)
            prepared = self._calls.prepare(key, "scatter", chosen, target, data, root, parts)
        return self._calls.issue(prepared, async_op, timeout, (out, x))

    # ---- order ------------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Returns once every rank has called it."""
        if timeout is None and not async_op:
            return self._calls.barrier.at_once(None)
        return self._calls.issue(self._calls.barrier, async_op, timeout, None)

    # ---- ahead ------------------------------------------------------------------------------------------------

    def prepare(self, operation: str, *arrays: Any, **arguments: Any) -> PreparedOperation:
        """Checks an operation's arguments once, for a program that makes it again and again on the same arrays.

            step = comm.prepare("all_reduce", x, op="avg")
            step()                                             # as comm.all_reduce(x, op="avg")

        operation: the name of one of the methods that move or reduce arrays, or "barrier".
        arrays, arguments: as that method has them, but no async_op and no timeout, which the call takes. Not
            collective.
        """
        if operation not in PREPARABLE:
            raise ArgumentError(f"prepare: got {operation!r}; needs one of {', '.join(PREPARABLE)}")
        refused = [name for name in ("async_op", "timeout") if name in arguments]
        if refused:
            raise ArgumentError(f"prepare: got {refused[0]}; needs it where the prepared operation is called")
        made: PreparedOperation = getattr(self, operation)(*arrays, **arguments, timeout=PREPARE_ONLY)
        return made

    def compound(
        self, name: str, task: Plain, *, async_op: bool = False, device: Any = "cpu", timeout: float | None = None
    ) -> Work | None:
        """Runs `task` as one operation: the operations that it calls on this Communicator run at once, as its parts.

        A later part may use the result of an earlier one; no other operation runs between them.

        name: for errors.
        task: calls operations, none of them asynchronous, the same on every rank; with async_op it runs in another
            thread.

        device: as torch has it, where the arrays are. On a GPU the parts come after what torch's current stream holds
        now, and what is queued there later, or after `Work.wait`, sees what they did; while they run, and for all that
        `task` computes, another stream is torch's current one.
        """
        issuer, index = self._issuer, gpu_index("compound", device)

        def parts() -> None:
            outer, issuer.compound_in = issuer.compound_in, threading.get_ident()
            try:
                with background_on_all_ranks() if async_op else contextlib.nullcontext():
                    task()
            finally:
                issuer.compound_in = outer

        call = parts if index is None else self._dispatch.gpu.compound(name, parts, index)
        issue = issuer.issue if timeout is None else issuer.within(timeout)
        return issue("compound", call, words(name), async_op, name=name)


def _tuple(counts: Any) -> Any:
    """Converts counts to a tuple for the key; anything else is left to the checks."""
    if counts is None:
        return None
    try:
        return tuple(operator.index(count) for count in counts)
    except TypeError:
        return [counts]  # unhashable: the call is not kept
