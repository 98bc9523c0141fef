"""A file without a name, to which tensors go from memory: optimizer state, and checkpoints of activations.

It is freed with the process, however that ends. Any thread may read and write; the caller keeps these in order.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch


class ScratchFile:
    """A file in `folder`, closed with this object. All methods raise OSError. nbytes: its size."""

    def __init__(self, folder: Path, prefix: str) -> None:
        file = tempfile.TemporaryFile(prefix=prefix, dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self._number = file.fileno()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._number

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return os.fstat(self._number).st_size

    def reserve(self, start: int, stop: int) -> None:
        """Allocates bytes start .. stop on the disk, so that it cannot be full later."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._number, start, stop - start)
        else:
            os.truncate(self._number, stop)

    def map(self, nbytes: int) -> mmap.mmap:
        """The first bytes of the file as memory."""
        return mmap.mmap(self._number, nbytes)

    def read(self, target: torch.Tensor, at: int) -> None:
        """Fills a contiguous tensor from byte `at` on."""
        left = _bytes_of(target)
        while left:
            count = os.preadv(self._number, [left], at)
            if not count:
                raise OSError(f"the file ends before byte {at + len(left)}")
            left, at = left[count:], at + count

    def write(self, source: torch.Tensor, at: int) -> None:
        """Writes a contiguous tensor from byte `at` on."""
        left = _bytes_of(source)
        while left:
            count = os.pwrite(self._number, left, at)
            left, at = left[count:], at + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
