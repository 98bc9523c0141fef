"""Operations whose smaller array is this rank's part of the larger one, where some ranks' parts are empty."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.schedules.algorithms import ALGORITHMS
from tests.collectives.reference import named

pytestmark = pytest.mark.mpi


def layouts(ranks: int) -> list[list[int]]:
    """Elements of each rank's part: none for the first, the last, all but one, some in the middle, all."""
    return [
        [0] * (ranks - 1) + [9],
        [9] + [0] * (ranks - 1),
        [3 * (rank % 2) for rank in range(ranks)],
        [1] * (ranks - 1) + [0],
        [0] * ranks,
    ]


def array(comm: Communicator, kind: str, content: np.ndarray) -> np.ndarray | torch.Tensor:
    """A copy, of the kind that the test is about."""
    if kind == "torch":
        return torch.from_numpy(content.copy())
    made = comm.empty(content.shape, content.dtype) if kind == "symmetric" else np.empty_like(content)
    made[...] = content
    return made


KINDS = ["numpy", "torch", "symmetric"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "shared memory", *ALGORITHMS["reduce_scatter"]])
def test_reduce_scatter(comm: Communicator, algorithm: str, kind: str) -> None:
    for counts in layouts(comm.size):
        for dtype in (np.float32, np.float16):
            if algorithm == "mpi" and dtype == np.float16:
                continue
            for op in ("sum", "avg"):
                whole = np.arange(sum(counts)).astype(dtype)
                x = array(comm, kind, whole)
                part = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
                comm.reduce_scatter(x[part], x, op, counts, algorithm=named(comm, "reduce_scatter", algorithm))
                wanted = whole[part] * (comm.size if op == "sum" else 1)
                assert np.array_equal(np.asarray(x[part]), wanted), (counts, dtype, op)


def test_reduce_scatter_of_fewer_elements_than_ranks(comm: Communicator) -> None:
    for size in range(comm.size + 1):
        x = np.ones(size)
        part = x[comm.rank : comm.rank + 1]
        comm.reduce_scatter(part, x)
        assert (part == comm.size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "shared memory", *ALGORITHMS["all_gather"]])
def test_all_gather(comm: Communicator, algorithm: str, kind: str) -> None:
    for counts in layouts(comm.size):
        whole = np.arange(sum(counts)) + 1.0
        part = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        out = array(comm, kind, np.zeros(sum(counts)))
        out[part] = array(comm, kind, whole)[part]
        comm.all_gather(out, out[part], counts, algorithm=named(comm, "all_gather", algorithm))
        assert np.array_equal(np.asarray(out), whole), counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "shared memory", *ALGORITHMS["gather"]])
def test_gather_and_scatter(comm: Communicator, algorithm: str, kind: str) -> None:
    for counts in layouts(comm.size):
        for root in range(comm.size):
            whole = np.arange(sum(counts)) + 1.0
            part = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
            x = array(comm, kind, whole)
            large = array(comm, kind, whole * (comm.rank == root))
            has = comm.rank == root
            comm.gather(
                large if has else None,
                large[part] if has else x[part],
                root,
                counts,
                algorithm=named(comm, "gather", algorithm),
            )
            assert not has or np.array_equal(np.asarray(large), whole), ("gather", counts, root)
            elsewhere = array(comm, kind, np.zeros(sum(counts)))  # where it is collective, of one size on all ranks
            target = large[part] if has else elsewhere[part]
            comm.scatter(target, large if has else None, root, counts, algorithm=named(comm, "scatter", algorithm))
            assert np.array_equal(np.asarray(target), whole[part]), ("scatter", counts, root)


def test_lists(comm: Communicator) -> None:
    sizes = (2, 0, 1, 9)
    wholes = [np.ones(size) for size in sizes]
    counts = [[size // comm.size + (rank < size % comm.size) for rank in range(comm.size)] for size in sizes]
    starts = [(sum(parts[: comm.rank]), sum(parts[: comm.rank + 1])) for parts in counts]
    owns = [whole[start:stop] for whole, (start, stop) in zip(wholes, starts, strict=True)]
    comm.reduce_scatter(owns, wholes)
    assert all((own == comm.size).all() for own in owns)
    comm.all_gather(wholes, owns)
    assert all((whole == comm.size).all() for whole in wholes)
