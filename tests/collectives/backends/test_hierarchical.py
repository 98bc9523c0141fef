"""Hierarchical all_to_all, gather, scatter and reduce on simulated nodes, of different sizes and in any numbering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import ArgumentError, Communicator, MismatchError, PremulSum, even_counts
from collectives.backends import registry
from collectives.backends.backend import Resources
from collectives.backends.hierarchical import all_reduce, movements, reduce
from collectives.backends.hierarchical.hierarchy import Hierarchy
from collectives.base.buffers import describe, inspect
from collectives.base.partition import Splits
from collectives.base.reduction import check
from collectives.memory.shared_memory import Allocator
from collectives.schedules.algorithms import ALGORITHMS, hierarchical
from tests.collectives.reference import DTYPES, OPERATORS, assert_equal, reduced, serves, values
from tests.collectives.simulated_nodes import LAYOUTS, Nodes, over_nodes
from tests.conftest import FAILED

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.one_node]
OPERATIONS = ("all_to_all", "gather", "scatter", "reduce")
HERE: Any = {"algorithm": "hierarchical"}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.ranks(*sizes)) for name, sizes in LAYOUTS.items()])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Communicator, Nodes]]:
    """A Communicator over simulated nodes, and its ranks on each."""
    comm, layout = over_nodes(request.param, monkeypatch)
    yield comm, layout
    if not request.node.stash.get(FAILED, False):
        comm.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few elements, so that short arrays have many of them."""
    monkeypatch.setattr(movements, "LARGEST_SEGMENT", 64)
    monkeypatch.setattr(reduce, "SEGMENT_BYTES", 256)
    monkeypatch.setattr(reduce, "SMALL_BYTES", 0)


def part_of(comm: Communicator, whole: Any, counts: list[int], rank: int | None = None) -> Any:
    """A rank's part, by default this one's."""
    place = comm.rank if rank is None else rank
    return whole[sum(counts[:place]) : sum(counts[: place + 1])]


def cuts(ranks: int) -> list[list[int]]:
    """Elements of each rank's part: equal ones, different ones, none on some ranks, on all but one, on all."""
    return [
        [7] * ranks,
        [5 * rank + 1 for rank in range(ranks)],
        [4 * (rank % 2) for rank in range(ranks)],
        [0] * (ranks - 1) + [9],
        [9] + [0] * (ranks - 1),
        [0] * ranks,
        [300 + 70 * (rank % 3) for rank in range(ranks)],
    ]


def as_kind(comm: Communicator, kind: str, x: torch.Tensor, size: int | None = None) -> Any:
    """A copy in ordinary or symmetric memory. size: as large on all ranks, where the memory is."""
    if kind == "numpy":
        return x.numpy().copy()
    made = x.clone() if kind == "torch" else comm.empty(size or x.numel(), x.dtype)[: x.numel()]
    made.copy_(x)
    return made


KINDS = ["numpy", "torch", "symmetric"]


def test_all_to_all(nodes: tuple[Communicator, Nodes]) -> None:
    comm, _ = nodes
    for dtype in (*DTYPES, "complex64"):
        for size in (0, comm.size + 1, 1000 * comm.size):
            inputs = [values(size, rank, dtype) for rank in range(comm.size)]
            counts = even_counts(size, comm.size)
            out = torch.zeros(comm.size * counts[comm.rank], dtype=inputs[0].dtype)
            expected = torch.cat([part_of(comm, x, counts) for x in inputs])
            for _ in range(4):  # the memory for segments is used in turns
                out.zero_()
                comm.all_to_all(out, inputs[comm.rank], **HERE)
                assert torch.equal(out, expected), (dtype, size)


@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_with_splits(nodes: tuple[Communicator, Nodes], kind: str, short: None) -> None:
    """Every pair of ranks has another number of elements, or none; the last cut has as many segments only for some."""
    comm, _ = nodes
    ranks = range(comm.size)
    for what, cut in {
        "different": lambda r, q: r + 2 * q + 1,
        "some none": lambda r, q: 3 * ((r + q) % 2),
        "from one": lambda r, q: 11 * (r == comm.size - 1),
        "to one": lambda r, q: 11 * (q == 0),
        "none": lambda r, q: 0,
        "one long": lambda r, q: 500 if (r, q) == (0, comm.size - 1) else 2,
    }.items():
        leaving = [[cut(r, q) for q in ranks] for r in ranks]
        most = max(1, max(sum(row) for row in leaving))
        inputs = [values(sum(leaving[r]), r) for r in ranks]
        arriving = [leaving[q][comm.rank] for q in ranks]
        x = as_kind(comm, kind, inputs[comm.rank], most)
        out = as_kind(comm, kind, torch.zeros(sum(arriving)), comm.size * most)
        for _ in range(2):
            comm.all_to_all(out, x, arriving, leaving[comm.rank], **HERE)
            expected = torch.cat([inputs[q].split(leaving[q])[comm.rank] for q in ranks])
            assert torch.equal(torch.as_tensor(out), expected), what


