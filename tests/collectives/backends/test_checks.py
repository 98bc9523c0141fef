"""With MPIDL_DEBUG=1 ranks that are in different operations all get the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, MismatchError, OperationError

pytestmark = pytest.mark.mpi


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    made = Communicator()
    yield made
    made.close()


def ones(size: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(size, dtype)


# What rank 1 does differently: (of all ranks but 1, of rank 1, words that the error must have)
Call = Callable[[Communicator], Any]
WRONG: dict[str, tuple[Call, Call, str]] = {
    "operation": (
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.broadcast(ones(4)),
        "rank 1: operation 1, broadcast of 4 float32",
    ),
    "dtype": (
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.all_reduce(ones(4, "float64")),
        "rank 1: operation 1, all_reduce sum of 4 float64",
    ),
    "count": (lambda c: c.all_reduce(ones(4)), lambda c: c.all_reduce(ones(5)), "all_reduce sum of 5 float32"),
    "root": (lambda c: c.reduce(ones(4), 0), lambda c: c.reduce(ones(4), 1), "to root 1"),
    "op": (lambda c: c.reduce(ones(4)), lambda c: c.reduce(ones(4), op="max"), "reduce max of 4 float32"),
    "algorithm": (
        lambda c: c.all_reduce(ones(4), algorithm="mpi"),
        lambda c: c.all_reduce(ones(4), algorithm="ring"),
        "by ring",
    ),
    "counts": (
        lambda c: c.all_gather(ones(c.size), ones(1), [1] * c.size),
        lambda c: c.all_gather(ones(c.size), ones(0), [2, 0] + [1] * (c.size - 2)),
        "in parts of [2, 0",
    ),
    "splits": (
        lambda c: c.all_to_all(ones(c.size), ones(c.size), [1] * c.size, [1] * c.size),
        lambda c: c.all_to_all(ones(c.size), ones(c.size + 1), [1] * c.size, [2] + [1] * (c.size - 1)),
        "rank 1 gives 2 elements to rank 0, which takes 1",
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.split(0), "rank 1: operation 1, split"),
    "memory": (
        lambda c: c.empty(5, np.float32),
        lambda c: c.shared(5, np.float32),
        "rank 1: operation 1, shared of float32",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_differ_all_get_the_same_error_and_can_go_on(checked: Communicator, what: str) -> None:
    most, rank_1, words = WRONG[what]
    if checked.size > 1:
        if what == "memory" and checked.nodes > 1 and checked.local_size == 1:
            return  # each on a node of its own shares with no rank, and asks none
        with pytest.raises(MismatchError) as caught:
            (rank_1 if checked.rank == 1 else most)(checked)
        texts = checked.mpi.allgather(str(caught.value))
        assert len(set(texts)) == 1, texts
        assert words in texts[0]
    x = ones(3)
    checked.all_reduce(x)
    assert (x == checked.size).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_ranks_of_a_group_are_named_as_in_the_world(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("MPIDL_DEBUG", debug)
    last = comm.size - 1
    group = comm.split(0, -comm.rank)
    assert group is not None
    if debug == "1" or group.nodes == 1:
        x, algorithm = ones(5 if comm.rank == last else 4), "mpi" if debug == "1" else "symmetric"
        words = rf"rank {last}: .*all_reduce sum of 5 float32( by mpi)?$"
        with pytest.raises(MismatchError, match=words):
            group.all_reduce(x, algorithm=algorithm)
    called = rf"step \(operation \d of the communicator of ranks 0, .*{last}, rank {comm.rank} of {comm.size}\)"
    with pytest.raises(ValueError, match="deliberate"):
        group.compound("step", fail)
    with pytest.raises(OperationError, match=called.replace("step", "compound")):
        group.barrier()
    group.close()


def fail() -> None:
    raise ValueError("deliberate")


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
def test_one_rank_that_asks_for_checks_has_all_of_them_check(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some launchers hand the environment on to the ranks of their own host alone."""
    monkeypatch.setenv("MPIDL_DEBUG", str(int(comm.rank == 1)))
    with Communicator() as group:
        assert comm.mpi.allgather(group.is_debugging) == [True] * comm.size
        with pytest.raises(MismatchError, match="all_reduce sum of 5 float32"):
            group.all_reduce(ones(4 + (comm.rank == 1)))
        x = ones(3)
        group.all_reduce(x)
        assert (x == comm.size).all()


def test_an_asynchronous_operation_is_checked_too(checked: Communicator) -> None:
    work = checked.all_reduce(ones(4 + (checked.rank == 1)), async_op=True)
    assert work is not None
    if checked.size > 1:
        with pytest.raises(MismatchError, match="all_reduce sum of 5 float32"):
            work.wait()


@pytest.mark.mpi(min_size=2)
def test_after_an_asynchronous_mismatch_no_operation_runs_also_where_it_is_not_waited_for(
    checked: Communicator,
) -> None:
    x = ones(3)
    checked.all_reduce(ones(4 + (checked.rank == 1)), async_op=True)
    later = checked.all_reduce(x, async_op=True)
    assert later is not None
    for operation in (later.wait, lambda: checked.all_reduce(x), lambda: checked.barrier(async_op=True)):
        with pytest.raises(MismatchError, match=r"cannot be used .*all_reduce sum of 5 float32"):
            operation()
    assert (x == 1).all()


def test_every_operation_works_when_checked(checked: Communicator) -> None:
    rank, ranks = checked.rank, checked.size
    x, parts, own = np.full(ranks, rank + 1.0), np.zeros(ranks), np.zeros(1)
    root = parts if rank == 0 else None
    checked.all_reduce(x, "max")
    checked.reduce_scatter(own, x)
    checked.all_gather(parts, own)
    checked.all_to_all(np.zeros(ranks), x)
    checked.broadcast(x, ranks - 1)
    checked.gather(root, own)
    checked.scatter(own, root)
    checked.reduce(x)
    checked.barrier()
    assert checked.empty(3, np.float32).size == 3
    assert (own == ranks * ranks).all()
    assert (x == (ranks * ranks if rank == 0 else ranks)).all()
