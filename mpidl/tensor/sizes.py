"""Runs of a dimension's indices that each rank of tp holds: uneven where the ranks do not divide it, and never padded.

    7 heads of width 2 over 2 ranks               heads 0..4 | 4..7             elements 0..8 | 8..14
    queries, keys, values in one weight of 3 * 14     0..8 14..22 28..36 | 8..14 22..28 36..42

Grouped heads: each key/value head serves a run of query heads. With at least as many key/value heads as ranks, a rank
holds whole groups. With fewer, every rank holds one key/value head, which it shares with the ranks that hold the other
query heads of the group.

    8 query heads, 2 key/value heads, 3 ranks     rank 0: q 0..2, kv 0    rank 1: q 2..4, kv 0    rank 2: q 4..8, kv 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from collectives import even_counts

from ..errors import ConfigurationError

Run = tuple[int, int]


def run_of(size: int, ranks: int, rank: int) -> Run:
    """The rank's run of `size` indices, as even as it goes, longer ones first."""
    ends = [0, *accumulate(even_counts(size, ranks))]
    return ends[rank], ends[rank + 1]


@dataclass(frozen=True)
class Heads:
    """Heads of an attention that a rank holds.

    query, key: runs of query heads and of key/value heads.
    sharers: ranks with the same key/value heads.
    all_query, all_key: numbers of heads of the whole attention.
    """

    query: Run
    key: Run
    sharers: tuple[int, ...]
    all_query: int
    all_key: int

    @property
    def queries(self) -> int:
        """Number of query heads here."""
        return self.query[1] - self.query[0]

    @property
    def keys(self) -> int:
        """Number of key/value heads here."""
        return self.key[1] - self.key[0]


def cut_heads(what: str, query: int, key: int, ranks: int, rank: int) -> Heads:
    """Deals the heads to the ranks. what: whose heads, for messages.

    Raises ConfigurationError for fewer query heads than ranks, and for key/value heads that do not divide them.
    """
    if query < ranks:
        raise ConfigurationError(f"{what}: has {query} heads, fewer than the {ranks} ranks of tp; needs a smaller tp")
    if key < 1 or query % key:
        raise ConfigurationError(f"{what}: has {query} heads and {key} key/value heads; needs a divisor")
    group = query // key
    if key >= ranks:
        start, stop = run_of(key, ranks, rank)
        return Heads((start * group, stop * group), (start, stop), (rank,), query, key)
    if -(-ranks // key) > group:
        raise ConfigurationError(
            f"{what}: {-(-ranks // key)} of {ranks} ranks of tp would share a key/value head that serves {group} "
            "heads; needs a smaller tp"
        )
    head = next(h for h in range(key) if rank < run_of(ranks, key, h)[1])
    first, last = run_of(ranks, key, head)
    start, stop = run_of(group, last - first, rank - first)
    sharers = tuple(range(first, last))
    return Heads((head * group + start, head * group + stop), (head, head + 1), sharers, query, key)


def in_elements(run: Run, width: int, start: int = 0) -> Run:
    """A run of heads as elements.

    width: of a head.
    start: element of head 0.
    """
    return start + run[0] * width, start + run[1] * width


def segments(sizes: Sequence[int], ranks: int, rank: int) -> tuple[Run, ...]:
    """The rank's run of each of several segments that follow one another."""
    starts = [0, *accumulate(sizes)]
    return tuple(in_elements(run_of(size, ranks, rank), 1, start) for size, start in zip(sizes, starts, strict=False))
