"""One-copy operations that are made again on the same arrays: from the third time on the part in C carries them out."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator, MismatchError, PremulSum, even_counts
from collectives.backends.mpi import Library

pytestmark = [pytest.mark.mpi, pytest.mark.one_node]

TIMES = 9  # three rounds through the buffers of the scratch, and four of meetings
SIZES = (1, 5, 259, 5_000, 30_001)  # fp32: from a few bytes to above what the ranks reduce whole
DTYPES = ("float32", "float64", "int32", "uint8", "bfloat16", "complex64")
Make = Callable[[int, torch.dtype], torch.Tensor]


@pytest.fixture
def node(comm: Communicator) -> Communicator:
    """The ranks, which share memory."""
    assert "symmetric" in comm.algorithms("all_reduce")
    return comm


@pytest.fixture(params=["private", "symmetric"])
def make(request: pytest.FixtureRequest, node: Communicator) -> Make:
    """Makes an array in private memory, or in symmetric memory."""
    if request.param == "private":
        return lambda size, dtype: torch.empty(size, dtype=dtype)
    return lambda size, dtype: node.empty(size, dtype)


def given(size: int, rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input: small whole numbers, other ones each time."""
    return ((torch.arange(size) * 7 + rank * 3 + number * 5) % 11).to(dtype)


class Repeated:
    """One operation on arrays of its own. Its input is filled anew each time, and its result compared."""

    def __init__(
        self,
        node: Communicator,
        make: Make,
        operation: str,
        size: int,
        dtype: torch.dtype,
        op: Any,
        algorithm: str = "symmetric",
    ) -> None:
        self.algorithm = algorithm
        self.node, self.operation, self.size, self.dtype, self.op = node, operation, size, dtype, op
        counts = even_counts(size, node.size)
        self.counts = counts
        self.part = slice(sum(counts[: node.rank]), sum(counts[: node.rank + 1]))
        own = counts[node.rank]
        self.x = make(own if operation in ("all_gather", "gather") else size, dtype)
        sizes = {"reduce_scatter": own, "scatter": own, "all_gather": size, "all_to_all": node.size * own}
        has = operation in sizes or (operation == "gather" and node.rank == 0)
        made = make(sizes.get(operation, size), dtype)  # on every rank
        self.out = made if has else None
        self.issue = self._issued()

    def _issued(self) -> Callable[[], Any]:
        node, x, out, options = self.node, self.x, self.out, {"algorithm": self.algorithm}
        match self.operation:
            case "all_reduce":
                return lambda: node.all_reduce(x, self.op, **options)
            case "reduce":
                return lambda: node.reduce(x, 0, self.op, **options)
            case "reduce_scatter":
                return lambda: node.reduce_scatter(out, x, self.op, **options)
            case "all_gather":
                return lambda: node.all_gather(out, x, **options)
            case "all_to_all":
                return lambda: node.all_to_all(out, x, **options)
            case "scan":
                return lambda: node.scan(x, self.op, **options)
            case "exscan":
                return lambda: node.exscan(x, self.op, **options)
            case "broadcast":
                return lambda: node.broadcast(x, 0, **options)
            case "gather":
                return lambda: node.gather(out, x, 0, self.counts, **options)
            case _:
                return lambda: node.scatter(out, x if node.rank == 0 else None, 0, self.counts, **options)

    def run(self, number: int) -> None:
        """Fills, issues, compares."""
        node, rank = self.node, self.node.rank
        inputs = [given(self.size, each, number, self.dtype) for each in range(node.size)]
        self.x.copy_(inputs[0][self.part] if self.operation in ("all_gather", "gather") else inputs[rank])
        self.issue()
        among = {"scan": inputs[: rank + 1], "exscan": inputs[:rank] or inputs[:1]}.get(self.operation, inputs)
        total = sum(each.to(torch.complex128) for each in among)
        if self.op == "avg":
            total = total / node.size
        elif isinstance(self.op, PremulSum):
            total = total * self.op.factor
        total = total.to(self.dtype) if self.dtype.is_complex else total.real.to(self.dtype)
        found, expected = self.out, inputs[0]
        match self.operation:
            case "all_reduce" | "reduce":
                found, expected = self.x, total if self.operation == "all_reduce" or rank == 0 else inputs[rank]
            case "scan":
                found, expected = self.x, total
            case "exscan":  # rank 0 keeps its own
                found, expected = self.x, total if rank else inputs[0]
            case "reduce_scatter":
                expected = total[self.part]
            case "all_to_all":
                expected = torch.cat([each[self.part] for each in inputs])
            case "broadcast":
                found = self.x
            case "scatter":
                expected = inputs[0][self.part]
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, msg=f"{self} number {number}")

    def __str__(self) -> str:
        return f"{self.operation} {self.op} of {self.size} {self.dtype}"


