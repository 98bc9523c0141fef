"""Tries the transports between this rank and the others, each by a transfer whose result is looked at."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from ...base.buffers import address
from . import transports
from .device import Device, Stream
from .host import Host
from .transports import Transports

_WORD = 8  # bytes that each rank tells each other one
_TOKEN = 0x6D7069646C << 16


def discover(host: Host, device: Device) -> Transports:
    """The transports of a group. Raises ArgumentError on all ranks if that of MPIDL_CUDA does not work. Collective."""
    comm = host.comm
    asked: object
    try:
        asked = transports.requested()
    except transports.ArgumentError as error:
        asked = error
    given = comm.allgather(asked)
    for found in given:
        if isinstance(found, Exception):
            raise found
    staged = [True] * comm.size
    works = {"staged": staged, "ipc": [False] * comm.size, "aware": [False] * comm.size}
    if given[0] in ("auto", "ipc"):
        works["ipc"] = _try_ipc(host, device)
    if given[0] in ("auto", "aware"):
        works["aware"] = _try_aware(comm, device)
    return transports.decide(given, comm.allgather(works))


def _try_ipc(host: Host, device: Device) -> list[bool]:
    """Each rank of the node reads a word from every other one's GPU memory."""
    comm, topology = host.comm, host.topology
    reached = [rank == comm.rank for rank in range(comm.size)]
    if topology.local_size == 1:
        return reached
    node, stream = topology.node, device.stream()
    with pinned_words(device) as words:
        mine, handle = _export(device)
        if mine:
            words[0] = _TOKEN + topology.local_rank
            device.copy(mine, address(words), _WORD, stream)
            stream.record().wait()
        handles = node.allgather(handle)  # and all words are there
        for local, other in enumerate(handles):
            if local != topology.local_rank and other is not None:
                reached[topology.members[local]] = _reads(device, stream, other, words, _TOKEN + local)
        node.Barrier()  # every rank has closed it
        if mine:
            device.free(mine)
    return reached


def _export(device: Device) -> tuple[int, bytes | None]:
    mine = 0
    try:
        mine = device.allocate(_WORD)
        return mine, device.export(mine)
    except (MemoryError, OSError):
        return mine, None


def _reads(device: Device, stream: Stream, handle: bytes, words: np.ndarray, expected: int) -> bool:
    try:
        there = device.open(handle)
    except OSError:
        return False
    words[0] = 0
    device.copy(address(words), there, _WORD, stream)
    stream.record().wait()
    device.close(there)
    return bool(words[0] == expected)


def _try_aware(comm: MPI.Intracomm, device: Device) -> list[bool]:
    """Every pair of ranks exchanges a word of GPU memory through the library, if it says that it can."""
    if not comm.allreduce(int(device.is_mpi_aware()), MPI.MIN):
        return [False] * comm.size
    ranks, stream = comm.size, device.stream()
    nbytes = ranks * _WORD
    given = device.allocate(2 * nbytes)
    taken = given + nbytes
    with pinned_words(device, 2 * ranks) as words:
        words[:ranks] = _TOKEN + comm.rank * ranks + np.arange(ranks)
        words[ranks:] = 0
        device.copy(given, address(words), 2 * nbytes, stream)
        stream.record().wait()
        try:
            comm.Alltoall(
                [device.for_mpi(given, nbytes), MPI.BYTE],
                [device.for_mpi(taken, nbytes), MPI.BYTE],
            )
        except MPI.Exception:
            device.free(given)
            return [False] * ranks
        device.copy(address(words), given, 2 * nbytes, stream)
        stream.record().wait()
        found = (words[ranks:] == _TOKEN + np.arange(ranks) * ranks + comm.rank).tolist()
    device.free(given)
    return found


@contextmanager
def pinned_words(device: Device, count: int = 1) -> Iterator[np.ndarray]:
    """Allocates `count` int64 of host memory that a GPU copies from and to."""
    memory = np.frombuffer(mmap.mmap(-1, max(mmap.PAGESIZE, count * _WORD)), np.int64)[:count]
    device.pin(address(memory), memory.nbytes)
    try:
        yield memory
    finally:
        device.unpin(address(memory))
