"""torch.distributed's gloo, and NCCL where each rank has a GPU, started inside an MPI job, to compare with.

Nothing but benchmarks may use it.
"""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

import mpidl
from collectives import Communicator


def start_gloo(comm: Communicator, backend: str = "gloo") -> None:
    """Makes torch.distributed's default group over the job's ranks. Collective; a second call does nothing.

    backend: with "cpu:gloo,cuda:nccl" CUDA tensors go by NCCL.

    Rank 0 listens on a free port, of the loopback interface if all ranks are on its node, and tells the others.
    """
    if dist.is_initialized():
        return
    one_node = comm.nodes == 1
    if one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = "127.0.0.1" if one_node else socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((address if comm.rank == 0 else "", 0))
        port = probe.getsockname()[1]
    host, port = mpidl.broadcast_object(comm, (address, port))
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