REDUCTIONS, MOVEMENTS = (
    ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"),
    ("all_gather", "all_to_all", "broadcast", "gather", "scatter"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_right_each_time(node: Communicator, make: Make, dtype: str) -> None:
    kind = getattr(torch, dtype)
    ops = ("sum", "avg", PremulSum(2.0)) if kind.is_floating_point else ("sum",)
    for operation in REDUCTIONS:
        for op in ops if operation not in ("scan", "exscan") else [op for op in ops if op != "avg"]:
            for size in SIZES:
                repeated = Repeated(node, make, operation, size, kind, op)
                for number in range(TIMES):
                    repeated.run(number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_movements_are_right_each_time(node: Communicator, make: Make, dtype: str) -> None:
    for operation in MOVEMENTS:
        for size in SIZES:
            repeated = Repeated(node, make, operation, size, getattr(torch, dtype), "sum")
            for number in range(TIMES):
                repeated.run(number)


@pytest.mark.parametrize("where", ["private", "symmetric", "symmetric on even ranks", "symmetric in turn"])
def test_one_copy_or_the_librarys_own(node: Communicator, where: str) -> None:
    """Whatever arrays the others have, and as they change."""

    def make(size: int, dtype: torch.dtype) -> torch.Tensor:
        found = node.empty(size, dtype)  # on every rank
        is_symmetric = {"private": False, "symmetric": True}.get(where, node.rank % 2 == 0)
        return found if is_symmetric else torch.empty(size, dtype=dtype)

    either = "symmetric_or_mpi"
    for operation in (*REDUCTIONS[:3], *MOVEMENTS):
        for size in (1, 259, 30_001, 300_007):
            repeated = Repeated(node, make, operation, size, torch.float32, "sum", either)
            other = Repeated(node, node.empty, operation, size, torch.float32, "sum", either)
            for number in range(TIMES):
                repeated.run(number)
                if where == "symmetric in turn":
                    other.run(number)


def test_the_librarys_own_is_called_for_private_arrays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    prepare = Library.all_gather

    def counted(self: Library, out: Any, x: Any, counts: Any) -> Callable[[], None]:
        call = prepare(self, out, x, counts)

        def run() -> None:
            calls.append("all_gather")
            call()

        return run

    monkeypatch.setattr(Library, "all_gather", counted)
    with Communicator() as node:
        symmetric = node.empty(5, torch.float32), node.empty(5 * node.size, torch.float32)
        private = torch.empty(5), torch.empty(5 * node.size)
        for x, out, times in ((*symmetric, 0), (*private, TIMES), (symmetric[0], private[1], 0)):
            for number in range(TIMES):
                node.all_gather(out, x.fill_(node.rank + number), algorithm="symmetric_or_mpi")
                assert out[::5].tolist() == [rank + number for rank in range(node.size)]
            assert node.size == 1 or len(calls) == times  # a rank alone has no symmetric memory
            calls.clear()


def test_many_that_take_turns_leave_each_others_buffers_alone(node: Communicator, make: Make) -> None:
    """In any order and of any sizes, with ranks that are late now and then, and no barrier between."""
    together, alone = random.Random(5), random.Random(node.rank)
    several = [
        Repeated(node, make, operation, size, torch.float32, "sum")
        for operation in (*REDUCTIONS, *MOVEMENTS)
        for size in (3, 5_000, 40_000, 300_007)
    ]
    for number in range(300):
        together.choice(several).run(number)
        if alone.random() < 0.05:
            time.sleep(2e-3)


def test_the_output_that_is_one_for_all(node: Communicator) -> None:
    """Each rank writes its part in place, and to gather is to wait for the others."""
    for size in (node.size, 1000 * node.size):
        out = node.shared(size, torch.float32)
        own = out[size // node.size * node.rank :][: size // node.size]
        for number in range(TIMES):
            own.fill_(100 * number + node.rank)
            node.all_gather(out, own)
            expected = [100.0 * number + rank for rank in range(node.size) for _ in range(size // node.size)]
            assert out.tolist() == expected
            node.barrier()


def test_nans_have_the_same_bits_on_all_ranks(node: Communicator, make: Make) -> None:
    """Whichever of several NaNs with other bits comes out, comes out everywhere."""
    x = make(37, torch.float32)
    for number in range(TIMES):
        x.view(torch.int32).fill_(0x7FC00000 + 16 * node.rank + number)
        node.all_reduce(x, algorithm="symmetric")
        bits = x.view(torch.int32).tolist()
        assert node.all_gather_object(bits) == [bits] * node.size


def test_memory_that_is_freed_and_had_by_another_array(node: Communicator) -> None:
    for round_ in range(4):
        x = node.empty(500, torch.float32)
        for number in range(TIMES):
            x.fill_(node.rank + number + round_)
            node.all_reduce(x, algorithm="symmetric")
            assert (x == sum(range(node.size)) + node.size * (number + round_)).all()
        node.barrier()
        del x
        gc.collect()


def test_ranks_that_come_with_something_else_are_told_and_can_go_on(node: Communicator) -> None:
    x, other = np.ones(10, np.float32), np.ones(11, np.float32)
    for _ in range(TIMES):
        node.all_reduce(x, algorithm="symmetric")
    if node.size > 1:
        with pytest.raises(MismatchError, match="all_reduce"):
            node.all_reduce(other if node.rank else x, algorithm="symmetric")
    for _ in range(TIMES):
        x[:] = node.rank
        node.all_reduce(x, algorithm="symmetric")
        assert (x == sum(range(node.size))).all()


def test_overflows_neither_raise_nor_warn(node: Communicator) -> None:
    x = np.empty(20_000, np.float32)
    with np.errstate(all="raise"):
        for op in ("sum", "avg", "prod"):
            for _ in range(TIMES):
                x[:] = 3e38
                node.all_reduce(x, op, algorithm="symmetric")
                assert node.size == 1 or np.isinf(x).all()


def test_some_ranks_issue_it_asynchronously(node: Communicator, make: Make) -> None:
    repeated = Repeated(node, make, "all_reduce", 3000, torch.float32, "sum")
    wait = repeated.issue

    def in_the_background() -> None:
        work = node.all_reduce(repeated.x, algorithm="symmetric", async_op=True)
        assert work is not None
        work.wait()

    for number in range(3 * TIMES):
        repeated.issue = in_the_background if (number + node.rank) % 3 == 0 else wait
        repeated.run(number)
