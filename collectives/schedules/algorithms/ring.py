"""Ring algorithms: every rank sends to its right neighbour only; optimal in bytes.

    reduce-scatter, 4 ranks: a partial sum of each chunk travels once around and ends, complete, at its owner

        round   rank 0      rank 1      rank 2      rank 3
          1     sends c3    sends c0    sends c1    sends c2
          2     sends c2    sends c3    sends c0    sends c1     (each: own part + what came in)
          3     sends c1    sends c2    sends c3    sends c0
        holds   c0          c1          c2          c3

Reduce-scatter and all-gather each take p - 1 rounds and n (p - 1) / p bytes a rank. An all-reduce is one after the
other, and takes twice that (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 3).
"""

from __future__ import annotations

from ..schedule import Role, Round, Schedule, chunk, copy, finish, recv, reduce, send


def _reduce_rounds(rank: int, ranks: int) -> list[Round]:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    rounds: list[Round] = []
    for step in range(1, ranks):
        leaving, arriving = (rank - step) % ranks, (rank - step - 1) % ranks
        rounds.append((send(chunk(Role.WORK, leaving), right), reduce(arriving, arriving + 1, left)))
    return [*rounds, (finish(rank, rank + 1),)]


def _gather_rounds(rank: int, ranks: int) -> list[Round]:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    return [
        (
            send(chunk(Role.OUT, (rank - step) % ranks), right),
            recv(chunk(Role.OUT, (rank - step - 1) % ranks), left),
        )
        for step in range(ranks - 1)
    ]


def reduce_scatter(ranks: int) -> Schedule:
    """Reduce-scatters in p - 1 rounds; rank r ends with chunk r."""
    return Schedule("ring", "reduce_scatter", ranks, ranks, lambda rank: _reduce_rounds(rank, ranks))


def all_gather(ranks: int) -> Schedule:
    """Gathers in p - 1 rounds; chunk r starts at rank r, which copies it while it is sent."""

    def rounds(rank: int) -> list[Round]:
        own = copy(chunk(Role.IN, rank), chunk(Role.OUT, rank))
        if ranks == 1:
            return [(own,)]
        first, *others = _gather_rounds(rank, ranks)
        _, received = first
        return [(send(chunk(Role.IN, rank), (rank + 1) % ranks), received, own), *others]

    return Schedule("ring", "all_gather", ranks, ranks, rounds)


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatters, then gathers: 2 (p - 1) rounds, 2 n (p - 1) / p bytes a rank."""
    return Schedule(
        "ring",
        "all_reduce",
        ranks,
        ranks,
        lambda rank: _reduce_rounds(rank, ranks) + _gather_rounds(rank, ranks),
    )
