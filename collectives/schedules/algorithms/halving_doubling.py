"""Recursive halving, then recursive doubling: as few bytes as the ring, in 2 log2 p rounds (Rabenseifner's).

    reduce-scatter, 4 ranks         round 1 (half of n)         round 2 (a quarter of n)
                      rank 0        sends c2 c3 to 2            sends c1 to 1, holds c0
                      rank 1        sends c2 c3 to 3            sends c0 to 0, holds c1
                      rank 2        sends c0 c1 to 0            sends c3 to 3, holds c2
                      rank 3        sends c0 c1 to 1            sends c2 to 2, holds c3

The reduce-scatter is the all-gather of `recursive_doubling` run backwards, and so it works for any p: where p is no
power of two both go around a circle at doubling distances, as in Bruck's all-gather, in log2 p rounds, rounded up.
Every rank sends n (p - 1) / p bytes in each of the two, for any p. (Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH", section 4; for the circle Traeff 2023, "Optimal,
non-pipelined reduce-scatter and allreduce algorithms".)
"""

from __future__ import annotations

from ..schedule import Round, Schedule, backwards, finish
from .recursive_doubling import gather_rounds


def _reduce_rounds(rank: int, ranks: int) -> list[Round]:
    return [*backwards(gather_rounds(rank, ranks)), (finish(rank, rank + 1),)]


def reduce_scatter(ranks: int) -> Schedule:
    """Reduce-scatters in log2 p rounds, rounded up; rank r ends with chunk r."""
    return Schedule("halving_doubling", "reduce_scatter", ranks, ranks, lambda rank: _reduce_rounds(rank, ranks))


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatters, then gathers: 2 log2 p rounds, rounded up, 2 n (p - 1) / p bytes a rank."""
    return Schedule(
        "halving_doubling",
        "all_reduce",
        ranks,
        ranks,
        lambda rank: _reduce_rounds(rank, ranks) + gather_rounds(rank, ranks),
    )
