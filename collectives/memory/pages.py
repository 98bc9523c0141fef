"""Memory whose pages come and go, while its addresses stay.

    reserve(start, bytes)     the pages are there, of zeros at first
    discard(start, bytes)     the pages are given back; what is read there is zero

Views, also those that autograd keeps, are valid again once the same bytes are written anew.

To bring a page costs more than to write it, so that private ones of 2 MiB are asked for, wherever they fit in whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Any

import torch

from ..errors import OperationError
from ..process.forked import is_forked
from .shared_memory import explain

_HUGE = 2 << 20  # bytes


class Pages:
    """A mapping. file: a descriptor of the shared file behind it, or -1 for this process's own memory.

    start, nbytes of each method: in bytes; `start` a multiple of `Pages.SIZE`.
    """

    SIZE = mmap.PAGESIZE

    def __init__(self, mapping: mmap.mmap, file: int = -1) -> None:
        self._mapping, self.file = mapping, file
        # Where the system has neither, the pages stay, and all else is the same.
        self._advice = getattr(mmap, "MADV_DONTNEED" if file < 0 else "MADV_REMOVE", None)

    @classmethod
    def private(cls, nbytes: int) -> Pages:
        """Memory of this process alone."""
        return cls(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @property
    def shared(self) -> bool:
        """Returns whether other processes have the same memory."""
        return self.file >= 0

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr())

    def address_of(self, start: int) -> int:
        """The address of a byte."""
        return self.address + start

    def tensor(self, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of `size` elements."""
        if size == 0:
            return torch.empty(0, dtype=dtype)
        view: Any = memoryview(self._mapping)[start : start + size * dtype.itemsize]
        return torch.frombuffer(view, dtype=dtype)

    def claim(self) -> bool:
        """Takes a lock that one process holds until it ends; returns whether this one has it.

        Private memory: always True.
        """
        if self.file < 0:
            return True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def reserve(self, start: int, nbytes: int) -> None:
        """Makes sure that there are pages for these bytes. Raises OperationError where there is no room."""
        if self.file < 0:
            self._ask_for_huge(start, nbytes)
            return
        if not nbytes:
            return
        try:
            os.posix_fallocate(self.file, start, nbytes)
        except OSError as error:
            why = explain(_directory(self.file), error)
            raise OperationError(f"the node's shared memory has no room for {nbytes} bytes more: {why}") from None

    def _ask_for_huge(self, start: int, nbytes: int) -> None:
        """Asks for huge pages where they fit in whole, so that no byte beyond is brought. Not all systems have them."""
        base = self.address
        first, last = -(-(base + start) // _HUGE) * _HUGE, (base + start + nbytes) // _HUGE * _HUGE
        if last > first and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE, first - base, last - first)

    def discard(self, start: int, nbytes: int) -> None:
        """Gives the pages back. Shared ones go for every process: none may use their values any more."""
        if self.shared and is_forked():
            return  # they are the ranks' to give back
        whole = -(-nbytes // self.SIZE) * self.SIZE
        if nbytes and self._advice is not None:
            self._mapping.madvise(self._advice, start, min(whole, len(self._mapping) - start))


def _directory(file: int) -> str:
    """The directory in which a file was made that has no name any more."""
    try:
        return os.path.dirname(os.readlink(f"/proc/self/fd/{file}"))
    except OSError:
        return "its directory"
