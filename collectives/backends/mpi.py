"""The MPI library's own collectives, for `algorithm="mpi"` and for what it does fastest.

Addresses, datatypes and operators are looked up once for each call that is prepared.
Movements work for every dtype, because they are sent as plain bits. Reductions need a datatype that MPI knows: fp16 and
bf16 have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base.buffers import Buffer, DType
from ..base.float_errors import silent
from ..base.partition import Splits
from ..base.reduction import KERNELS, Reduction, mean_kernel, unify_nans
from ..process.idle_wait import collective
from .backend import Backend, Call, Resources
from .mpi_functions import COUNTS, NOTHING, Finish, native_call

_NUMERIC = {"sum": MPI.SUM, "avg": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
_OPERATORS = {**_NUMERIC, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_NUMERIC_ON_BOOL = {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND, "prod": MPI.LAND}
_LOGICAL = {**_NUMERIC_ON_BOOL, "band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}


class Library(Backend):
    """The MPI library's collectives on one communicator."""

    name = "mpi"
    title = "MPI"

    def __init__(self, comm: MPI.Intracomm, over_nodes: bool = False) -> None:
        self._comm, self._over_nodes = comm, over_nodes
        self._silently = silent()
        self._unused = np.empty(0, np.uint8)  # where rank 0 of an exscan has no result

    @classmethod
    def of_group(cls, resources: Resources) -> Library:
        """Makes the backend on the communicator of a group's backends."""
        return cls(resources.comm, resources.topology.nodes > 1)

    def reduces(self, dtype: DType, op: Reduction) -> bool:
        """Returns whether MPI knows the element type, and has the operator."""
        return not dtype.widened and not op.premultiplied

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Declines operators of this module's own, which are slow, and more elements than every MPI can count."""
        reduces = super().suits(operation, dtype, elements, op, even) and not _is_float_extremum(dtype, op)
        return reduces and (not even or elements <= COUNTS)

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        """MPI_Allreduce, in place."""
        arguments = MPI.IN_PLACE, _elements(x), _operator(op, x.dtype)
        # Ranks may add in different orders, so the bits of NaNs may differ.
        unify = self._comm.size > 1 and x.dtype.kind in "fc" and not _is_float_extremum(x.dtype, op)
        return self._reduction("Allreduce", arguments, op, x, unify)

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Call:
        """MPI_Reduce_scatter, or its block variant where the parts are equal."""
        if _overlap(out, x):  # MPI refuses overlapping buffers; the result's memory is allocated for each call

            def by_copy() -> None:
                result = Buffer(np.empty_like(out.flat), out.dtype)
                self.reduce_scatter(result, x, op, counts)()
                np.copyto(out.flat, result.flat)

            return by_copy
        data, target, operator = _elements(x), _elements(out), _operator(op, x.dtype)
        if len(set(counts)) == 1:
            return self._reduction("Reduce_scatter_block", (data, target, operator), op, out)
        return self._reduction("Reduce_scatter", (data, target, list(counts), operator), op, out)

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Call:
        """MPI_Allgather, or MPI_Allgatherv where the parts differ."""
        source = MPI.IN_PLACE if _overlap(out, x) else _elements(x)
        if len(set(counts)) == 1:
            return self._collective("Allgather", source, _elements(out))
        return self._collective("Allgatherv", source, _parts(out, counts))

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """MPI_Alltoall, or MPI_Alltoallv where the ranks' parts may differ."""
        if splits.uniform:
            return self._collective("Alltoall", _elements(x), _elements(out))
        return self._collective("Alltoallv", _parts(x, splits.send_counts), _parts(out, splits.recv_counts))

    def broadcast(self, x: Buffer, root: int) -> Call:
        """MPI_Bcast."""
        return self._collective("Bcast", _elements(x), root)

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Call:
        """MPI_Reduce, in place on the root."""
        comm, operator = self._comm, _operator(op, x.dtype)
        if comm.rank != root:
            return self._collective("Reduce", _elements(x), None, operator, root)
        return self._reduction("Reduce", (MPI.IN_PLACE, _elements(x), operator, root), op, x)

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """MPI_Gather, or MPI_Gatherv where the parts differ."""
        source = MPI.IN_PLACE if out is not None and _overlap(out, x) else _elements(x)
        if len(set(counts)) == 1:
            return self._collective("Gather", source, None if out is None else _elements(out), root)
        return self._collective("Gatherv", source, None if out is None else _parts(out, counts), root)

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """MPI_Scatter, or MPI_Scatterv where the parts differ."""
        target = MPI.IN_PLACE if x is not None and _overlap(out, x) else _elements(out)
        if len(set(counts)) == 1:
            return self._collective("Scatter", None if x is None else _elements(x), target, root)
        return self._collective("Scatterv", None if x is None else _parts(x, counts), target, root)

    def scan(self, x: Buffer, op: Reduction) -> Call:
        """MPI_Scan, in place."""
        return self._collective("Scan", MPI.IN_PLACE, _elements(x), _operator(op, x.dtype))

    def exscan(self, x: Buffer, op: Reduction) -> Call:
        """MPI_Exscan, in place.

        MPI leaves rank 0's result undefined, so rank 0 gives other memory, one for all calls; no library writes to it.
        """
        operator = _operator(op, x.dtype)
        if self._comm.rank:
            return self._collective("Exscan", MPI.IN_PLACE, _elements(x), operator)
        if x.nbytes > self._unused.nbytes:
            self._unused = np.empty(x.nbytes, np.uint8)
        return self._collective("Exscan", _elements(x), [self._unused[: x.nbytes], datatype(x.dtype)], operator)

    def barrier(self) -> Call:
        """MPI_Barrier."""
        call: Call = self._comm.Barrier
        return call

    def _collective(self, name: str, *arguments: Any) -> Call:
        """The collective of that name, from C where that can be."""
        call = collective(self._comm, name, *arguments, over_nodes=self._over_nodes)
        return (None if self._over_nodes else native_call(self._comm, name, arguments, NOTHING, call)) or call

    def _reduction(
        self, name: str, arguments: tuple[Any, ...], op: Reduction, out: Buffer, unify: bool = False
    ) -> Call:
        """Makes a reduction, and of a sum an average. unify: all NaNs of the result become the same bits."""
        ranks, dtype = self._comm.size, out.dtype
        call = _finished(collective(self._comm, name, *arguments, over_nodes=self._over_nodes), op, ranks, out)
        call = partial(_run_and_unify, call, out.flat) if unify else call
        averages = op.name == "avg" and ranks > 1
        if self._over_nodes or (averages and dtype.kind != "f"):
            return call
        finish = NOTHING
        if averages or unify:
            numbers = out.size * (2 if dtype.kind == "c" else 1)
            finish = Finish(out.nbytes // max(numbers, 1), numbers, ranks if averages else 1, unify)
        return native_call(self._comm, name, arguments, finish, partial(self._silently, call)) or call


def datatype(dtype: DType) -> MPI.Datatype:
    """Returns MPI's datatype; for fp16 and bf16, which MPI lacks, that of 16-bit integers."""
    return MPI.Datatype.fromcode("H" if dtype.widened else dtype.storage.char)


def _is_float_extremum(dtype: DType, op: Reduction | None) -> bool:
    """Returns whether it is min or max of floating-point numbers, whose operators are this module's own.

    Libraries compare, so that of a NaN and a number, or of two zeros, one or the other comes out, and not the same on
    every rank.
    """
    return dtype.kind == "f" and op is not None and op.name in ("min", "max")


def _operator(op: Reduction, dtype: DType) -> MPI.Op:
    if _is_float_extremum(dtype, op):
        return _extremum(op.name)
    return (_LOGICAL if dtype.kind == "b" else _OPERATORS)[op.name]


@lru_cache
def _extremum(name: str) -> MPI.Op:
    """An operator that gives NaN where there is one, and the same bits on every rank: not commutative for MPI, so that
    contributions are combined in the order of ranks everywhere."""
    kernel = KERNELS[name]

    def combine(lower: Any, upper: Any, datatype: MPI.Datatype) -> None:
        storage = f"f{datatype.Get_size()}"
        kernel(np.frombuffer(lower, storage), into := np.frombuffer(upper, storage), out=into)

    return MPI.Op.Create(combine, commute=False)


def _elements(data: Buffer) -> list[Any]:
    """All elements; for an empty array memory of its own, as MPI refuses two buffers of one address."""
    memory = MPI.memory.fromaddress(data.address, data.nbytes) if data.size else np.empty(0, np.uint8)
    return [memory, datatype(data.dtype)]


def _parts(data: Buffer, counts: Sequence[int]) -> list[Any]:
    """The elements, cut into one part for each rank."""
    memory, datatype = _elements(data)
    return [memory, list(counts), datatype]


def _finished(call: Callable[..., Any], op: Reduction, ranks: int, out: Buffer) -> Call:
    """Adds the division of an average to the call."""
    if op.name != "avg" or ranks == 1:
        return call
    flat, (divide, by) = out.flat, mean_kernel(out.dtype.storage, ranks)

    def run() -> None:
        call()
        divide(flat, by, flat)

    return run


def _run_and_unify(call: Call, result: np.ndarray[Any, Any]) -> None:
    call()
    unify_nans(result)


def _overlap(a: Buffer, b: Buffer) -> bool:
    (a_start, a_stop), (b_start, b_stop) = a.span(), b.span()
    return a.size > 0 and b.size > 0 and a_start < b_stop and b_start < a_stop
