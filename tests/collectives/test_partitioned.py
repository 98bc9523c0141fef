"""All-reduces of arrays that are handed in one by one, with a node's shared work and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from collectives import ArgumentError, ArgumentTypeError, Communicator, MismatchError, PremulSum
from collectives.process import topology
from collectives.process.cores import usable
from tests.collectives.reference import OPERATORS, assert_equal, reduced, serves, values

pytestmark = pytest.mark.mpi

SIZES = [1003, 0, 1, 600_011, 5]  # elements; the fourth is several chunks, and nothing divides it
TIMEOUT = 60  # seconds


def two_or_more(test: Callable) -> Callable:
    """A test of ranks that share the memory of one node."""
    return pytest.mark.one_node(pytest.mark.mpi(min_size=2)(test))


def group_of(comm: Communicator, *, full: bool) -> Communicator:
    """The ranks of this node, which do, or do not, fill its cores."""
    cores = set(range(min(len(usable()), comm.local_size) if full else comm.local_size + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "usable", lambda: cores)
        group = comm.split(comm.rank // comm.local_size if comm.nodes > 1 else 0)
    assert group is not None
    return group


@pytest.fixture(params=[True, False], ids=["shared work", "one by one"])
def node(comm: Communicator, request: pytest.FixtureRequest) -> Iterator[Communicator]:
    group = group_of(comm, full=request.param)
    yield group
    group.close()


@pytest.fixture
def shared(comm: Communicator) -> Iterator[Communicator]:
    """Group of two ranks or more, which share the work."""
    group = group_of(comm, full=True)
    assert group.partitioned_all_reduce([symmetric(group, torch.ones(1))]).waits
    yield group
    group.close()


def symmetric(node: Communicator, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = node.empty(tuple(x.shape), x.dtype)
    return made.copy_(x)


@pytest.mark.parametrize("op", OPERATORS)
def test_results_are_those_of_all_reduces(node: Communicator, op: str) -> None:
    for dtype in ["float32", "bfloat16", "int64"]:
        if not serves(op, dtype, "symmetric"):
            continue
        parts = [symmetric(node, values(size, node.rank, dtype)) for size in SIZES]
        made = node.partitioned_all_reduce(parts, op)
        for seed in range(3):  # again and again
            for part in parts:
                part.copy_(values(len(part), node.rank, dtype, seed))
                made.hand_in(part)
            made.wait()
            for part in parts:
                expected = reduced([values(len(part), rank, dtype, seed) for rank in range(node.size)], op)
                assert_equal(part, expected, f"{op} {dtype} [{len(part)}]")


def test_the_bits_are_those_of_an_all_reduce_on_every_rank(node: Communicator) -> None:
    torch.manual_seed(node.rank)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (symmetric(node, torch.randn(600_011).to(dtype)) for _ in range(2))
        y.copy_(x)
        made = node.partitioned_all_reduce([x], "avg")
        made.hand_in(x)
        made.wait()
        node.all_reduce(y, "avg", algorithm="symmetric" if node.size > 1 else "auto")
        assert torch.equal(x, y)
        found = node.mpi.allgather(x.view(torch.uint8).numpy().tobytes())
        assert all(other == found[0] for other in found)


def test_private_arrays_and_several_dtypes_are_reduced_too(node: Communicator) -> None:
    private = np.full(7, node.rank, np.float64)
    pair = [symmetric(node, torch.ones(3)), symmetric(node, torch.ones(5, dtype=torch.float64))]
    for parts in ([private], pair):
        made = node.partitioned_all_reduce(parts)
        for part in parts:
            made.hand_in(part)
        made.wait()
    assert (private == sum(range(node.size))).all()
    assert all((part == node.size).all() for part in pair)


@two_or_more
def test_who_comes_first_does_the_others_share(shared: Communicator) -> None:
    x = symmetric(shared, values(600_011, shared.rank))
    expected = reduced([values(600_011, rank) for rank in range(shared.size)], "sum")
    made = shared.partitioned_all_reduce([x])
    for _ in range(2):
        x.copy_(values(600_011, shared.rank))
        made.hand_in(x)
        if shared.rank > 0:  # these wait only when they see that rank 0 has done all of it
            limit = time.monotonic() + TIMEOUT
            while not torch.equal(x, expected):
                assert time.monotonic() < limit, "no rank did it"
                time.sleep(1e-3)
        made.wait()
        assert torch.equal(x, expected)


@two_or_more
def test_no_rank_reduces_before_one_waits(shared: Communicator) -> None:
    x = symmetric(shared, torch.full((1000,), float(shared.rank)))
    made = shared.partitioned_all_reduce([x])
    made.hand_in(x)
    shared.mpi.Barrier()  # all have handed it in
    time.sleep(0.05)
    assert (x == shared.rank).all()
    shared.mpi.Barrier()
    made.wait()
    assert (x == sum(range(shared.size))).all()


@two_or_more
def test_what_is_handed_in_late_is_waited_for(shared: Communicator) -> None:
    parts = [symmetric(shared, torch.ones(300_000)) for _ in range(4)]
    made = shared.partitioned_all_reduce(parts)
    for number, part in enumerate(parts):
        if number % shared.size == shared.rank:
            time.sleep(0.02)
        made.hand_in(part)
    made.wait()
    assert all((part == shared.size).all() for part in parts)


def test_operations_between_do_no_harm(node: Communicator) -> None:
    x, y = symmetric(node, torch.ones(10)), torch.ones(3)
    made = node.partitioned_all_reduce([x])
    for _ in range(3):
        x.fill_(1)
        y.fill_(1)
        made.hand_in(x)
        node.all_reduce(y)
        queued = node.all_reduce(torch.ones(2), async_op=True)
        made.wait()
        assert queued is not None
        queued.wait()
        assert (x == node.size).all()
        assert (y == node.size).all()


@two_or_more
def test_ranks_that_have_handed_in_different_arrays_are_told(shared: Communicator) -> None:
    parts = [symmetric(shared, torch.ones(10)) for _ in range(2)]
    made = shared.partitioned_all_reduce(parts)
    for part in parts[: 1 if shared.rank == 0 else 2]:
        made.hand_in(part)
    with pytest.raises(MismatchError, match=r"rank 0: .*sum of 10 float32.*: .*sum of 20"):
        made.wait()
    for part in parts:  # then all is well again
        part.fill_(1)
        made.hand_in(part)
    made.wait()
    assert all((part == shared.size).all() for part in parts)


@two_or_more
def test_a_rank_in_another_operation_is_told(shared: Communicator) -> None:
    x = symmetric(shared, torch.ones(300_000))
    made = shared.partitioned_all_reduce([x])
    if shared.rank != 0:
        made.hand_in(x)
    other = partial(shared.broadcast, torch.ones(300_000), 0, algorithm="symmetric")
    with pytest.raises(MismatchError, match=r"rank 0: broadcast.*all_reduce sum of 300000 float32"):
        (other if shared.rank == 0 else made.wait)()
    shared.mpi.Barrier()
    x.fill_(1)
    made.hand_in(x)
    made.wait()
    assert (x == shared.size).all()


@two_or_more
def test_ranks_in_different_rounds_are_told(shared: Communicator) -> None:
    x = symmetric(shared, torch.ones(10))
    made = shared.partitioned_all_reduce([x])
    if shared.rank == 0:
        made.hand_in(x)
    shared.barrier()
    if shared.rank != 0:
        made.hand_in(x)
    with pytest.raises(MismatchError, match="rank 0 began to hand in"):
        made.wait()


def test_what_is_handed_in_must_be_the_next_array(node: Communicator) -> None:
    parts = [symmetric(node, torch.ones(4)) for _ in range(2)]
    made = node.partitioned_all_reduce(parts)
    with pytest.raises(ArgumentError, match="another array than part 0"):
        made.hand_in(parts[1])
    for part in parts:
        made.hand_in(part)
    with pytest.raises(ArgumentError, match="got another array than part 2"):
        made.hand_in(parts[0])
    made.wait()
    made.wait()  # nothing was handed in
    assert all((part == node.size).all() for part in parts)


@two_or_more
def test_one_at_a_time_on_a_communicator(shared: Communicator) -> None:
    x, y = (symmetric(shared, torch.ones(4)) for _ in range(2))
    one, other = shared.partitioned_all_reduce([x]), shared.partitioned_all_reduce([y])
    one.hand_in(x)
    with pytest.raises(ArgumentError, match="while another one waits"):
        other.hand_in(y)
    one.wait()
    other.hand_in(y)
    other.wait()
    assert (x == shared.size).all()
    assert (y == shared.size).all()


def test_another_one_takes_the_place_of_what_is_given_up(node: Communicator) -> None:
    """Though the ranks had handed in different numbers of arrays."""
    parts = [symmetric(node, torch.ones(size)) for size in SIZES]
    given_up = node.partitioned_all_reduce(parts)
    for part in parts[: 1 if node.node_cores <= node.size and node.rank else 2]:
        given_up.hand_in(part)
    given_up.abandon()
    with pytest.raises(ArgumentError, match="got another array"):
        given_up.hand_in(parts[0])
    node.barrier()  # one by one they are reduced all the same
    others = [symmetric(node, values(size, node.rank)) for size in SIZES]
    made = node.partitioned_all_reduce(others)
    for part in others:
        made.hand_in(part)
    made.wait()
    for size, part in zip(SIZES, others, strict=True):
        assert_equal(part, reduced([values(size, rank) for rank in range(node.size)], "sum"), f"of {size}")


@two_or_more
def test_what_a_slower_rank_gives_up_is_not_taken_for_what_comes_next(shared: Communicator) -> None:
    """Rank 0 waits for the next one while the others have handed in nothing but the arrays that all give up."""
    x, y = symmetric(shared, torch.ones(4096)), symmetric(shared, torch.full((4096,), -1000.0))
    given_up, made = shared.partitioned_all_reduce([x]), shared.partitioned_all_reduce([y])
    given_up.hand_in(x)
    shared.mpi.Barrier()
    if shared.rank > 0:
        time.sleep(0.1)
    given_up.abandon()
    y.fill_(shared.rank + 1)
    made.hand_in(y)
    made.wait()
    assert (y == sum(range(shared.size + 1))).all()


@two_or_more
def test_ranks_that_wait_for_different_ones_are_told(shared: Communicator) -> None:
    pair = [symmetric(shared, torch.ones(10)) for _ in range(2)]
    made = [shared.partitioned_all_reduce([x]) for x in pair]
    mine = min(shared.rank, 1)
    made[mine].hand_in(pair[mine])
    with pytest.raises(MismatchError, match="to different PartitionedAllReduce objects"):
        made[mine].wait()


@two_or_more
def test_any_number_of_them_may_be_made(shared: Communicator) -> None:
    x = symmetric(shared, torch.ones(10))
    many = [shared.partitioned_all_reduce([x]) for _ in range(40)]
    for made in many:
        x.fill_(1)
        made.hand_in(x)
        made.wait()
        assert (x == shared.size).all()


def test_arguments_are_checked(node: Communicator) -> None:
    with pytest.raises(ArgumentError, match="got no arrays"):
        node.partitioned_all_reduce([])
    with pytest.raises(ArgumentTypeError, match="an average needs a floating-point dtype"):
        node.partitioned_all_reduce([torch.ones(4), torch.ones(4, dtype=torch.int64)], "avg")
    with pytest.raises(ArgumentTypeError, match="part 1"):
        node.partitioned_all_reduce([torch.ones(4), "four"])


@two_or_more
def test_arrays_that_are_one_for_all_ranks_are_refused(shared: Communicator) -> None:
    with pytest.raises(ArgumentError, match=r"part 0: got an array of .Communicator\.shared"):
        shared.partitioned_all_reduce([shared.shared(4, torch.float32)])


def test_factors_of_ones_own(node: Communicator) -> None:
    x = symmetric(node, torch.ones(4))
    made = node.partitioned_all_reduce([x], PremulSum(node.rank))  # type: ignore[arg-type]
    made.hand_in(x)
    made.wait()
    assert (x == sum(range(node.size))).all()


def test_with_checks_each_array_is_compared(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    checked = Communicator(comm.mpi)
    x = checked.empty(10, torch.float32).fill_(1)
    made = checked.partitioned_all_reduce([x])
    assert not made.waits
    made.hand_in(x)
    made.wait()
    assert (x == comm.size).all()
    checked.close()


@two_or_more
def test_arrays_take_the_place_of_others_that_are_gone(shared: Communicator) -> None:
    for size in (1000, 7, 300_000):
        x = symmetric(shared, torch.ones(size))
        made = shared.partitioned_all_reduce([x])
        made.hand_in(x)
        made.wait()
        assert (x == shared.size).all()
        del made, x