def test_splits_that_change_on_another_rank_are_seen(nodes: tuple[Communicator, Nodes]) -> None:
    """This rank's arrays and splits are those of the call before, so that its prepared call is."""
    comm, _ = nodes
    last = comm.size - 1
    x, out = torch.arange(4.0 * comm.size) + 100 * comm.rank, torch.zeros(4 * comm.size + 1)
    for given in ([4] * comm.size, [3] + [4] * (comm.size - 2) + [5]):
        leaving = given if comm.rank == last else [4] * comm.size
        arriving = [4] * last + [given[comm.rank]]
        comm.all_to_all(out[: sum(arriving)], x, arriving, leaving, **HERE)
        assert torch.equal(
            out[4 * last : sum(arriving)], 100 * last + torch.arange(4.0 * comm.size).split(given)[comm.rank]
        )


@pytest.mark.parametrize(("kind", "segments"), [("numpy", "one"), ("torch", "many"), ("symmetric", "many")])
def test_gather_and_scatter(
    nodes: tuple[Communicator, Nodes], kind: str, segments: str, request: pytest.FixtureRequest
) -> None:
    comm, _ = nodes
    if segments == "many":
        request.getfixturevalue("short")
    for counts in cuts(comm.size):
        whole = values(sum(counts), 9, "float64")
        most = max(1, sum(counts))
        for root in range(comm.size):
            has = comm.rank == root
            x = as_kind(comm, kind, part_of(comm, whole, counts), most)
            large = as_kind(comm, kind, torch.zeros_like(whole), most)
            comm.gather(large if has else None, x, root, counts, **HERE)
            assert not has or torch.equal(torch.as_tensor(large), whole), ("gather", counts, root)
            part = as_kind(comm, kind, torch.zeros(counts[comm.rank], dtype=torch.float64), most)
            comm.scatter(part, large if has else None, root, counts, **HERE)
            assert torch.equal(torch.as_tensor(part), part_of(comm, whole, counts)), ("scatter", counts, root)


def test_gather_and_scatter_in_place_at_the_root(nodes: tuple[Communicator, Nodes]) -> None:
    comm, _ = nodes
    for counts in cuts(comm.size):
        for root in range(comm.size):
            whole = np.arange(sum(counts)) + 1.0
            has = comm.rank == root
            own = part_of(comm, whole, counts).copy()
            large = np.zeros_like(whole)
            part_of(comm, large, counts)[:] = own
            comm.gather(large if has else None, part_of(comm, large, counts) if has else own, root, counts, **HERE)
            assert not has or np.array_equal(large, whole), ("gather", counts, root)
            target = part_of(comm, large, counts) if has else np.zeros_like(own)
            comm.scatter(target, large if has else None, root, counts, **HERE)
            assert np.array_equal(target, own), ("scatter", counts, root)
            assert not has or np.array_equal(large, whole), "the root's x was changed"


def by_nodes(inputs: list[torch.Tensor], layout: Nodes, op: str) -> torch.Tensor:
    """The reduction in the order of ranks inside each node, then of nodes, in the accumulating dtype."""
    wide = torch.float32 if inputs[0].dtype.itemsize == 2 and inputs[0].is_floating_point() else inputs[0].dtype
    pair: Callable[..., torch.Tensor] = {
        **dict.fromkeys(("sum", "avg"), torch.add),
        "min": torch.minimum,
        "max": torch.maximum,
        "prod": torch.mul,
    }[op]

    def combined(each: list[torch.Tensor]) -> torch.Tensor:
        done = each[0]
        for one in each[1:]:
            done = pair(done, one)
        return done

    total = combined([combined([inputs[rank].to(wide) for rank in members]) for members in layout])
    return (total / len(inputs) if op == "avg" else total).to(inputs[0].dtype)


