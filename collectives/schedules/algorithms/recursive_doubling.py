"""Recursive doubling: in every round a rank exchanges all that it has with one at twice the distance of the last.

    8 ranks     round 1     0-1  2-3  4-5  6-7
                round 2     0-2  1-3  4-6  5-7
                round 3     0-4  1-5  2-6  3-7

All-reduce takes log2 p rounds of n bytes, the fewest rounds that there are: the choice for short messages. Where p is
no power of two, the ranks beyond the largest one below p give their data to a partner first and get the result from
it at the end: two rounds more for them.

All-gather takes log2 p rounds and n (p - 1) / p bytes; where p is no power of two it is Bruck's (`bruck`). (Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", sections 3.1 and 4.)
"""

from __future__ import annotations

from ..schedule import Chunks, Role, Round, Schedule, chunk, copy, finish, recv, reduce, send
from . import bruck


def all_reduce(ranks: int) -> Schedule:
    """Reduces in log2 p rounds: partners exchange partial results, and both add them in the order of the ranks."""
    core = 1 << ranks.bit_length() - 1
    partial, result = chunk(Role.WORK, 0), chunk(Role.OUT, 0)

    def rounds(rank: int) -> list[Round]:
        if rank >= core:
            return [(send(partial, rank - core),), (recv(result, rank - core),)]
        folded = rank + core < ranks
        fold: list[Round] = [(reduce(0, 1, rank + core),)] if folded else []
        unfold: list[Round] = [(send(result, rank + core),)] if folded else []
        partners = [rank ^ 1 << bit for bit in range(core.bit_length() - 1)]
        exchanges: list[Round] = [(send(partial, peer), reduce(0, 1, peer)) for peer in partners]
        return [*fold, *exchanges, (finish(0, 1),), *unfold]

    return Schedule("recursive_doubling", "all_reduce", ranks, 1, rounds, all_finish=True)


def gather_rounds(rank: int, ranks: int) -> list[Round]:
    """Gathers each rank's own chunk of out on all ranks; in log2 p rounds, rounded up."""
    if ranks & ranks - 1:
        return bruck.gather_rounds(rank, ranks)
    rounds: list[Round] = []
    held = 1
    while held < ranks:
        peer = rank ^ held
        mine, theirs = rank // held * held, peer // held * held
        rounds.append(
            (
                send(Chunks(Role.OUT, mine, mine + held), peer),
                recv(Chunks(Role.OUT, theirs, theirs + held), peer),
            )
        )
        held *= 2
    return rounds


def all_gather(ranks: int) -> Schedule:
    """Gathers in log2 p rounds, rounded up; what a rank sends doubles from round to round."""

    def rounds(rank: int) -> list[Round]:
        own: Round = (copy(chunk(Role.IN, rank), chunk(Role.OUT, rank)),)
        return [own, *gather_rounds(rank, ranks)]

    return Schedule("recursive_doubling", "all_gather", ranks, ranks, rounds)
