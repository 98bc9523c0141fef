"""Pairwise all-to-all: in round s every rank sends to the rank s to its right and receives from s to its left.

p - 1 rounds, each chunk travels once and directly, no two ranks send to the same one in a round (Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section 3.3).
"""

from __future__ import annotations

from ..schedule import Role, Round, Schedule, chunk, copy, recv, send


def all_to_all(ranks: int) -> Schedule:
    """Sends chunk q of rank r's in to chunk r of rank q's out."""

    def rounds(rank: int) -> list[Round]:
        own: Round = (copy(chunk(Role.IN, rank), chunk(Role.OUT, rank)),)
        exchanges: list[Round] = []
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            exchanges.append((send(chunk(Role.IN, to), to), recv(chunk(Role.OUT, source), source)))
        return [own, *exchanges]

    return Schedule("pairwise", "all_to_all", ranks, ranks, rounds)
