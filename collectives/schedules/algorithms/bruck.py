"""Bruck's algorithms: all-gather and all-to-all in log2 p rounds (rounded up) for any p.

Ranks stand on a circle. All-gather: before round k, rank r holds the chunks of the 2^k ranks from r on; it passes
them to rank r - 2^k and gets as many from rank r + 2^k. They lie in out from the start, where the run may pass the
end of the buffer and is then sent as two messages; nothing is rotated at the end.

    5 ranks, rank 0 holds       c0  |  c0 c1  |  c0 c1 c2 c3  |  c0 c1 c2 c3 c4
    and gets, from rank             1         2               4

All-to-all: what must travel j ranks to the right goes 2^k ranks in round k wherever bit k of j is set. Every rank
sends about n / 2 bytes a round, in one message that is packed first: fewer messages than pairwise and more bytes, so
the choice for short messages. What is passed on for others has sizes that only its sender and receiver know, so all
ranks must make the same cuts, as by default: splits are refused. (Bruck, Ho, Kipnis, Upfal and Weathersby 1997,
"Efficient algorithms for all-to-all communications in multiport message-passing systems".)
"""

from __future__ import annotations

from collections.abc import Iterator

from ..schedule import Chunks, Role, Round, Schedule, Step, chunk, copy, recv, send


def _runs(start: int, length: int, ranks: int) -> Iterator[Chunks]:
    """The chunks of out from `start` around the circle: two runs where they pass the end."""
    start %= ranks
    stop = start + length
    yield Chunks(Role.OUT, start, min(stop, ranks))
    if stop > ranks:
        yield Chunks(Role.OUT, 0, stop - ranks)


def gather_rounds(rank: int, ranks: int) -> list[Round]:
    """Gathers the ranks' chunks: from each rank's own chunk of out to all chunks on all ranks."""
    rounds: list[Round] = []
    held = 1
    while held < ranks:
        moved = min(held, ranks - held)
        to, source = (rank - held) % ranks, (rank + held) % ranks
        rounds.append(
            (
                *(send(run, to) for run in _runs(rank, moved, ranks)),
                *(recv(run, source) for run in _runs(source, moved, ranks)),
            )
        )
        held *= 2
    return rounds


def all_gather(ranks: int) -> Schedule:
    """Gathers in log2 p rounds, rounded up; n (p - 1) / p bytes a rank."""

    def rounds(rank: int) -> list[Round]:
        own: Round = (copy(chunk(Role.IN, rank), chunk(Role.OUT, rank)),)
        return [own, *gather_rounds(rank, ranks)]

    return Schedule("bruck", "all_gather", ranks, ranks, rounds)


def _copies(pairs: list[tuple[tuple[Role, int], tuple[Role, int]]]) -> Round:
    """Copies of single chunks, neighbours taken together."""
    steps: list[Step] = []
    for (source, s), (target, t) in pairs:
        last = steps[-1] if steps else None
        if (
            last is not None
            and last.source is not None
            and (last.source.role, last.source.stop, last.target.role, last.target.stop) == (source, s, target, t)
        ):
            steps[-1] = copy(Chunks(source, last.source.start, s + 1), Chunks(target, last.target.start, t + 1))
        else:
            steps.append(copy(chunk(source, s), chunk(target, t)))
    return tuple(steps)


def all_to_all(ranks: int) -> Schedule:
    """Exchanges chunks in log2 p rounds, rounded up, of at most n / 2 bytes; for equal cuts on all ranks.

    Work begins with the message that is sent; what comes in round k stays in an area of its own until it goes on.
    """
    moving = []  # by round: the distances j whose chunks move
    bit = 1
    while bit < ranks:
        moving.append([j for j in range(ranks) if j & bit])
        bit *= 2
    areas = [max(map(len, moving), default=0)]  # where the messages of each round begin in work, then their end
    for distances in moving:
        areas.append(areas[-1] + len(distances))

    def rounds(rank: int) -> list[Round]:
        # Where the chunk of each distance is now.
        places = [(Role.IN, (rank + j) % ranks) for j in range(ranks)]
        steps: list[Round] = [(copy(chunk(Role.IN, rank), chunk(Role.OUT, rank)),)]
        for k, distances in enumerate(moving):
            steps.append(_copies([(places[j], (Role.WORK, i)) for i, j in enumerate(distances)]))
            leaving, arriving = Chunks(Role.WORK, 0, len(distances)), Chunks(Role.WORK, areas[k], areas[k + 1])
            steps.append((send(leaving, (rank + (1 << k)) % ranks), recv(arriving, (rank - (1 << k)) % ranks)))
            for i, j in enumerate(distances):
                places[j] = (Role.WORK, areas[k] + i)
        arrived = [(places[j], (Role.OUT, (rank - j) % ranks)) for j in range(1, ranks)]
        return [*steps, _copies(arrived)]

    return Schedule("bruck", "all_to_all", ranks, ranks, rounds, work=areas[-1])
