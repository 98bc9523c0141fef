"""Storage on disk: a rank's file, its regions, reading, writing, and mapped tensors.

A step reads and writes through buffers. Whole states, which are asked for now and then, are read and written through
the mapping; the kernel keeps both equal.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from ...scratch_file import ScratchFile
from .offloaded_slice import OffloadedSlice
from .storage import Extent, Transfer, rounded_to_lines


class SwapFile:
    """A `Storage` in a file without a name in `directory`, that the kernel removes when its last user closes it.

    reserved: bytes that are allocated on the disk at once, so that it cannot be full later; more as they are needed.
    Raises OSError.
    """

    def __init__(self, directory: Path, reserved: int) -> None:
        self._file = ScratchFile(directory, "mpidl-offload-")
        self._end = self._length = 0
        self._regions: dict[tuple[int, str, torch.dtype], int] = {}
        self._map: mmap.mmap | None = None
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # shorter ones too, that tensors still have
        self._lengthen(reserved)

    def extent(self, part: OffloadedSlice, name: str, dtype: torch.dtype, start: int, stop: int) -> Extent:
        """Implements `Storage.extent`."""
        first = self._region(part, name, dtype) + (part.piece.offset + start) * dtype.itemsize
        return Extent(first, (stop - start) * dtype.itemsize)

    def tensor(self, part: OffloadedSlice, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Implements `Storage.tensor`, by a mapping of the file."""
        offset, nbytes = self.extent(part, name, dtype, 0, part.size)
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        if self._map is None or offset + nbytes > len(self._map):
            self._map = self._file.map(self._length)
            self._maps.add(self._map)
        return torch.frombuffer(self._map, dtype=dtype, count=part.size, offset=offset)

    def forget(self) -> None:
        """Implements `Storage.forget`."""
        for mapped in self._maps if hasattr(mmap.mmap, "madvise") else ():
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Implements `Storage.read`."""
        for offset, position, nbytes in transfers:
            self._file.read(buffer[position : position + nbytes], offset)

    def write(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Implements `Storage.write`."""
        for offset, position, nbytes in transfers:
            self._file.write(buffer[position : position + nbytes], offset)

    def _region(self, part: OffloadedSlice, name: str, dtype: torch.dtype) -> int:
        """The offset of a region for a whole shard."""
        key = (part.number, name, dtype)
        if key not in self._regions:
            nbytes = part.shard.layout.shard_size * dtype.itemsize
            self._lengthen(self._end + nbytes)
            self._regions[key] = self._end
            self._end = rounded_to_lines(self._end + nbytes)
        return self._regions[key]

    def _lengthen(self, length: int) -> None:
        if length > self._length:
            self._file.reserve(self._length, length)
            self._length = length
