"""Prefixes over a binomial tree: 2 log2 p rounds of whole messages, up and down (Blelloch 1989, "Scans as primitive
parallel operations", IEEE Transactions on Computers 38).

Up, the last rank of each block of 2, 4, 8, ... ranks gets the sum of its block from the middle of it. Down, the last
rank of each block, which then has its whole prefix, sends it to the middle of the next block:

    8 ranks, up      0 -> 1    2 -> 3    4 -> 5    6 -> 7        down    3 -> 5
                          1 -> 3              5 -> 7                     1 -> 2    3 -> 4    5 -> 6
                                    3 -> 7

A rank only sends or only receives in a round, so that no partial result is sent while it is overwritten. The exclusive
prefix of a rank is the inclusive one of the rank before it: one round more, into the second half of work.
"""

from __future__ import annotations

from ..schedule import Chunks, Kind, Role, Round, Schedule, Step, chunk, finish, recv, reduce, send


def _rounds(rank: int, ranks: int) -> list[Round]:
    """Leaves the inclusive prefix in work. Block ends are the ranks r with r + 1 a multiple of the block's size."""
    rounds: list[Round] = []
    place, half = rank + 1, 1
    while half < ranks:  # up
        if place % (2 * half) == 0:
            rounds.append((reduce(0, 1, rank - half),))
        elif place % half == 0 and rank + half < ranks:
            rounds.append((send(chunk(Role.WORK, 0), rank + half),))
        half *= 2
    while half:  # down
        if place % (2 * half) == 0 and rank + half < ranks:
            rounds.append((send(chunk(Role.WORK, 0), rank + half),))
        elif place % (2 * half) == half and rank >= half:
            rounds.append((reduce(0, 1, rank - half),))
        half //= 2
    return rounds


def scan(ranks: int) -> Schedule:
    """The reduction of ranks 0 to r into rank r's out."""
    return Schedule("tree", "scan", ranks, 1, lambda rank: [*_rounds(rank, ranks), (finish(0, 1),)])


def exscan(ranks: int) -> Schedule:
    """The reduction of ranks 0 to r - 1 into rank r's out; nothing into rank 0's."""

    def rounds(rank: int) -> list[Round]:
        before = chunk(Role.WORK, 1)
        shift = [send(chunk(Role.WORK, 0), rank + 1)] if rank + 1 < ranks else []
        shift += [recv(before, rank - 1)] if rank else []
        done = (Step(Kind.FINISH, Chunks(Role.OUT, 0, 1), source=before),)
        return [*_rounds(rank, ranks), *([tuple(shift)] if shift else []), *([done] if rank else [])]

    return Schedule("tree", "exscan", ranks, 1, rounds, work=2)