@pytest.mark.parametrize("op", OPERATORS)
def test_reduce_changes_the_root_only(nodes: tuple[Communicator, Nodes], op: str) -> None:
    comm, _ = nodes
    for dtype in DTYPES:
        if not serves(op, dtype, "hierarchical"):
            continue
        for size in (0, 1, 1003):
            inputs = [values(size, rank, dtype) for rank in range(comm.size)]
            root = (size + len(dtype)) % comm.size
            x = inputs[comm.rank].clone()
            comm.reduce(x, root, op, **HERE)
            wanted = reduced(inputs, op) if comm.rank == root else inputs[comm.rank]
            assert_equal(x, wanted, f"{op} {dtype} [{size}] to {root}")


SIZES = {"small": 1001, "one": 50_003, "many": 500}


@pytest.mark.parametrize(
    ("kind", "segments"),
    [("numpy", "small"), ("symmetric", "small"), ("torch", "one"), ("torch", "many"), ("symmetric", "many")],
)
def test_a_reduce_has_the_bits_of_the_order_of_ranks(
    nodes: tuple[Communicator, Nodes], kind: str, segments: str, request: pytest.FixtureRequest
) -> None:
    comm, layout = nodes
    if segments == "many":
        request.getfixturevalue("short")
    size = SIZES[segments]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype == torch.bfloat16 and kind == "numpy":
            continue
        seeds = [torch.Generator().manual_seed(rank) for rank in range(comm.size)]
        inputs = [(torch.randn(size, generator=seed) * 100).to(dtype) for seed in seeds]
        for op in ("sum", "avg"):
            expected = by_nodes(inputs, layout, op)
            for root in range(comm.size):
                x = as_kind(comm, kind, inputs[comm.rank])
                comm.reduce(x, root, op, **HERE)
                wanted = expected if comm.rank == root else inputs[comm.rank]
                assert torch.equal(torch.as_tensor(x), wanted), (dtype, op, root)
                if "hierarchical" in comm.algorithms("all_reduce") and root == 0:
                    comm.all_reduce(x := as_kind(comm, kind, inputs[comm.rank]), op, **HERE)
                    assert torch.equal(torch.as_tensor(x), expected), (dtype, op, "all_reduce")


def test_a_premultiplied_reduce(nodes: tuple[Communicator, Nodes]) -> None:
    comm, _ = nodes
    for size in (5, 100_001):
        for dtype in (torch.float32, torch.float16):
            x = torch.full((size,), 2.0, dtype=dtype)
            comm.reduce(x, comm.size - 1, PremulSum(comm.rank + 1), **HERE)
            total = float(comm.size * (comm.size + 1)) if comm.rank == comm.size - 1 else 2.0
            assert torch.equal(x, torch.full((size,), total, dtype=dtype))


def test_a_list_is_reduced_as_one(nodes: tuple[Communicator, Nodes]) -> None:
    comm, _ = nodes
    parts = [np.full(size, comm.rank + 1.0) for size in (3, 0, 20_000)]
    comm.reduce(parts, comm.size - 1, **HERE)
    total = comm.size * (comm.size + 1) / 2 if comm.rank == comm.size - 1 else comm.rank + 1
    assert all((part == total).all() for part in parts)


def test_asynchronous_operations_of_all_kinds_in_turn(nodes: tuple[Communicator, Nodes]) -> None:
    """Some longer than a segment, some shorter, and none waited for before all are issued."""
    comm, _ = nodes
    n, rank = comm.size, comm.rank
    works, checks = [], []
    for turn in range(6):
        each, root = (40, 200_001)[turn % 2], turn % n
        x = torch.arange(n * each, dtype=torch.int32) + rank + turn
        exchanged, sums = torch.zeros(n * each, dtype=torch.int32), x.clone()
        gathered = torch.zeros(n * each, dtype=torch.int32) if rank == root else None
        works += [
            comm.all_to_all(exchanged, x, async_op=True, **HERE),
            comm.reduce(sums, root, async_op=True, **HERE),
            comm.gather(gathered, x[:each], root, async_op=True, **HERE),
        ]
        expected = torch.cat(
            [torch.arange(rank * each, (rank + 1) * each, dtype=torch.int32) + q + turn for q in range(n)]
        )
        total = sum(torch.arange(n * each, dtype=torch.int32) + q + turn for q in range(n)) if rank == root else x
        whole = torch.cat([torch.arange(each, dtype=torch.int32) + q + turn for q in range(n)])
        checks += [(exchanged, expected), (sums, total), (gathered, None if gathered is None else whole)]
    for work in works:
        assert work is not None
        work.wait()
    for found, wanted in checks:
        assert found is wanted is None or torch.equal(found, wanted)


