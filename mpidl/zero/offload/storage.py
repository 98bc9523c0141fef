"""Storage outside of torch's memory: what sub-groups ask of one, and how what they read lies in a buffer.

    storage  [ masters of shard 0 | exp_avg of shard 0 | exp_avg_sq of shard 0 | masters of shard 1 | ... ]
                      ######                #####                 #####            a sub-group's parts: extents
    buffer   [ ###### ##### ##### ]        extents that follow each other in the storage do so here, and are read as
                                           one, with the few bytes between them

Between two extents lies padding, or the state of a parameter that this step does not change: a write leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from .offloaded_slice import OffloadedSlice

ALIGNED = 64  # bytes: a cache line, at which a region begins
_READ_OVER = 64  # bytes: extents with less between them are read as one


class Extent(NamedTuple):
    """Bytes of the storage."""

    offset: int
    nbytes: int


class Transfer(NamedTuple):
    """Bytes that lie together in the storage and in the buffer."""

    offset: int
    position: int
    nbytes: int


class Storage(Protocol):
    """A rank's storage of masters and states, by slice and by the state's name, "" for masters."""

    def extent(self, part: OffloadedSlice, name: str, dtype: torch.dtype, start: int, stop: int) -> Extent:
        """The bytes of elements start .. stop of a slice in one state; the same whenever it is asked."""

    def tensor(self, part: OffloadedSlice, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A state of a whole slice, as a tensor: what is written to it is stored."""

    def forget(self) -> None:
        """Drops from this process's memory the pages that such tensors have read or written; the storage keeps them."""

    def read(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Fills the transfers' places in the buffer (uint8). Raises OSError."""

    def write(self, transfers: Iterable[Transfer], buffer: torch.Tensor) -> None:
        """Writes what is at the transfers' places in the buffer (uint8). Raises OSError."""


def arrange(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """The position of each extent in a buffer, and the bytes of all: aligned as in the storage, neighbours together.

    Neighbours have less than `_READ_OVER` bytes between them.

    extents: by offset.
    """
    positions: list[int] = []
    end, filled = -1, 0
    for extent in extents:
        gap = extent.offset - end
        filled = (
            filled + gap if positions and 0 <= gap < _READ_OVER else rounded_to_lines(filled) + extent.offset % ALIGNED
        )
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


def rounded_to_lines(nbytes: int) -> int:
    """Rounds up to whole cache lines."""
    return -(-nbytes // ALIGNED) * ALIGNED
