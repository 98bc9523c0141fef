"""Runs every algorithm at awkward sizes against numpy; any number of ranks. Prints "right" from rank 0."""

from __future__ import annotations

from functools import cache

import numpy as np

from collectives import Communicator, even_counts
from collectives.schedules.algorithms import ALGORITHMS, ROOTED

LARGE = 1_000_003


@cache
def given(size: int, rank: int) -> np.ndarray:
    """A rank's input: small whole numbers, so that any order of adding gives the same."""
    return ((np.arange(size) * 7 + rank * 3) % 11).astype(np.float32)


@cache
def total(size: int, ranks: int) -> np.ndarray:
    return np.sum([given(size, rank) for rank in range(ranks)], axis=0, dtype=np.float32)


def check(comm: Communicator, operation: str, algorithm: str, size: int, root: int) -> bool:
    """Runs one operation; whether this rank has what it must have."""
    counts = even_counts(size, comm.size)
    starts = np.cumsum([0, *counts])
    own = slice(starts[comm.rank], starts[comm.rank + 1])
    everything, mine = given(size, comm.size), given(size, comm.rank).copy()
    at_root = comm.rank == root
    options = {"algorithm": algorithm}
    match operation:
        case "all_reduce":
            comm.all_reduce(mine, **options)
            return np.array_equal(mine, total(size, comm.size))
        case "reduce":
            comm.reduce(mine, root, **options)
            return np.array_equal(mine, total(size, comm.size) if at_root else given(size, comm.rank))
        case "scan" | "exscan":
            before = comm.rank + (operation == "scan")
            getattr(comm, operation)(mine, **options)
            return np.array_equal(mine, total(size, before) if before else given(size, comm.rank))
        case "reduce_scatter":
            out = np.full(counts[comm.rank], -1, np.float32)
            comm.reduce_scatter(out, mine, **options)
            return np.array_equal(out, total(size, comm.size)[own])
        case "broadcast":
            comm.broadcast(mine, root, **options)
            return np.array_equal(mine, given(size, root))
        case "all_gather":
            out = np.full(size, -1, np.float32)
            comm.all_gather(out, everything[own], **options)
            return np.array_equal(out, everything)
        case "gather":
            gathered = np.full(size, -1, np.float32) if at_root else None
            comm.gather(gathered, everything[own], root, counts, **options)
            return gathered is None or np.array_equal(gathered, everything)
        case "scatter":
            out = np.full(counts[comm.rank], -1, np.float32)
            comm.scatter(out, everything if at_root else None, root, counts, **options)
            return np.array_equal(out, everything[own])
        case "all_to_all":
            out = np.full(comm.size * counts[comm.rank], -1, np.float32)
            comm.all_to_all(out, mine, **options)
            return np.array_equal(out, np.concatenate([given(size, rank)[own] for rank in range(comm.size)]))
    raise AssertionError(f"no test of {operation}")


def bitwise_equal(comm: Communicator, algorithm: str, size: int) -> bool:
    """Returns True if an average of numbers that must be rounded is the same on all ranks."""
    x = np.random.default_rng(comm.rank).standard_normal(size, np.float32)
    comm.all_reduce(x, "avg", algorithm=algorithm)
    of_rank_0 = x.copy()
    comm.broadcast(of_rank_0, algorithm="tree")
    return x.tobytes() == of_rank_0.tobytes()


def main() -> None:
    comm = Communicator()
    ranks = comm.size
    wrong = []
    for operation, family in ALGORITHMS.items():
        for algorithm in family:
            for size in (0, 1, ranks - 1, ranks, ranks + 1, LARGE):
                root = size % ranks if operation in ROOTED else 0
                if not check(comm, operation, algorithm, size, root):
                    wrong.append(f"{operation} {algorithm} [{size}] root {root} on rank {comm.rank}")
    for algorithm in ALGORITHMS["all_reduce"]:
        if not bitwise_equal(comm, algorithm, 100_003):
            wrong.append(f"all_reduce {algorithm}: rank {comm.rank} differs from rank 0")
    assert not wrong, wrong
    comm.barrier()
    if comm.rank == 0:
        print("right")
    comm.close()


if __name__ == "__main__":
    main()
