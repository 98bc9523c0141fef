"""Storage on disk: a rank's file, its regions, their positions in a buffer, reading, writing, and mapped tensors.

    file     [ masters of shard 0 | exp_avg of shard 0 | exp_avg_sq of shard 0 | masters of shard 1 | ... ]
                      ######                #####                 #####            a sub-group's parts: extents
    buffer   [ ###### ##### ##### ]        extents that follow each other in the file do so here, and are read as one,
                                           with the few bytes between them

Between two extents lies padding, or the state of a parameter that this step does not change: a write leaves it out.

A step reads and writes through buffers. Whole states, which are asked for now and then, are read and written through
the mapping; the kernel keeps both equal.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...scratch_file import ScratchFile
from .offloaded_slice import OffloadedSlice

_ALIGNED = 64  # bytes: a cache line, at which a region begins
_READ_OVER = 64  # bytes: extents with less between them are read as one


class Extent(NamedTuple):
    """Bytes of the file."""

    offset: int
    nbytes: int


class Transfer(NamedTuple):
    """Bytes that lie together in the file and in the buffer."""

    offset: int
    position: int
    nbytes: int


def arrange(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """The position of each extent in a buffer, and the bytes of all: aligned as in the file, neighbours together.

    Neighbours have less than `_READ_OVER` bytes between them.

    extents: by offset.
    """
    positions: list[int] = []
    end, filled = -1, 0
    for extent in extents:
        gap = extent.offset - end
        filled = filled + gap if positions and 0 <= gap < _READ_OVER else _up(filled) + extent.offset % _ALIGNED
        positions.append(filled)
        filled += extent.nbytes
        end = extent.offset + extent.nbytes
    return positions, filled


def merged(pairs: Iterable[tuple[Extent, int]], *, to_write: bool) -> list[Transfer]:
    """Merges extents at positions, given by offset, into as few transfers as possible.

    to_write: the transfers hold nothing but the extents; else also what lies between neighbours.
    """
    transfers: list[Transfer] = []
    limit = 1 if to_write else _READ_OVER
    for (offset, nbytes), position in pairs:
        gap = offset - (transfers[-1].offset + transfers[-1].nbytes) if transfers else limit
        if 0 <= gap < limit and transfers[-1].position + transfers[-1].nbytes + gap == position:
            transfers[-1] = transfers[-1]._replace(nbytes=transfers[-1].nbytes + gap + nbytes)
        elif nbytes:
            transfers.append(Transfer(offset, position, nbytes))
    return transfers


class SwapFile:
    """A file without a name in `directory`, that the kernel removes when its last user closes it.

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

    @property
    def used(self) -> int:
        """Bytes in regions."""
        return self._end

    def extent(self, part: OffloadedSlice, name: str, dtype: torch.dtype, start: int, stop: int) -> Extent:
        """The bytes of elements start .. stop of a slice in one state. name: of the state, "" for masters."""
        first = self._region(part, name, dtype) + (part.piece.offset + start) * dtype.itemsize
        return Extent(first, (stop - start) * dtype.itemsize)

    def tensor(self, part: OffloadedSlice, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A state of a whole slice, as a mapped tensor."""
        offset, nbytes = self.extent(part, name, dtype, 0, part.size)
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        if self._map is None or offset + nbytes > len(self._map):
            self._map = self._file.map(self._length)
            self._maps.add(self._map)
        return torch.frombuffer(self._map, dtype=dtype, count=part.size, offset=offset)

    def forget(self) -> None:
        """Removes mapped pages from this process's memory, until they are used again."""
        for mapped in self._maps if hasattr(mmap.mmap, "madvise") else ():
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Fills the transfers' places in the buffer (uint8)."""
        for offset, position, nbytes in transfers:
            self._file.read(buffer[position : position + nbytes], offset)

    def write(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Writes what is at the transfers' places in the buffer (uint8)."""
        for offset, position, nbytes in transfers:
            self._file.write(buffer[position : position + nbytes], offset)

    def _region(self, part: OffloadedSlice, name: str, dtype: torch.dtype) -> int:
        """The offset of a region for a whole shard."""
        key = (part.number, name, dtype)
        if key not in self._regions:
            nbytes = part.shard.layout.shard_size * dtype.itemsize
            self._lengthen(self._end + nbytes)
            self._regions[key] = self._end
            self._end = _up(self._end + nbytes)
        return self._regions[key]

    def _lengthen(self, length: int) -> None:
        if length > self._length:
            self._file.reserve(self._length, length)
            self._length = length


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
