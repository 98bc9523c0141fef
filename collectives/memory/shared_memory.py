"""Memory that every rank of a node can load and store directly.

    symmetric (`comm.empty`)                    shared (`comm.shared`)
    one array a rank, side by side              one array, the same for all
    +--------+--------+--------+                +--------+
    | rank 0 | rank 1 | rank 2 |                | 0, 1, 2|
    +--------+--------+--------+                +--------+

An allocation is one file, empty until every rank has opened it and it is unlinked: from then on nothing stays behind
however a process ends. Then its pages are reserved, each rank's by that rank, and mapped: a file system that is too
small is an error, and not a SIGBUS later, and the pages lie in the memory that is near to their rank. An allocation is
freed like any array, when nothing refers to it any more: no rank waits for another, as freeing an MPI window would.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import sys
import tempfile
import threading
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..base.buffers import address
from ..errors import OperationError

_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # no descriptor an array
DIRECTORY = "MPIDL_SHM_DIR"
JOB = "MPIDL_JOB"  # set by who started the job and removes what it leaves behind: a part of all names
_USUAL = "/dev/shm"
Made = TypeVar("Made")


class SharedMemory(mmap.mmap):
    """One allocation, as this rank maps it; arrays over it keep it alive.

    number: of the allocation, the same on all its ranks.
    stride: bytes from one rank's part to the next rank's; 0 if all share one.
    file: a descriptor of the file, where its pages come and go or others are to see it, else -1.
    """

    number: int
    stride: int
    address: int
    file: int = -1

    def offset(self, rank: int) -> int:
        """Bytes from the start to a rank's part."""
        return rank * self.stride

    def view(self, rank: int, start: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """`size` elements of a rank's part, from byte `start` of it."""
        return np.frombuffer(self, dtype, size, rank * self.stride + start)


# Where the memory that `Communicator.shared` and `pages` have made in this process begins and ends, for any group.
# Each change is one operation of the dictionary, as the garbage collector may free memory at any moment, in any thread.
one_for_all: dict[int, tuple[int, int]] = {}
_spans = itertools.count()


def note_one_for_all(memory: Any) -> None:
    """Notes that all ranks of the node share this memory, so that their contributions to a reduction would be one.

    memory: a SharedMemory, or one on a GPU.
    """
    number = next(_spans)
    one_for_all[number] = memory.address, memory.address + len(memory)
    weakref.finalize(memory, one_for_all.pop, number).atexit = False


def is_one_for_all(place: int) -> bool:
    """Returns whether an array at this address is the same memory on other ranks."""
    # A list is made at once; a tuple is not, as the collector may run while it grows.
    for start, stop in list(one_for_all.values()):  # noqa: SIM110, every operation asks, and a loop is faster
        if start <= place < stop:
            return True
    return False


def directories() -> Iterator[str]:
    """The directories for the files: memory if it has room, else a disk's page cache. As many on every rank."""
    yield os.environ.get(DIRECTORY) or _USUAL
    try:
        yield tempfile.gettempdir()
    except OSError:  # it tries to write there
        yield "/tmp"


class Allocator:
    """Makes a group of ranks' allocations, and finds the one that an array lies in.

    node: a communicator of ranks that are on one node. A method marked collective is called by all of them, in the
    same order.
    """

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self._rank, self._ranks = node.Get_rank(), node.Get_size()
        self._made = 0
        # The allocations that live, by their addresses: replaced as a whole, as other threads look meanwhile.
        self._live: list[tuple[int, weakref.ref[SharedMemory]]] = []
        self._changing = threading.RLock()

    def allocate(
        self,
        nbytes: int,
        *,
        shared: bool = False,
        reserved: bool = True,
        keep_file: bool = False,
        optional: bool = False,
    ) -> SharedMemory | None:
        """Room for the largest `nbytes` that a rank asks for, a part for each rank or one for all. Collective.

        reserved: False: no pages yet; a user of some reserves them first, by `file`.
        keep_file: have a `file` in any case.
        optional: it can be done without: only the first directory is tried, and nothing is said. None on all ranks
            where no file system has room for it.
        """
        self._made += 1
        part = _pages(max(1, self._node.allreduce(nbytes, MPI.MAX)))
        wanted = part if shared else part * self._ranks
        failure = ""
        for directory in directories():
            try:
                memory = self._map(directory, part, wanted, shared=shared, reserved=reserved, keep_file=keep_file)
            except OSError as error:
                if optional:
                    return None
                failure = failure or explain(directory, error)
                continue
            if failure:
                self._warn(f"{_size(wanted)} of the node's shared memory are in {directory}, which is slower", failure)
            memory.number, memory.stride = self._made, 0 if shared else part
            memory.address = address(np.frombuffer(memory, np.uint8))
            self._register(memory)
            return memory
        self._warn(f"the node's ranks cannot share {_size(wanted)}; ranks send messages instead", failure)
        return None

    def require(self, nbytes: int) -> SharedMemory:
        """Allocates a part for each rank; raises OperationError on all ranks where there is no room. Collective."""
        memory = self.allocate(nbytes)
        if memory is None:
            raise OperationError("the node has run out of shared memory")
        return memory

    def count(self) -> int:
        """Counts the allocations that live."""
        return sum(memory() is not None for _, memory in self._live)

    def find(self, address: int, nbytes: int) -> tuple[SharedMemory, int] | None:
        """The allocation in whose part of this rank the bytes lie, and their place in that part."""
        live = self._live
        index = bisect_right(live, address, key=itemgetter(0)) - 1
        if index < 0:
            return None
        memory = live[index][1]()
        if memory is None:
            self._forget()
            return None
        start = address - memory.address - memory.offset(self._rank)
        part = memory.stride or len(memory)
        return (memory, start) if start >= 0 and start + nbytes <= part else None

    def find_by_number(self, number: int) -> SharedMemory | None:
        """The allocation of that number, if this rank maps it."""
        found = (memory() for _, memory in self._live)
        return next((memory for memory in found if memory is not None and memory.number == number), None)

    def _map(
        self, directory: str, part: int, wanted: int, *, shared: bool, reserved: bool, keep_file: bool
    ) -> SharedMemory:
        """Each rank reserves its part of a file, one of them that of all if it is shared, and maps the whole file.

        Raises the same OSError on all ranks if any of them cannot.
        """
        file = self._open_file(directory)
        try:
            if not reserved:
                self._on_all_ranks(lambda: os.ftruncate(file, wanted))
            elif shared:
                self._on_all_ranks(lambda: os.posix_fallocate(file, 0, part) if self._rank == 0 else None)
            else:
                self._on_all_ranks(lambda: os.posix_fallocate(file, self._rank * part, part))
            memory = self._on_all_ranks(lambda: SharedMemory(file, wanted, **_UNTRACKED))
        except OSError:
            os.close(file)
            raise
        if keep_file or not reserved:
            memory.file = file
            weakref.finalize(memory, os.close, file)
        else:
            os.close(file)
        return memory

    def _open_file(self, directory: str) -> int:
        """A descriptor of an empty file, the same on all ranks, which has no name any more.

        Raises the same OSError on all ranks if any of them cannot open it.
        """
        name = "-".join(filter(None, ["mpidl", os.environ.get(JOB), secrets.token_hex(8)]))
        path = self._node.bcast(str(Path(directory) / name))
        files: list[int] = []
        try:
            if self._rank == 0:
                self._on_all_ranks(lambda: files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)))
                self._on_all_ranks(lambda: None)
            else:
                self._on_all_ranks(lambda: None)
                self._on_all_ranks(lambda: files.append(os.open(path, os.O_RDWR)))
            self._on_all_ranks(lambda: os.unlink(path) if self._rank == 0 else None)  # before any rank fills it
        except OSError:
            for file in files:
                os.close(file)
            raise
        finally:
            if self._rank == 0:
                with contextlib.suppress(OSError):  # it could not be made, or has no name any more
                    os.unlink(path)
        return files[0]

    def _on_all_ranks(self, step: Callable[[], Made]) -> Made:
        """Returns `step()`. Raises the same OSError on all ranks if it raises one on any of them. Collective."""
        code = 0
        try:
            made = step()
        except OSError as error:
            code = error.errno or errno.EIO
        code = self._node.allreduce(code, MPI.MAX)
        if code:
            raise OSError(code, os.strerror(code))
        return made

    def _warn(self, what: str, reason: str) -> None:
        """Warns on rank 0. Collective.

        Where warnings are errors it raises this one on all ranks, as the others would wait for one that has left.
        """
        raised: Warning | None = None
        if self._rank == 0:
            try:
                warnings.warn(f"{what}: {reason}", RuntimeWarning, stacklevel=2)
            except RuntimeWarning as warning:
                raised = warning
        raised = self._node.bcast(raised)
        if raised is not None:
            raise raised

    def _register(self, memory: SharedMemory) -> None:
        with self._changing:
            self._forget()
            self._live = sorted([*self._live, (memory.address, weakref.ref(memory))], key=itemgetter(0))

    def _forget(self) -> None:
        """Drops what is freed: its addresses may be given to something else."""
        with self._changing:
            self._live = [(start, memory) for start, memory in self._live if memory() is not None]


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def explain(directory: str, error: OSError) -> str:
    """Explains an error in a directory for shared memory: what has run out, and what to do about it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "a rank of the node has as many files open as it may; Communicators and symmetric arrays hold some: close "
            "and drop those that are not used, or raise the limit (ulimit -n)"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{directory} is too small: enlarge it (docker run --shm-size=8g, or mount -o remount,size=50% {_USUAL} as "
            f"root), or name a larger tmpfs in {DIRECTORY}"
        )
    return f"{directory}: {error.strerror}; another directory can be named in {DIRECTORY}"
