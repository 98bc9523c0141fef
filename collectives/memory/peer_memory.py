"""Reads and writes the private memory of a node's other ranks, in one copy that the kernel makes.

Linux lets processes of one user do that (process_vm_readv) unless a sandbox forbids it; `connect` tries it out. An
array from elsewhere then needs no detour through symmetric memory: from about a mebibyte on that is faster, and it
needs no barriers between. MPI libraries move large messages inside a node in the same way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base.buffers import address
from ..base.reduction import BoundCall
from ..errors import OperationError

Array = np.ndarray[Any, Any]

_LONGEST = 1 << 30  # bytes a call; the kernel takes no more than 2 GiB
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # prctl, where the Yama module asks for consent
_TOKEN = 0x6D7069646C


class PeerMemory:
    """The memory of a group's ranks. pids: their process numbers."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        libc = ctypes.CDLL(None, use_errno=True)
        self._readv, self._writev = libc.process_vm_readv, libc.process_vm_writev
        for function in (self._readv, self._writev):
            function.restype = ctypes.c_ssize_t
            function.argtypes = [
                *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
                *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
            ]
        self._ranges = (ctypes.c_size_t * 4)()  # two struct iovec: address and length here, and there
        self._here = ctypes.addressof(self._ranges)
        self._there = self._here + ctypes.sizeof(ctypes.c_size_t) * 2

    def read(self, rank: int, source: int, target: Array) -> BoundCall:
        """The call that makes target = the rank's memory from address `source` on."""
        return self._move, (self._readv, rank, source, address(target), target.nbytes)

    def write(self, rank: int, target: int, source: Array) -> BoundCall:
        """The call that makes the rank's memory from address `target` on = source."""
        return self._move, (self._writev, rank, target, address(source), source.nbytes)

    def _move(self, function: Callable[..., int], rank: int, there: int, here: int, rest: int) -> None:
        ranges, pid = self._ranges, self._pids[rank]
        while rest:
            ranges[0], ranges[1] = here, min(rest, _LONGEST)
            ranges[2], ranges[3] = there, min(rest, _LONGEST)
            moved = function(pid, self._here, 1, self._there, 1, 0)
            if moved < 0 and ctypes.get_errno() == errno.EINTR:
                continue
            if moved <= 0:
                error = os.strerror(ctypes.get_errno())
                raise OperationError(f"the memory of local rank {rank} (process {pid}) is out of reach: {error}")
            here, there, rest = here + moved, there + moved, rest - moved


def connect(node: MPI.Intracomm) -> PeerMemory | None:
    """Access to the memory of the node's ranks, if each can reach all others'. Collective."""
    if not sys.platform.startswith("linux") or node.Get_size() == 1:
        return None
    token = np.array([_TOKEN + node.Get_rank(), 0])
    ranks = node.allgather((os.getpid(), address(token)))
    memory = PeerMemory([pid for pid, _ in ranks])
    for attempt in range(2):
        if attempt:
            ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)
            node.Barrier()
        found = np.zeros(1, token.dtype)
        try:
            for rank, (_, place) in enumerate(ranks):
                for function, arguments in (memory.read(rank, place, found), memory.write(rank, place + 8, found)):
                    function(*arguments)
                if found[0] != _TOKEN + rank:
                    raise OperationError("process ids differ between the ranks")
            reached = True
        except OperationError:
            reached = False
        if node.allreduce(int(reached), MPI.MIN):
            return memory
    return None
