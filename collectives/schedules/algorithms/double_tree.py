r"""Double binary tree: two trees at once, each for half of the data, pipelined: log2 p latency and full bandwidth.

In one binary tree half of the ranks are leaves, which receive and never send. The second tree makes the leaves of the
first its inner nodes, so that with half of the data in each every rank sends and receives about n bytes a direction.

    root 0, 7 ranks         0                           0
                            |                           |
                            4                           3
                          /   \                       /   \
                         2     6                     5     1
                        / \   /                     / \     \
                       1   3 5                     6   4     2

The root stands above both trees; the other m = p - 1 nodes are numbered from 1 so that odd ones are leaves of the
first tree (in-order numbering); in the second, node v stands where m + 1 - v stood, or v - 1 where m is odd.

Each half is cut into `pieces`. Every message has a time: piece i goes down from a node at depth d at time d + i, and
up to it in the reverse order. A rank's rounds are its messages by time, so that it passes piece i on while it
receives piece i + 1, and no round waits for a later one: at most pieces + log2 p - 1 rounds, log2 p rounded up. An
all-reduce sends each piece down as soon as it is complete at the root: at most pieces + 2 log2 p - 1 rounds (Sanders,
Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan").
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from ..schedule import Role, Round, Schedule, Step, chunk, finish, recv, reduce, send

_PIECE_BYTES = 512 << 10
_MOST_PIECES = 16


def pieces(nbytes: int) -> int:
    """Pieces of each half for n bytes: one for every 512 KiB, at least 1 and at most 16."""
    return max(1, min(_MOST_PIECES, nbytes // 2 // _PIECE_BYTES))


@dataclass(frozen=True)
class Tree:
    """parent[v] and children[v] of nodes 0 (the root) to m; depth[v]: edges from the root."""

    parent: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    depth: tuple[int, ...]


@lru_cache(maxsize=256)
def trees(ranks: int) -> tuple[Tree, Tree]:
    """The two trees over nodes 0 to ranks - 1."""
    m = ranks - 1
    parent = [0] * ranks

    def hang(low: int, high: int, above: int) -> None:
        """Hangs nodes low < v <= high under `above`; low is even, so that odd nodes come out as leaves."""
        if low == high:
            return
        node = low + (1 << (high - low).bit_length() - 1)
        parent[node] = above
        hang(low, node - 1, node)
        hang(node, high, node)

    hang(0, m, 0)
    moved = [0] * ranks
    for v in range(1, ranks):
        moved[v] = (m + 1 - v) if m % 2 == 0 else (v - 2) % m + 1
    there = {stood: v for v, stood in enumerate(moved)}
    second = [there[parent[moved[v]]] for v in range(ranks)]
    return _tree(parent), _tree(second)


def _tree(parent: list[int]) -> Tree:
    children = tuple(tuple(u for u in range(1, len(parent)) if parent[u] == v) for v in range(len(parent)))
    depth = [0] * len(parent)
    level = [0]
    while level:
        level = [u for v in level for u in children[v]]
        for u in level:
            depth[u] = depth[parent[u]] + 1
    return Tree(tuple(parent), children, tuple(depth))


def _rounds(rank: int, ranks: int, root: int, cut: int, *, up: bool, down: bool) -> list[Round]:
    """The messages of one rank by time: of the reduction, of the broadcast, or of both in a row."""
    v = (rank - root) % ranks
    both = trees(ranks)
    height = max(max(tree.depth) for tree in both)
    at: dict[int, list[Step]] = defaultdict(list)
    for number, tree in enumerate(both):
        parent = (tree.parent[v] + root) % ranks
        children = [(u + root) % ranks for u in tree.children[v]]
        depth = tree.depth[v]
        for piece in range(cut):
            c = number * cut + piece
            if up:
                at[2 * (height - 1 - depth + piece)] += [reduce(c, c + 1, u) for u in children]
                if v:
                    at[2 * (height - depth + piece)].append(send(chunk(Role.WORK, c), parent))
                else:  # between the last message up and the first one down
                    at[2 * (height - 1 + piece) + 1].append(finish(c, c + 1))
            if down:
                start = height + piece if up else piece
                if v:
                    at[2 * (start + depth - 1)].append(recv(chunk(Role.OUT, c), parent))
                at[2 * (start + depth)] += [send(chunk(Role.OUT, c), u) for u in children]
    return [tuple(at[time]) for time in sorted(at) if at[time]]


def _schedule(operation: str, ranks: int, root: int, cut: int, *, up: bool, down: bool) -> Schedule:
    return Schedule(
        "double_tree",
        operation,
        ranks,
        2 * cut,
        lambda rank: _rounds(rank, ranks, root, cut, up=up, down=down),
        root,
    )


def broadcast(ranks: int, root: int = 0, cut: int = 1) -> Schedule:
    """Broadcasts the root's out to every rank's. cut: pieces of each half."""
    return _schedule("broadcast", ranks, root, cut, up=False, down=True)


def reduce_to_root(ranks: int, root: int = 0, cut: int = 1) -> Schedule:
    """Reduces to the root's out. cut: pieces of each half."""
    return _schedule("reduce", ranks, root, cut, up=True, down=False)


def all_reduce(ranks: int, cut: int = 1) -> Schedule:
    """Reduces to rank 0 and broadcasts from there; some pieces go down while others go up. cut: pieces of each half."""
    return _schedule("all_reduce", ranks, 0, cut, up=True, down=True)