class Counting:
    """An MPI communicator that counts the messages to each rank."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.sent: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, message: Any, peer: int, tag: int) -> MPI.Request:
        self.sent[peer] += 1
        return self._comm.Isend(message, peer, tag)


def test_messages_are_those_of_the_schedules(nodes: tuple[Communicator, Nodes]) -> None:
    """Which are proved to compute their operations; inside a node nothing is sent."""
    comm, layout = nodes
    found: list[Resources] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MAKERS", (*registry.MAKERS, found.append))
        other = Communicator()
    counting: Any = Counting(found[0].comm)
    backend = Hierarchy.of_nodes(replace(found[0], comm=counting))
    assert backend is not None
    here = next(members for members in layout if comm.rank in members)

    def buffer(size: int) -> Any:
        return inspect(np.zeros(size, np.float32), "x", writable=True)

    n = comm.size
    for root in range(n):
        is_root = comm.rank == root
        calls = {
            "all_to_all": backend.all_to_all(buffer(3 * n), buffer(3 * n), Splits([3] * n, [3] * n, uniform=True)),
            "gather": backend.gather(buffer(3 * n) if is_root else None, buffer(3), root, [3] * n),
            "scatter": backend.scatter(buffer(3), buffer(3 * n) if is_root else None, root, [3] * n),
            "reduce": backend.reduce(buffer(30_000), root, check("sum", buffer(1).dtype)),
        }
        for operation, call in calls.items():
            counting.sent.clear()
            call()
            made = hierarchical.reduce(layout, root) if operation == "reduce" else None
            made = made or hierarchical.movement(operation, layout, root)
            steps = [step for steps in made.program(comm.rank) for step in steps if step.peer not in (-1, *here)]
            assert counting.sent == Counter(step.peer for step in steps if step.kind.value == "send"), operation
    other.close()


def test_uneven_nodes_have_these_operations_and_auto_serves_all(nodes: tuple[Communicator, Nodes]) -> None:
    comm, layout = nodes
    regular = comm.size == len(layout[0]) * len(layout) and [rank for m in layout for rank in m] == [*range(comm.size)]
    for operation in ALGORITHMS:
        assert ("hierarchical" in comm.algorithms(operation)) == (
            operation in OPERATIONS
            or (regular and operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"))
        )
    for size in (8, 400_000):
        x = np.ones(size)
        comm.all_reduce(x)
        assert (x == comm.size).all()
        comm.reduce(x)
        assert (x == comm.size ** (2 if comm.rank == 0 else 1)).all()
    whole = comm.shared(comm.size, np.float32)
    comm.all_gather(whole, np.full(1, comm.rank, np.float32))
    assert (whole == np.arange(comm.size)).all()
    if not regular:
        with pytest.raises(ArgumentError, match=r"algorithm 'hierarchical'; .*auto, mpi, ring"):
            comm.all_reduce(np.ones(3), **HERE)


def test_auto_takes_a_reduce_over_two_nodes(nodes: tuple[Communicator, Nodes]) -> None:
    comm, layout = nodes
    float32 = describe("float32")
    choose = comm._dispatch.selection.choose
    chosen = [choose("reduce", "auto", float32, nbytes, check("sum", float32)) for nbytes in (1 << 10, 4 << 20)]
    served = "hierarchical" in comm.algorithms("all_reduce")
    assert chosen == ["mpi", "hierarchical" if len(layout) == 2 else "mpi" if served else "double_tree"]
    for operation in ("all_to_all", "gather", "scatter"):
        assert choose(operation, "auto", float32, 4 << 20) == "mpi"


@pytest.mark.ranks(4, exactly=True)
def test_ranks_of_a_node_that_differ_raise_an_error_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on both nodes. What a rank does next cannot be paired with what those of the other node do."""
    comm, _ = over_nodes("even", monkeypatch)
    groups = [comm.split(0, comm.rank) for _ in range(4)]
    odd, dtype = comm.rank % 2, np.float32 if comm.rank % 2 else np.float64
    arriving = {1: [1, 2, 2, 2], 3: [2, 2, 1, 2]}.get(comm.rank, [2] * 4)
    wrong: dict[str, Callable[[Communicator], Any]] = {
        "all_to_all of 0 float64": lambda c: c.all_to_all(np.empty(4, dtype), np.empty(4, dtype), **HERE),
        r"rank \d gives 2 elements to rank \d, which takes 1": lambda c: c.all_to_all(
            np.empty(sum(arriving)), np.empty(8), arriving, [2] * 4, **HERE
        ),
        "reduce sum of 3 float64 root": lambda c: c.reduce(np.ones(3), 2 * odd, **HERE),
        r"rank \d: reduce sum of 3 float64 root 0": lambda c: (
            c.reduce(np.ones(3), **HERE) if odd else c.all_to_all(np.empty(8), np.empty(8), [2] * 4, [2] * 4, **HERE)
        ),
    }
    for group, (words, call) in zip(groups, wrong.items(), strict=True):
        assert group is not None
        with pytest.raises(MismatchError, match=words):
            call(group)
        with pytest.raises(MismatchError, match=rf"barrier: .*cannot be used .*{words}"):
            group.barrier()
        group.close()
    x = np.ones(3)
    comm.reduce(x, **HERE)
    assert (x == (comm.size if comm.rank == 0 else 1)).all()
    comm.close()


