"""Divides n elements among p ranks: the number of elements of each rank, and of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Splits:
    """The cut of one rank's arrays of an all_to_all: elements to and from each rank.

    uniform: all ranks cut into parts of one size, and every rank knows it.
    """

    leaving: Sequence[int]
    arriving: Sequence[int]
    uniform: bool


def even_counts(size: int, ranks: int) -> list[int]:
    """Cuts as evenly as possible: the first `size % ranks` ranks have one element more than the others."""
    share, rest = divmod(size, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def even_pieces(counts: Sequence[int], pieces: int) -> list[int]:
    """Cuts each part as evenly as possible into so many pieces."""
    return [piece for count in counts for piece in even_counts(count, pieces)]
