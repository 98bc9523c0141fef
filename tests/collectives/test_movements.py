"""Operations that move data without changing it."""

from __future__ import annotations

import pytest
import torch

from collectives import ArgumentError, Communicator, even_counts
from collectives.schedules.algorithms import ALGORITHMS
from tests.collectives.reference import dtypes, named, sizes, values

pytestmark = pytest.mark.mpi


def uneven(comm: Communicator) -> list[int]:
    """A different number of elements for each rank, none for the first."""
    return [5 * rank for rank in range(comm.size)]


def own_part(comm: Communicator, whole: torch.Tensor, counts: list[int]) -> torch.Tensor:
    start = sum(counts[: comm.rank])
    return whole[start : start + counts[comm.rank]]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["all_gather"], "shared memory", "mpi"])
def test_all_gather(comm: Communicator, algorithm: str) -> None:
    for dtype in (*dtypes(algorithm), "complex64"):
        for counts in [even_counts(size, comm.size) for size in sizes(comm.size)] + [uneven(comm)]:
            whole = values(sum(counts), 9, dtype)
            given = None if counts == even_counts(sum(counts), comm.size) else counts
            out = torch.zeros_like(whole)
            comm.all_gather(
                out, own_part(comm, whole, counts).clone(), given, algorithm=named(comm, "all_gather", algorithm)
            )
            assert equal(out, whole), (dtype, counts)
            out = torch.zeros_like(whole)
            part = own_part(comm, out, counts)
            part.copy_(own_part(comm, whole, counts))
            comm.all_gather(out, part, given, algorithm=named(comm, "all_gather", algorithm))
            assert equal(out, whole), ("in place", dtype, counts)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["all_to_all"], "shared memory", "mpi"])
def test_all_to_all(comm: Communicator, algorithm: str) -> None:
    for dtype in (*dtypes(algorithm), "complex64"):
        for size in sizes(comm.size):
            inputs = [values(size, rank, dtype) for rank in range(comm.size)]
            counts = even_counts(size, comm.size)
            out = torch.zeros(comm.size * counts[comm.rank], dtype=inputs[0].dtype)
            comm.all_to_all(out, inputs[comm.rank], algorithm=named(comm, "all_to_all", algorithm))
            assert equal(out, torch.cat([own_part(comm, x, counts) for x in inputs])), (dtype, size)


@pytest.mark.parametrize("algorithm", ["auto", "pairwise", "shared memory", "mpi"])
@pytest.mark.parametrize("least", [0, 7000])
def test_all_to_all_with_splits(comm: Communicator, algorithm: str, least: int) -> None:
    """Rank r gives r + 2 q elements to rank q, or so many times as many that rank 0 gives just under 32 KiB.

    Then ranks that chose for themselves, by their own bytes, would choose different algorithms.
    """
    ranks = range(comm.size)
    scale = max(1, least // max(1, sum(2 * q for q in ranks)))
    leaving = [[scale * (r + 2 * q) for q in ranks] for r in ranks]
    inputs = [values(sum(leaving[r]), r) for r in ranks]
    arriving = [leaving[q][comm.rank] for q in ranks]
    out = torch.zeros(sum(arriving))
    comm.all_to_all(
        out, inputs[comm.rank], arriving, leaving[comm.rank], algorithm=named(comm, "all_to_all", algorithm)
    )
    expected = [inputs[q].split(leaving[q])[comm.rank] for q in ranks]
    assert equal(out, torch.cat(expected))


def test_splits_that_change_in_place_are_seen(comm: Communicator) -> None:
    splits = torch.ones(comm.size, dtype=torch.int64)
    for times in (1, 2):
        x, out = torch.full((2 * comm.size,), float(comm.rank)), torch.zeros(2 * comm.size)
        given = x[: times * comm.size], out[: times * comm.size]
        splits[:] = times
        comm.all_to_all(given[1], given[0], splits, splits)
        assert equal(given[1], torch.arange(comm.size).repeat_interleave(times).float())


def test_bruck_refuses_splits(comm: Communicator) -> None:
    x, out = torch.zeros(comm.size), torch.zeros(comm.size)
    with pytest.raises(ArgumentError, match="got splits for algorithm 'bruck'"):
        comm.all_to_all(out, x, [1] * comm.size, [1] * comm.size, algorithm="bruck")


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["broadcast"], "shared memory", "mpi"])
def test_broadcast(comm: Communicator, algorithm: str) -> None:
    for dtype in (*dtypes(algorithm), "complex64"):
        for size in sizes(comm.size):
            for root in range(comm.size):
                x = values(size, comm.rank, dtype)
                comm.broadcast(x, root, algorithm=named(comm, "broadcast", algorithm))
                assert equal(x, values(size, root, dtype)), (dtype, size, root)


@pytest.mark.parametrize("algorithm", ["auto", "tree", "shared memory", "mpi"])
def test_gather_and_scatter(comm: Communicator, algorithm: str) -> None:
    for dtype in (*dtypes(algorithm), "complex64"):
        for counts in [[size] * comm.size for size in sizes(comm.size)] + [uneven(comm)]:
            whole = values(sum(counts), 9, dtype)
            given = None if len(set(counts)) == 1 else counts
            for root in range(comm.size):
                out = torch.zeros_like(whole) if comm.rank == root else None
                comm.gather(
                    out, own_part(comm, whole, counts).clone(), root, given, algorithm=named(comm, "gather", algorithm)
                )
                assert out is None or equal(out, whole), ("gather", dtype, counts, root)
                part = torch.zeros(counts[comm.rank], dtype=whole.dtype)
                comm.scatter(
                    part, whole if comm.rank == root else None, root, given, algorithm=named(comm, "scatter", algorithm)
                )
                assert equal(part, own_part(comm, whole, counts)), ("scatter", dtype, counts, root)


@pytest.mark.parametrize("algorithm", ["tree", "shared memory", "mpi"])
def test_gather_and_scatter_in_place_at_the_root(comm: Communicator, algorithm: str) -> None:
    whole = values(4 * comm.size, 9)
    counts = [4] * comm.size
    out = torch.zeros_like(whole) if comm.rank == 0 else None
    part = own_part(comm, whole, counts).clone()
    if out is not None:
        out[:4] = part
        part = out[:4]
    comm.gather(out, part, algorithm=named(comm, "gather", algorithm))
    assert out is None or equal(out, whole)
    source = whole.clone() if comm.rank == 0 else None
    target = torch.zeros(4) if source is None else source[:4]
    comm.scatter(target, source, algorithm=named(comm, "scatter", algorithm))
    assert equal(target, own_part(comm, whole, counts))


MANY_SEGMENTS = [(operation, name) for operation in ("all_gather", "all_to_all") for name in ALGORITHMS[operation]]


@pytest.mark.parametrize(("operation", "algorithm"), MANY_SEGMENTS)
def test_messages_of_many_segments(comm: Communicator, operation: str, algorithm: str) -> None:
    each = 700_001  # 2.8 MB: three segments, the last one short
    mine = values(each * comm.size, comm.rank) if operation == "all_to_all" else values(each, comm.rank)
    out = torch.zeros(each * comm.size)
    getattr(comm, operation)(out, mine, algorithm=algorithm)
    if operation == "all_gather":
        expected = [values(each, rank) for rank in range(comm.size)]
    else:
        sent = [values(each * comm.size, rank) for rank in range(comm.size)]
        expected = [x[comm.rank * each :][:each] for x in sent]
    assert equal(out, torch.cat(expected))
