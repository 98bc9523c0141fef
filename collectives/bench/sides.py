"""The call that each side makes of an operation: this package's algorithms, the MPI library's own, a plain copy.

name            call
auto, ring ...  `Communicator`'s method with that `algorithm=`; on a GPU by a transport: ipc, aware, staged
kernel          the one-copy algorithm of `Communicator(scratch=False)`: the kernel copies from array to array
mpi             mpi4py's upper-case function on the same arrays, without this package
gloo, nccl      torch.distributed's (`peers`)
copy            no collective but the memory's limit: each rank copies as many bytes as the one-copy algorithm reads
                and writes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ..backends.cuda.transports import TRANSPORTS
from ..backends.mpi import datatype
from ..base.buffers import describe
from ..base.reduction import PREFIXES
from ..communicator import Communicator
from ..schedules.algorithms import ALGORITHMS
from . import gpu_limits
from .buffers import Arrays, call_in_place
from .device import KERNEL, BenchDevice
from .operations import Case

Call = Callable[[], Any]
BUFFERS = ("user", "symmetric")
OVER_SHARED_MEMORY = ("symmetric", "symmetric_or_mpi", "hierarchical")
ALGORITHM_NAMES = ("auto", *OVER_SHARED_MEMORY, *sorted({name for family in ALGORITHMS.values() for name in family}))
PEERS = ("mpi", "gloo", "copy")  # that have one kind of arrays only
NAMES = {"cpu": (*ALGORITHM_NAMES, KERNEL, *PEERS), "cuda": (*TRANSPORTS, *PEERS, "nccl")}
_OPERATORS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "none": MPI.SUM}


@dataclass(frozen=True)
class Side:
    """A call, and where its result lies."""

    call: Call
    result: torch.Tensor


def side_of(
    comm: Communicator, device: BenchDevice, case: Case, name: str, buffer: str, place: str, arrays: Arrays
) -> Side | None:
    """Makes a side's call; None where it does not serve the operation, the type, the kind of arrays or the form.

    The same on every rank.
    """
    call: Call | None = None
    if name in (*PEERS, "nccl"):
        if buffer != "user":
            return None
        if name == "mpi":
            aware = not device.is_gpu or "aware" in device.groups
            return _library(comm, case, place, arrays) if aware else None
        if name == "copy":
            call = _copy(comm, case, arrays) if place == case.operation.usual else None
        elif name == "gloo" or device.nccl is not None:
            from .peers import call_of

            call = call_of(comm, case, place, arrays, device.nccl if name == "nccl" else None)
    elif case.op == "avg" and case.operation.name in PREFIXES:
        return None
    elif name == KERNEL:
        serves = "symmetric" in comm.algorithms(case.operation.name) and case.operation.name not in PREFIXES
        if name in device.groups and buffer == "user" and serves:
            call = own_call(device.groups[name], case, place, arrays, algorithm="symmetric")
    elif device.is_gpu:
        if name in device.groups and (buffer == "user" or name == "ipc"):
            call = own_call(device.groups[name], case, place, arrays)
    elif name in comm.algorithms(case.operation.name) and (buffer == "user" or name in ("auto", *OVER_SHARED_MEMORY)):
        call = own_call(comm, case, place, arrays, **({} if name == "auto" else {"algorithm": name}))
    return None if call is None else Side(call, arrays.out)


def own_call(comm: Communicator, case: Case, place: str, arrays: Arrays, **settings: Any) -> Call:
    """Makes the call of `Communicator`'s method; out of place, where it has none, a copy comes first."""
    name, x, out = case.operation.name, arrays.x, arrays.out
    method, is_root = getattr(comm, name), comm.rank == case.root
    if case.op not in ("none", "sum"):
        settings["op"] = case.op
    if case.root > 0:
        settings["root"] = case.root
    if name == "gather":
        return partial(method, out if is_root else None, x, **settings)
    if name == "scatter":
        return partial(method, out, x if is_root else None, **settings)
    if not case.operation.in_place_alone:
        return partial(method, out, x, **settings)
    copies = place == "out" and (name != "reduce" or is_root)
    return call_in_place(partial(method, **settings), arrays, copies=copies)


def _as_mpi_argument(tensor: torch.Tensor) -> Any:
    """Converts a tensor to an argument of mpi4py; on a GPU by its address."""
    if not tensor.is_cuda:
        return tensor.numpy()
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype(describe(tensor.dtype))]


def _library(comm: Communicator, case: Case, place: str, arrays: Arrays) -> Side | None:
    """The MPI library's own function, in its own form: MPI has both out of place and in place of nearly all."""
    x, out, op = arrays.x, arrays.out, _OPERATORS.get(case.op)
    if op is None:
        return None
    if x.dtype in (torch.float16, torch.bfloat16):
        if case.operation.reduces:
            return None
        x, out = x.view(torch.int16), out.view(torch.int16)
    mpi, root, is_root, inside = comm.mpi, case.root, comm.rank == case.root, place == "in"
    at_root = inside and is_root
    source, target = _as_mpi_argument(x), _as_mpi_argument(out)
    given = MPI.IN_PLACE if inside else source
    calls: dict[str, Call] = {
        "all_reduce": lambda: mpi.Allreduce(given, target, op),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block(*((given, source) if inside else (source, target)), op),
        "all_gather": lambda: mpi.Allgather(given, target),
        "all_to_all": lambda: mpi.Alltoall(source, target),
        "broadcast": lambda: mpi.Bcast(source, root),
        "reduce": lambda: mpi.Reduce(MPI.IN_PLACE if at_root else source, target if is_root else None, op, root),
        "gather": lambda: mpi.Gather(MPI.IN_PLACE if at_root else source, target if is_root else None, root),
        "scatter": lambda: mpi.Scatter(source if is_root else None, MPI.IN_PLACE if at_root else target, root),
        "scan": lambda: mpi.Scan(given, target, op),
        "exscan": lambda: mpi.Exscan(given, target, op),
    }
    call, result = calls[case.operation.name], arrays.out
    if inside and case.operation.name == "reduce_scatter":
        result = arrays.x[: out.numel()]  # MPI puts every rank's part there
    if not x.is_cuda:
        return Side(call, result)

    def after_the_stream() -> None:  # which the library does not know
        torch.cuda.current_stream().synchronize()
        call()

    return Side(after_the_stream, result)


def _copy(comm: Communicator, case: Case, arrays: Arrays) -> Call | None:
    """A copy inside this rank: half of the bytes are read, half are written."""
    size = max(arrays.x.numel(), arrays.out.numel())
    moved = gpu_limits.moved_bytes(case.operation.name, size * arrays.x.element_size(), comm.size)
    if moved is None:
        return None
    if arrays.x.is_cuda:
        given, taken = (torch.zeros(moved // 2, dtype=torch.uint8, device=arrays.x.device) for _ in range(2))
        return lambda: taken.copy_(given)
    source, target = np.ones(moved // 2, np.uint8), np.ones(moved // 2, np.uint8)
    return lambda: np.copyto(target, source)
