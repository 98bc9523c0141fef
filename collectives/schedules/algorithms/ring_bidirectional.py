"""The ring in both directions at once: half of every chunk goes to the right, the other half to the left.

    all-gather, 4 ranks, round 1: rank r sends the first half of c(r) to r + 1 and the second half to r - 1

As many rounds and bytes as `ring`; a rank sends and receives on both its links in every round, which is twice as fast
where these are separate (a torus, two network ports, the two sockets of a node). Part r is chunks 2 r and 2 r + 1.
"""

from __future__ import annotations

from ..schedule import Chunks, Role, Round, Schedule, backwards, chunk, copy, finish, recv, send


def _gather_rounds(rank: int, ranks: int) -> list[Round]:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    rounds: list[Round] = []
    for step in range(ranks - 1):
        # From the left come parts of ranks ever further to the left, and the other way around.
        to_right, from_left = (rank - step) % ranks, (left - step) % ranks
        to_left, from_right = (rank + step) % ranks, (right + step) % ranks
        rounds.append(
            (
                send(chunk(Role.OUT, 2 * to_right), right),
                send(chunk(Role.OUT, 2 * to_left + 1), left),
                recv(chunk(Role.OUT, 2 * from_left), left),
                recv(chunk(Role.OUT, 2 * from_right + 1), right),
            )
        )
    return rounds


def _reduce_rounds(rank: int, ranks: int) -> list[Round]:
    return [*backwards(_gather_rounds(rank, ranks)), (finish(2 * rank, 2 * rank + 2),)]


def reduce_scatter(ranks: int) -> Schedule:
    """Reduce-scatters in p - 1 rounds; rank r ends with part r."""
    return Schedule(
        "ring_bidirectional", "reduce_scatter", ranks, 2 * ranks, lambda rank: _reduce_rounds(rank, ranks), pieces=2
    )


def all_gather(ranks: int) -> Schedule:
    """Gathers in p - 1 rounds; part r starts at rank r."""

    def rounds(rank: int) -> list[Round]:
        start, stop = 2 * rank, 2 * rank + 2
        own: Round = (copy(Chunks(Role.IN, start, stop), Chunks(Role.OUT, start, stop)),)
        return [own, *_gather_rounds(rank, ranks)]

    return Schedule("ring_bidirectional", "all_gather", ranks, 2 * ranks, rounds, pieces=2)


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatters, then gathers: 2 (p - 1) rounds, 2 n (p - 1) / p bytes a rank."""
    return Schedule(
        "ring_bidirectional",
        "all_reduce",
        ranks,
        2 * ranks,
        lambda rank: _reduce_rounds(rank, ranks) + _gather_rounds(rank, ranks),
        pieces=2,
    )
