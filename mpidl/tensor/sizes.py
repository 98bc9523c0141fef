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
from ..mesh.placement import Run


def run_of(size: int, ranks: int, rank: int) -> Run:
    """The rank's run of `size` indices, as even as it goes, longer ones first."""
    ends = [0, *accumulate(even_counts(size, ranks))]
    return ends[rank], ends[rank + 1]


@dataclass(frozen=True)
class Heads:
    """Heads of an attention that a rank holds.

    query_run, key_run: runs of query heads and of key/value heads.
    sharers: ranks with the same key/value heads.
    total_query_heads, total_key_heads: numbers of heads of the whole attention.
    """

    query_run: Run
    key_run: Run
    sharers: tuple[int, ...]
    total_query_heads: int
    total_key_heads: int

    @property
    def num_query_heads(self) -> int:
        """Number of query heads here."""
        return self.query_run[1] - self.query_run[0]

    @property
    def num_key_heads(self) -> int:
        """Number of key/value heads here."""
        return self.key_run[1] - self.key_run[0]


def cut_heads(what: str, num_query_heads: int, num_key_heads: int, ranks: int, rank: int) -> Heads:
    """Assigns heads to the ranks. what: the layer that has them, for messages.

    Raises ConfigurationError for fewer query heads than ranks, and for key/value heads that do not divide them.
    """
    if num_query_heads < ranks:
        raise ConfigurationError(
            f"{what}: has {num_query_heads} heads, fewer than the {ranks} ranks of tp; needs a smaller tp"
        )
    if num_key_heads < 1 or num_query_heads % num_key_heads:
        raise ConfigurationError(
            f"{what}: has {num_query_heads} heads and {num_key_heads} key/value heads; needs a divisor"
        )
    group = num_query_heads // num_key_heads
    if num_key_heads >= ranks:
        start, stop = run_of(num_key_heads, ranks, rank)
        return Heads((start * group, stop * group), (start, stop), (rank,), num_query_heads, num_key_heads)
    if -(-ranks // num_key_heads) > group:
        raise ConfigurationError(
            f"{what}: {-(-ranks // num_key_heads)} of {ranks} ranks of tp would share a key/value head that serves "
            f"{group} heads; needs a smaller tp"
        )
    head = next(h for h in range(num_key_heads) if rank < run_of(ranks, num_key_heads, h)[1])
    first, last = run_of(ranks, num_key_heads, head)
    start, stop = run_of(group, last - first, rank - first)
    sharers = tuple(range(first, last))
    return Heads((head * group + start, head * group + stop), (head, head + 1), sharers, num_query_heads, num_key_heads)


def to_elements(run: Run, width: int, start: int = 0) -> Run:
    """A run of heads as elements.

    width: of a head.
    start: element of head 0.
    """
    return start + run[0] * width, start + run[1] * width


def segment_runs(sizes: Sequence[int], ranks: int, rank: int) -> tuple[Run, ...]:
    """The rank's run of each of several segments that follow one another."""
    starts = [0, *accumulate(sizes)]
    return tuple(to_elements(run_of(size, ranks, rank), 1, start) for size, start in zip(sizes, starts, strict=False))
