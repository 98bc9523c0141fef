"""Private arrays that go through the scratch of symmetric memory, and which do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator, even_counts
from collectives.backends.symmetric.staging import Staging
from collectives.memory.peer_memory import connect
from collectives.memory.shared_memory import Allocator
from collectives.process import topology

pytestmark = pytest.mark.mpi

SIZES = (3, 5_000, 100_003, 300_007, 700_001)  # fp32: whole, in slices of one, two and more chunks


@pytest.fixture
def node(comm: Communicator) -> Iterator[Communicator]:
    """The ranks of this node, in a group of their own, whose scratch takes another buffer with each chunk."""
    group = comm.split(comm.rank // comm.local_size if comm.nodes > 1 else 0)
    assert group is not None
    yield group
    group.close()


def given(size: int, rank: int, number: int) -> np.ndarray:
    """A rank's input of an operation: whole numbers, other ones each time."""
    return ((np.arange(size) * 7 + rank * 3 + number * 5) % 11).astype(np.float32)


def run(node: Communicator, operation: str, size: int, number: int, *, async_op: bool = False) -> None:
    """Runs one operation on private arrays and compares the result with numpy's."""
    inputs = [given(size, rank, number) for rank in range(node.size)]
    total, counts = np.sum(inputs, axis=0, dtype=np.float64), even_counts(size, node.size)
    own = slice(sum(counts[: node.rank]), sum(counts[: node.rank + 1]))
    x, root = inputs[node.rank].copy(), number % node.size
    options = {"algorithm": "symmetric", "async_op": async_op}
    if operation == "all_reduce":
        out, work, expected = x, node.all_reduce(x, **options), total
    elif operation == "reduce":
        out, work, expected = x, node.reduce(x, root, **options), total if node.rank == root else x.copy()
    elif operation == "reduce_scatter":
        out = np.empty(counts[node.rank], np.float32)
        work, expected = node.reduce_scatter(out, x, **options), total[own]
    elif operation == "all_gather":
        out = np.empty(size, np.float32)
        work, expected = node.all_gather(out, inputs[0][own].copy(), **options), inputs[0]
    elif operation == "all_to_all":
        out = np.empty(node.size * counts[node.rank], np.float32)
        work, expected = node.all_to_all(out, x, **options), np.concatenate([each[own] for each in inputs])
    else:
        out, work, expected = x, node.broadcast(x, root, **options), inputs[root]
    if work is not None:
        work.wait()
    np.testing.assert_array_equal(out, expected, f"{operation} of {size}, number {number}")


OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def test_operations_that_follow_each_other_leave_each_others_buffers_alone(node: Communicator) -> None:
    """In any order and of any sizes, with ranks that are late now and then, and no barrier between."""
    together, alone = random.Random(3), random.Random(node.rank)
    for number in range(120):
        run(node, together.choice(OPERATIONS), together.choice(SIZES), number)
        if alone.random() < 0.1:
            time.sleep(2e-3)


def test_operations_in_progress_threads_of_some_ranks_take_the_same_way_on_all(node: Communicator) -> None:
    for number, operation in enumerate(OPERATIONS * 2):
        for size in SIZES:
            run(node, operation, size, number, async_op=(number + node.rank) % 2 == 0)


def test_without_room_for_the_scratch_ranks_reach_the_arrays_themselves(node: Communicator) -> None:
    if connect(topology.split_by_node(node.mpi, node.rank)) is None:
        pytest.skip("the kernel lets no rank reach another's memory")
    x = node.empty(1000, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Allocator, "allocate", lambda self, nbytes, **options: None)
        for number, operation in enumerate(OPERATIONS):
            for size in SIZES:
                run(node, operation, size, number)
        x[:] = node.rank
        node.all_reduce(x, algorithm="symmetric")
    assert (x == sum(range(node.size))).all()


def test_without_a_scratch_no_array_goes_through_it(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Communicator(scratch=False)
    group = whole.split(comm.rank // comm.local_size if comm.nodes > 1 else 0)
    assert group is not None
    if connect(topology.split_by_node(group.mpi, group.rank)) is not None:
        monkeypatch.setattr(Staging, "run", lambda *_: pytest.fail("the scratch was used"))
        monkeypatch.setattr(Staging, "fill", lambda *_: pytest.fail("the scratch was filled"))
    for number, operation in enumerate(OPERATIONS):
        for size in SIZES:
            run(group, operation, size, number)
    group.close()
    whole.close()


def test_without_a_scratch_auto_reduces_prefixes_of_bf16_by_messages(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the scratch nor MPI serves them."""
    group = Communicator(scratch=False)
    monkeypatch.setattr(Staging, "run", lambda *_: pytest.fail("the scratch was used"))
    x = torch.full((5,), group.rank + 1.0, dtype=torch.bfloat16)
    group.scan(x)
    assert (x == sum(range(group.rank + 2))).all()
    group.close()


@pytest.mark.ranks(2, 3)
def test_all_ranks_are_to_have_a_scratch_or_none(comm: Communicator) -> None:
    with pytest.raises(ArgumentError, match=rf"scratch: got {comm.rank == 0} on rank {comm.rank}"):
        Communicator(scratch=comm.rank == 0)
