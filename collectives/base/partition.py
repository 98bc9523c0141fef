"""Divides n elements among p ranks: the number of elements of each rank, and of pieces; where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Range = tuple[int, int]  # elements start <= i < stop


@dataclass(frozen=True, slots=True)
class Splits:
    """The cut of one rank's arrays of an all_to_all: elements to and from each rank.

    uniform: all ranks cut into parts of one size, and every rank knows it.
    """

    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    uniform: bool


def even_counts(size: int, ranks: int) -> list[int]:
    """Cuts as evenly as possible: the first `size % ranks` ranks have one element more than the others."""
    share, rest = divmod(size, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def ranges(counts: Sequence[int]) -> list[Range]:
    """The ranges of parts that lie one behind the other."""
    return list(pairwise((0, *accumulate(counts))))


def nth_pieces(parts: Sequence[Range], number: int, size: int) -> list[Range]:
    """The number-th `size` elements of every part."""
    return [(min(low + number * size, high), min(low + (number + 1) * size, high)) for low, high in parts]


def even_pieces(counts: Sequence[int], pieces: int) -> list[int]:
    """Cuts each part as evenly as possible into so many pieces."""
    return [piece for count in counts for piece in even_counts(count, pieces)]
