"""All algorithms, by operation and name; one file for each family.

To add one: a file here, its name in `NAMES`, its function under each operation of `ALGORITHMS` that it serves, and its
row below. CONTRIBUTING.md has the tests.

`prefix_tree` has the scans of "tree". `hierarchical` has the schedules of `backends.hierarchical`, which stand in no
table here, as they depend on the ranks of each node.

log2 p is rounded up. P: the pieces that each half of the data is cut into (`double_tree`).

| family | operations | rounds | bytes sent a rank (n: the operation's larger buffer) |
|---|---|---|---|
| ring, ring_bidirectional | all_reduce | 2 (p - 1) | 2 n (p - 1) / p |
| ring, ring_bidirectional | reduce_scatter, all_gather | p - 1 | n (p - 1) / p |
| tree | all_reduce | 2 log2 p | at most n log2 p |
| tree | broadcast, reduce | log2 p | at most n log2 p |
| tree | gather, scatter | log2 p (root not 0: at most 2 more) | at most n log2 p |
| recursive_doubling | all_reduce | log2 p (p no power of two: 1 more) | at most n (1 + log2 p) |
| recursive_doubling | all_gather | log2 p | n (p - 1) / p |
| halving_doubling | all_reduce | 2 log2 p | 2 n (p - 1) / p |
| halving_doubling | reduce_scatter | log2 p | n (p - 1) / p |
| bruck | all_gather | log2 p | n (p - 1) / p |
| bruck | all_to_all (the same cuts on all ranks) | log2 p | about n / 2 log2 p |
| double_tree | all_reduce | at most P + 2 log2 p - 1 | at most 2 n |
| double_tree | broadcast, reduce | at most P + log2 p - 1 | at most n |
| tree | scan | at most 2 log2 p | at most n log2 p |
| tree | exscan | at most 1 + 2 log2 p | at most n (1 + log2 p) |
| pairwise | all_to_all | p - 1 | n (p - 1) / p |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ...errors import ArgumentError
from ..schedule import Schedule
from . import (
    bruck,
    double_tree,
    halving_doubling,
    pairwise,
    prefix_tree,
    recursive_doubling,
    ring,
    ring_bidirectional,
    tree,
)

ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "recursive_doubling": recursive_doubling.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "ring_bidirectional": ring_bidirectional.all_reduce,
        "double_tree": double_tree.all_reduce,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving_doubling": halving_doubling.reduce_scatter,
        "ring_bidirectional": ring_bidirectional.reduce_scatter,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "recursive_doubling": recursive_doubling.all_gather,
        "bruck": bruck.all_gather,
        "ring_bidirectional": ring_bidirectional.all_gather,
    },
    "all_to_all": {"pairwise": pairwise.all_to_all, "bruck": bruck.all_to_all},
    "broadcast": {"tree": tree.broadcast, "double_tree": double_tree.broadcast},
    "reduce": {"tree": tree.reduce_to_root, "double_tree": double_tree.reduce_to_root},
    "gather": {"tree": tree.gather},
    "scatter": {"tree": tree.scatter},
    "scan": {"tree": prefix_tree.scan},
    "exscan": {"tree": prefix_tree.exscan},
}
# All of them, in an order that is that of each operation's.
NAMES = (
    "ring",
    "tree",
    "recursive_doubling",
    "halving_doubling",
    "pairwise",
    "bruck",
    "ring_bidirectional",
    "double_tree",
)
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
EVEN_ONLY = frozenset({("all_to_all", "bruck")})  # all ranks must make the same cuts: no splits
PIPELINED: dict[str, Callable[[int], int]] = {"double_tree": double_tree.pieces}  # into how many pieces n bytes go


def refuse_splits(operation: str, algorithm: str) -> None:
    """Raises ArgumentError if the algorithm serves only the default splits, those that are the same on all ranks."""
    if (operation, algorithm) in EVEN_ONLY:
        raise ArgumentError(
            f"{operation}: got splits for algorithm {algorithm!r}; needs none, as no rank could tell the sizes of what "
            "it passes on for others, or another algorithm"
        )


def schedule(operation: str, algorithm: str, ranks: int, root: int = 0, nbytes: int = 0) -> Schedule:
    """The schedule of an algorithm that is known to exist (`ALGORITHMS`).

    nbytes: size of the array, the same on every rank, of all_reduce, reduce, scan, exscan and broadcast: a pipelined
        algorithm cuts it accordingly. `ScheduleBackend` gives none for other operations.
    """
    pieces = PIPELINED[algorithm](nbytes) if algorithm in PIPELINED else None
    return _schedule(operation, algorithm, ranks, root, pieces)


@lru_cache(maxsize=512)
def _schedule(operation: str, algorithm: str, ranks: int, root: int, pieces: int | None) -> Schedule:
    make = ALGORITHMS[operation][algorithm]
    return make(ranks, **({"root": root} if operation in ROOTED else {}), **({"cut": pieces} if pieces else {}))
