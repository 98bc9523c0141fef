"""torch.distributed's gloo, and NCCL where each rank has a GPU, started inside an MPI job, to compare with.

The one file of the packages that uses torch.distributed. It is imported only where gloo or NCCL is asked for, by this
benchmark and by those in `benchmarks/`.
"""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..base.reduction import PREFIXES
from ..communicator import Communicator
from .buffers import Arrays, call_in_place
from .operations import Case

_OPERATORS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG", "none": "SUM"}


def start_gloo(comm: Communicator, backend: str = "gloo") -> None:
    """Makes torch.distributed's default group over the job's ranks. Collective; a second call does nothing.

    backend: with "cpu:gloo,cuda:nccl" CUDA tensors go by NCCL.

    Rank 0 listens on a free port, of the loopback interface if all ranks are on its node, and tells the others.
    """
    if dist.is_initialized():
        return
    # Torch warns of functions in whose place its older versions, which are served too, have nothing else.
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed")
    one_node = comm.nodes == 1
    if one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = "127.0.0.1" if one_node else socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((address if comm.rank == 0 else "", 0))
        port = probe.getsockname()[1]
    host, port = comm.broadcast_object((address, port))
    dist.init_process_group(
        backend,
        init_method=f"tcp://{host}:{port}",
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(minutes=5),
    )


def nccl_group() -> object:
    """A group of all ranks for CUDA tensors, after `start_gloo`; None where torch has no NCCL. Collective."""
    return dist.new_group(backend="nccl") if dist.is_nccl_available() else None


def stop_gloo() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def call_of(comm: Communicator, case: Case, place: str, arrays: Arrays, group: Any = None) -> Callable[[], Any] | None:
    """Makes the call by torch.distributed's group, its default one by default; None for what it has not.

    It works in place alone where its tensor is the result, as `Communicator` does; out of place a copy comes first.
    """
    name, operation = case.operation.name, case.operation
    if comm.size == 1 or name in PREFIXES or (place == "in" and operation.parts):
        return None
    x, out, root, is_root = arrays.x, arrays.out, case.root, comm.rank == case.root
    op = getattr(dist.ReduceOp, _OPERATORS[case.op])
    pieces = list((out if name == "gather" else x).chunk(comm.size)) if is_root else None
    if operation.in_place_alone:
        in_place: dict[str, Callable[[torch.Tensor], Any]] = {
            "all_reduce": lambda array: dist.all_reduce(array, op, group=group),
            "reduce": lambda array: dist.reduce(array, root, op, group=group),
            "broadcast": lambda array: dist.broadcast(array, root, group=group),
        }
        copies = place == "out" and (name != "reduce" or is_root)
        return call_in_place(in_place[name], arrays, copies=copies)
    calls: dict[str, Callable[[], Any]] = {
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, op, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "gather": lambda: dist.gather(x, pieces, root, group=group),
        "scatter": lambda: dist.scatter(out, pieces, root, group=group),
    }
    return calls[name]