@pytest.mark.ranks(3, 4, exactly=True)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_after_an_error_on_one_node_no_operation_takes_the_messages_of_another(
    monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    """The last rank, alone on its node, has sent the root what no rank there receives. With checks all are told."""
    monkeypatch.setenv("MPIDL_DEBUG", debug)
    comm, nodes = over_nodes("uneven", monkeypatch)
    here = comm.rank in nodes[0]
    x = np.full(4, 1, np.float64 if comm.rank == 1 else np.float32)
    if here or debug == "1":
        with pytest.raises(MismatchError, match=r"rank 1: .*reduce sum of 4 float64"):
            comm.reduce(x, **HERE)
    else:
        comm.reduce(x, **HERE)
    x = np.full(4, 100, np.float32)
    if debug == "1":
        comm.reduce(x, **HERE)
        assert comm.rank or (x == 100 * comm.size).all()
        comm.close()
    elif here:
        with pytest.raises(MismatchError, match="cannot be used any more"):
            comm.reduce(x, **HERE)


@pytest.mark.limit(60)
@pytest.mark.parametrize("size", [1000, 100_000])
def test_of_the_arrays_of_a_node_some_may_be_symmetric(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """On the one node of all ranks, where there are several on any number of ranks."""
    monkeypatch.setattr(all_reduce, "SEGMENT_BYTES", 64 << 10)
    backend = Hierarchy.of_nodes(comm._dispatch.resources)
    assert backend is not None
    for number in range(2 * comm.size):
        x, private = comm.empty(size, np.float32), np.empty(size, np.float32)
        shares = (comm.rank == number // 2) == (number % 2 == 0)
        given = inspect(x if shares else private, "x", writable=True)
        for turn in range(3):
            given.flat[:] = comm.rank + turn
            comm.mpi.Barrier()
            backend.all_reduce(given, check("sum", given.dtype))()
            assert (given.flat == comm.size * turn + sum(range(comm.size))).all(), (number, turn)


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.limit(60)
def test_where_one_node_cannot_share_an_array_no_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks then gather by messages; "auto" goes by the array."""
    comm, nodes = over_nodes("even", monkeypatch)
    if comm.rank in nodes[1]:
        monkeypatch.setattr(Allocator, "allocate", lambda *sizes, **options: None)
    whole = comm.shared(comm.size, np.float32)
    assert comm.mpi.allgather(comm.is_shared(whole)) == [False] * comm.size
    comm.all_gather(whole, np.full(1, comm.rank, np.float32))
    assert (whole == np.arange(comm.size)).all()
    comm.close()


def test_tables_are_kept_by_the_ranks_of_each_node(nodes: tuple[Communicator, Nodes]) -> None:
    """Nodes of three ranks and one are not two nodes of three."""
    comm, layout = nodes
    sizes = [len(members) for members in layout]
    assert comm.layout == (f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes)))
