"""Binomial trees: log2 p rounds of whole messages; the choice where latency counts more than bytes.

Ranks are numbered relative to the root, v = (rank - root) mod p. The parent of v is v without its lowest set bit,
so v's subtree is the run v <= u < v + lowest bit:

    8 ranks     0 -- 1
                0 -- 2 -- 3
                0 -- 4 -- 5
                     4 -- 6 -- 7

All-reduce is a reduce to rank 0 and a broadcast: 2 log2 p rounds of n bytes (Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH", section 4).
"""

from __future__ import annotations

from ..schedule import Chunks, Role, Round, Schedule, chunk, copy, finish, recv, reduce, send


def _span(v: int, ranks: int) -> int:
    """The span of the subtree of v, in ranks: its lowest set bit; for the root the power of two that covers all."""
    return v & -v if v else 1 << (ranks - 1).bit_length()


def _children(v: int, ranks: int) -> list[int]:
    """Children of v, the smallest subtree first."""
    children, bit = [], 1
    while bit < _span(v, ranks):
        if v + bit < ranks:
            children.append(v + bit)
        bit *= 2
    return children


def _reduce_rounds(rank: int, ranks: int, root: int) -> list[Round]:
    v = (rank - root) % ranks
    rounds: list[Round] = [(reduce(0, 1, (u + root) % ranks),) for u in _children(v, ranks)]
    if v == 0:
        return [*rounds, (finish(0, 1),)]
    parent = (v - (v & -v) + root) % ranks
    return [*rounds, (send(chunk(Role.WORK, 0), parent),)]


def _broadcast_rounds(rank: int, ranks: int, root: int) -> list[Round]:
    v = (rank - root) % ranks
    whole = chunk(Role.OUT, 0)
    down: list[Round] = [(send(whole, (u + root) % ranks),) for u in reversed(_children(v, ranks))]
    if v == 0:
        return down
    return [(recv(whole, (v - (v & -v) + root) % ranks),), *down]


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """Broadcasts the root's out to every rank's, in log2 p rounds."""
    return Schedule("tree", "broadcast", ranks, 1, lambda rank: _broadcast_rounds(rank, ranks, root), root)


def reduce_to_root(ranks: int, root: int = 0) -> Schedule:
    """Reduces to the root's out, in log2 p rounds."""
    return Schedule("tree", "reduce", ranks, 1, lambda rank: _reduce_rounds(rank, ranks, root), root)


def all_reduce(ranks: int) -> Schedule:
    """Reduces to rank 0, then broadcasts."""
    return Schedule(
        "tree",
        "all_reduce",
        ranks,
        1,
        lambda rank: _reduce_rounds(rank, ranks, 0) + _broadcast_rounds(rank, ranks, 0),
    )


def _pieces(v: int, ranks: int, root: int) -> list[tuple[int, int]]:
    """The chunks of v's subtree as runs of absolute rank numbers: two where they pass the end."""
    start, stop = v + root, min(v + _span(v, ranks), ranks) + root
    if stop <= ranks:
        return [(start, stop)]
    if start >= ranks:
        return [(start - ranks, stop - ranks)]
    return [(start, ranks), (0, stop - ranks)]


def gather(ranks: int, root: int = 0) -> Schedule:
    """Gathers chunk r of each rank r in the root's out; a rank passes its whole subtree on at once."""

    def rounds(rank: int) -> list[Round]:
        v = (rank - root) % ranks
        children = _children(v, ranks)
        parent = (v - (v & -v) + root) % ranks
        if v and not children:
            return [(send(chunk(Role.IN, rank), parent),)]
        role = Role.WORK if v else Role.OUT
        steps: list[Round] = [(copy(chunk(Role.IN, rank), chunk(role, rank)),)]
        for u in children:
            steps += [(recv(Chunks(role, *piece), (u + root) % ranks),) for piece in _pieces(u, ranks, root)]
        if v:
            steps += [(send(Chunks(role, *piece), parent),) for piece in _pieces(v, ranks, root)]
        return steps

    return Schedule("tree", "gather", ranks, ranks, rounds, root)


def scatter(ranks: int, root: int = 0) -> Schedule:
    """Scatters chunk r of the root's in to rank r's out: the gather backwards."""

    def rounds(rank: int) -> list[Round]:
        v = (rank - root) % ranks
        children = _children(v, ranks)
        parent = (v - (v & -v) + root) % ranks
        if v and not children:
            return [(recv(chunk(Role.OUT, rank), parent),)]
        role = Role.WORK if v else Role.IN
        steps: list[Round] = []
        if v:
            steps += [(recv(Chunks(role, *piece), parent),) for piece in _pieces(v, ranks, root)]
        for u in reversed(children):
            steps += [(send(Chunks(role, *piece), (u + root) % ranks),) for piece in _pieces(u, ranks, root)]
        return [*steps, (copy(chunk(role, rank), chunk(Role.OUT, rank)),)]

    return Schedule("tree", "scatter", ranks, ranks, rounds, root)
