"""Operations on lists of arrays give what they give on each array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, ArgumentTypeError, Communicator, PremulSum, even_counts
from collectives.base.buffers import Buffer, describe
from collectives.base.coalesced import PACKED_BYTES, Item, batches
from tests.collectives.reference import assert_equal, reduced, values

# Several dtypes, empty and odd ones, one that is too large to be packed, and more than one batch.
SHAPES = [("float32", 7), ("bfloat16", 5), ("float32", 0), ("int64", 3), ("float32", 300_001), ("float32", 1)]
SHAPES += [("float32", 200_003 + number) for number in range(6)] + [("bfloat16", 2)]


def inputs(comm: Communicator) -> list[list[torch.Tensor]]:
    """Lists the arrays of each rank."""
    return [[values(size, rank, dtype) for dtype, size in SHAPES] for rank in range(comm.size)]


def own_part(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    counts = even_counts(x.numel(), comm.size)
    start = sum(counts[: comm.rank])
    return x[start : start + counts[comm.rank]]


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_reductions(comm: Communicator, algorithm: str) -> None:
    given = inputs(comm)
    expected = [reduced([arrays[number] for arrays in given], "sum") for number in range(len(SHAPES))]
    x = [array.clone() for array in given[comm.rank]]
    assert comm.all_reduce(x, algorithm=algorithm) is None
    for number, array in enumerate(x):
        assert_equal(array, expected[number], f"all_reduce {SHAPES[number]}")
    x = [array.clone() for array in given[comm.rank]]
    comm.reduce(x, comm.size - 1, algorithm="auto")
    for number, array in enumerate(x):
        wanted = expected[number] if comm.rank == comm.size - 1 else given[comm.rank][number]
        assert_equal(array, wanted, f"reduce {SHAPES[number]}")
    out = [torch.zeros_like(own_part(array, comm)) for array in x]
    x = [array.clone() for array in given[comm.rank]]
    comm.reduce_scatter(out, x, algorithm=algorithm)
    for number, array in enumerate(out):
        assert_equal(array, own_part(expected[number], comm), f"reduce_scatter {SHAPES[number]}")
        assert torch.equal(x[number], given[comm.rank][number])


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "mpi"])
def test_movements(comm: Communicator, algorithm: str) -> None:
    given = inputs(comm)
    x = [array.clone() for array in given[comm.rank]]
    work = comm.broadcast(x, comm.size - 1, algorithm=algorithm, async_op=True)
    assert work is not None
    work.wait()
    assert all(map(torch.equal, x, given[-1]))
    out = [torch.zeros_like(array) for array in x]
    comm.all_gather(out, [own_part(array, comm).clone() for array in x], algorithm=algorithm)
    assert all(map(torch.equal, out, given[-1]))


@pytest.mark.mpi
def test_each_rank_multiplies_by_its_own_factor(comm: Communicator) -> None:
    x = [np.ones(5, np.float32), np.full(70_000, 2.0, np.float32)]
    comm.all_reduce(x, PremulSum(comm.rank + 1))
    total = comm.size * (comm.size + 1) / 2
    assert (x[0] == total).all()
    assert (x[1] == 2 * total).all()


@pytest.mark.mpi
def test_many_small_arrays_are_one_operation(comm: Communicator) -> None:
    before = comm.stats()["operations"]
    comm.all_reduce([np.ones(3) for _ in range(100)])
    comm.all_reduce([])
    assert comm.stats()["operations"] == before + 2


Call = Callable[[Communicator], Any]
WRONG: dict[str, tuple[type[Exception], str, Call]] = {
    "an item that is no array": (
        ArgumentTypeError,
        "all_reduce: array 1 of the list: got builtins.str",
        lambda c: c.all_reduce([np.ones(3), "text"]),
    ),
    "lists of different lengths": (
        ArgumentError,
        "all_gather: got a list of 2 and 1; needs two lists of one length",
        lambda c: c.all_gather([np.ones(c.size)] * 2, [np.ones(1)]),
    ),
    "a list and an array": (
        ArgumentError,
        "reduce_scatter: got a list of 1 and ndarray",
        lambda c: c.reduce_scatter(np.ones(1), [np.ones(c.size)]),
    ),
    "a part of a wrong size": (
        ArgumentError,
        "all_gather: array 0 of the list: got 2 elements; needs 1",
        lambda c: c.all_gather([np.ones(c.size)], [np.ones(2)]),
    ),
    "counts": (
        ArgumentError,
        "needs one or the other",
        lambda c: c.all_gather([np.ones(c.size)], [np.ones(1)], [1] * c.size),
    ),
    "a read-only array": (
        ArgumentError,
        "all_reduce: array 0 of the list: got a read-only array",
        lambda c: c.all_reduce([np.broadcast_to(np.float32(1), (1,))]),
    ),
}


@pytest.mark.mpi
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_list_is_said(comm: Communicator, what: str) -> None:
    kind, words, call = WRONG[what]
    with pytest.raises(kind) as caught:
        call(comm)
    assert words in str(caught.value)
    x = [np.ones(2)]
    comm.all_reduce(x)
    assert (x[0] == comm.size).all()


Lists = Callable[[Communicator, np.ndarray, np.ndarray, np.ndarray], Any]
# What is written is read, or written, as another array of the list. x and y: as many elements for each rank as `part`.
SHARING: dict[str, Lists] = {
    "all_reduce, an array twice": lambda c, x, y, part: c.all_reduce([x, y, x]),
    "all_reduce, a part": lambda c, x, y, part: c.all_reduce([x, y, x[-1:]]),
    "reduce": lambda c, x, y, part: c.reduce([x, x], 0),
    "all_gather, outs": lambda c, x, y, part: c.all_gather([x, x], [part, part]),
    "all_gather, out and another x": lambda c, x, y, part: c.all_gather([x, y], [part, x[: part.size]]),
    "reduce_scatter, outs": lambda c, x, y, part: c.reduce_scatter([part, part], [x, y]),
    "reduce_scatter, out and another x": lambda c, x, y, part: c.reduce_scatter([y[: part.size], part], [x, y]),
}


@pytest.mark.mpi
@pytest.mark.limit(60)
@pytest.mark.parametrize("size", [4, 1 << 19])
@pytest.mark.parametrize("what", SHARING)
def test_what_is_written_shares_no_memory_with_another_array(comm: Communicator, what: str, size: int) -> None:
    """Small arrays and large ones are read and written at other times."""
    x, y, part = (np.ones(n, np.float32) for n in (size * comm.size, size * comm.size, size))
    with pytest.raises(ArgumentError, match=r"arrays \d and \d .*share memory"):
        SHARING[what](comm, x, y, part)
    assert (x == 1).all()


@pytest.mark.mpi
def test_what_is_read_may_be_given_twice_and_own_parts_in_place(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    x, y, out = (np.full(2 * n, r + 1.0) for _ in range(3))
    comm.reduce_scatter([y[:2], y[2:4]] if n > 1 else [y[:2], out], [x, x])
    assert (y[:2] == sum(range(n + 1))).all()
    comm.all_gather([x, out], [x[2 * r : 2 * r + 2], np.full(2, r + 1.0)])
    assert x.tolist() == out.tolist() == np.repeat(np.arange(n) + 1.0, 2).tolist()
    comm.broadcast([x, x[:2]], n - 1)
    comm.reduce([x, y], 0)
    comm.all_reduce([x[:n], x[n:], x[:0]])


def test_batches_hold_no_more_than_the_memory_and_large_arrays_alone() -> None:
    dtype = describe("float32")
    sizes = [10, 200_000, 262_144, 5] + [200_000] * 10
    items = [Item(Buffer(np.empty(size, np.float32), dtype), None, (size,)) for size in sizes]
    found = list(batches(items))
    assert sorted(item.whole.size for batch in found for item in batch) == sorted(sizes)
    assert all(sum(item.whole.nbytes for item in batch) <= PACKED_BYTES for batch in found)
    assert [item.whole.size for item in next(batch for batch in found if batch[0].whole.size == 262_144)] == [262_144]
    assert len(found) == 1 + 3
