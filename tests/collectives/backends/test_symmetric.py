"""Symmetric memory, and the one-copy collectives on it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator, MismatchError, even_counts
from collectives.backends.symmetric.group import StagedSizes
from tests.collectives.reference import DTYPES, OPERATORS, assert_equal, reduced, serves, sizes, values

pytestmark = pytest.mark.mpi

LARGE = 1_000_003  # elements; more than a chunk of the scratch, and nothing divides it


@pytest.fixture(params=["direct", "staged"])
def node(comm: Communicator, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    """The ranks of this node, in a group of their own: there the one-copy collectives serve.

    "direct": they reach each other's arrays wherever these lie, and do so at every size. "staged": private ones they do
    not reach, and small symmetric ones go through the scratch as well.
    """
    if request.param == "staged":
        monkeypatch.setattr("collectives.backends.symmetric.backend.connect", lambda node: None)
    else:
        monkeypatch.setattr("collectives.backends.symmetric.backend.staged_sizes", lambda place: StagedSizes())
    group = comm.split(comm.rank // comm.local_size if comm.nodes > 1 else 0)
    assert group is not None
    yield group
    group.close()


def symmetric(node: Communicator, x: torch.Tensor) -> torch.Tensor:
    """A copy of x in symmetric memory."""
    made: torch.Tensor = node.empty(tuple(x.shape), x.dtype)
    return made.copy_(x)


def part_of(x: torch.Tensor, counts: list[int], rank: int) -> torch.Tensor:
    start = sum(counts[:rank])
    return x[start : start + counts[rank]]


@pytest.mark.parametrize("op", OPERATORS)
def test_reductions_of_symmetric_arrays(node: Communicator, op: str) -> None:
    rank, ranks = node.rank, range(node.size)
    for dtype in DTYPES:
        if not serves(op, dtype, "symmetric"):
            continue
        for size in [*sizes(node.size), LARGE] if dtype in ("float32", "bfloat16") else sizes(node.size):
            inputs = [values(size, r, dtype) for r in ranks]
            expected, what = reduced(inputs, op), f"{op} {dtype} [{size}]"
            x = symmetric(node, inputs[rank])
            counts = even_counts(size, node.size)
            out = torch.zeros(counts[rank], dtype=x.dtype)
            node.reduce_scatter(out, x, op, algorithm="symmetric")
            assert_equal(out, part_of(expected, counts, rank), f"reduce_scatter {what}")
            assert torch.equal(x, inputs[rank]), f"reduce_scatter {what}: the input was changed"
            root = size % node.size
            node.reduce(x, root, op, algorithm="symmetric")
            assert_equal(x, expected if rank == root else inputs[rank], f"reduce {what}")
            x.copy_(inputs[rank])
            node.barrier()  # the peers read it, and must not see the copying
            node.all_reduce(x, op, algorithm="symmetric")
            assert_equal(x, expected, f"all_reduce {what}")


@pytest.mark.parametrize("memory", ["symmetric", "out only", "x only", "shared"])
def test_movements_of_symmetric_arrays(node: Communicator, memory: str) -> None:
    rank, ranks = node.rank, node.size

    def place(x: torch.Tensor, name: str) -> torch.Tensor:
        if memory == "shared" and name == "out":
            made: torch.Tensor = node.shared(tuple(x.shape), x.dtype)
            node.barrier()
            return made
        return symmetric(node, x) if memory in ("symmetric", f"{name} only", "shared") else x.clone()

    for dtype, size in [("float32", 0), ("float32", 1), ("bfloat16", 11), ("int64", 1003), ("float32", LARGE)]:
        inputs = [values(size, r, dtype) for r in range(ranks)]
        counts = even_counts(size, ranks)
        whole = torch.cat(inputs)
        out = place(torch.zeros_like(whole), "out")
        node.all_gather(out, place(inputs[rank], "x"), algorithm="symmetric")
        assert torch.equal(out, whole), ("all_gather", dtype, size)
        node.barrier()
        if memory != "shared":
            out = place(torch.zeros(ranks * counts[rank], dtype=whole.dtype), "out")
            node.all_to_all(out, place(inputs[rank], "x"), algorithm="symmetric")
            assert torch.equal(out, torch.cat([part_of(x, counts, rank) for x in inputs])), ("all_to_all", dtype, size)
            target = place(torch.zeros_like(whole), "out")
            gathered = target if rank == ranks - 1 else None
            node.gather(gathered, place(inputs[rank], "x"), ranks - 1, algorithm="symmetric")
            assert gathered is None or torch.equal(gathered, whole), ("gather", dtype, size)
        source = place(whole, "x")
        own = place(torch.zeros_like(inputs[rank]), "out") if memory != "shared" else torch.zeros_like(inputs[rank])
        node.scatter(own, source if rank == 0 else None, algorithm="symmetric")
        assert torch.equal(own, inputs[rank]), ("scatter", dtype, size)
        x = place(inputs[rank], "x")
        node.broadcast(x, ranks - 1, algorithm="symmetric")
        assert torch.equal(x, inputs[-1]), ("broadcast", dtype, size)


@pytest.mark.parametrize("memory", ["symmetric", "out only", "x only", "private"])
def test_large_gathers_with_uneven_parts_at_any_root(node: Communicator, memory: str) -> None:
    counts = [400_000 + 70_001 * rank for rank in range(node.size)]
    inputs = [values(count, r, "float32") for r, count in enumerate(counts)]
    whole, own = torch.cat(inputs), inputs[node.rank]
    x = symmetric(node, own) if memory in ("symmetric", "x only") else own.clone()
    out = symmetric(node, torch.zeros_like(whole)) if memory in ("symmetric", "out only") else torch.zeros_like(whole)
    for root in range(node.size):
        for again in range(2):
            x.copy_(own + again)
            out.zero_()
            node.gather(out if node.rank == root else None, x, root, counts, algorithm="symmetric")
            expected = whole + again if node.rank == root else torch.zeros_like(whole)
            assert torch.equal(out, expected), (memory, root, again)
            assert torch.equal(x, own + again)
        if node.rank == root:
            node.gather(out, part_of(out, counts, root), root, counts, algorithm="symmetric")
            assert torch.equal(out, whole + 1), "in place"
        else:
            node.gather(None, x, root, counts, algorithm="symmetric")


def test_a_gather_reaches_an_output_that_other_ranks_have_freed(node: Communicator) -> None:
    size = 600_000
    x = torch.full((size,), 1.0 + node.rank)
    expected = torch.arange(1.0, node.size + 1).repeat_interleave(size)
    out: torch.Tensor | None = node.empty(node.size * size, torch.float32)
    assert out is not None
    for freed in (False, True):
        if freed and node.rank > 0:
            out = None
            gc.collect()
        if out is not None:
            out.zero_()
        node.gather(out if node.rank == 0 else None, x, 0, algorithm="symmetric")
        if node.rank == 0:
            assert out is not None
            assert torch.equal(out, expected), freed


def test_large_gathers_with_an_empty_part_and_into_memory_of_other_groups(node: Communicator) -> None:
    counts = [0 if rank == 1 else 400_000 + rank for rank in range(node.size)]
    own = values(counts[node.rank], node.rank, "float32")
    whole = torch.cat([values(count, rank, "float32") for rank, count in enumerate(counts)])
    root = node.size - 1
    with node.split(0) as group, node.split(0, key=-node.rank) as reversed_group:
        outputs = {
            "shared": node.shared(len(whole), torch.float32),
            "of the parent": node.empty(len(whole), torch.float32),
        }
        for name, out in outputs.items():
            group.gather(out if node.rank == root else None, own, root, counts, algorithm="symmetric")
            assert node.rank != root or torch.equal(out, whole), name
            node.barrier()
        out = reversed_group.empty(len(whole), torch.float32)
        reversed_group.gather(out if node.rank == root else None, own, 0, counts[::-1], algorithm="symmetric")
        assert node.rank != root or torch.equal(out, torch.cat([*whole.split(counts)][::-1]))


def test_a_slice_that_lies_in_the_shared_output_needs_no_copy(node: Communicator) -> None:
    counts = [10 * rank + 3 for rank in range(node.size)]
    out = node.shared(sum(counts), np.float64)
    start = sum(counts[: node.rank])
    own = out[start : start + counts[node.rank]]
    own[:] = node.rank
    node.all_gather(out, own, counts)
    np.testing.assert_array_equal(out, np.repeat(np.arange(node.size), counts))


def test_different_slices_of_shared_memory_are_different_arrays(node: Communicator) -> None:
    whole = node.shared(10 * node.size, np.float32)
    own = whole[10 * node.rank :][:10]
    own[:] = node.rank
    node.broadcast(own, node.size - 1, algorithm="symmetric")
    assert (whole == node.size - 1).all()


def test_other_groups_refuse_to_reduce_an_array_that_is_one_for_all_too(node: Communicator) -> None:
    group = node.split(0)
    assert group is not None
    x = node.shared(6, np.float32)
    x[:] = 1
    node.barrier()
    if node.size > 1:
        with pytest.raises(ArgumentError, match="one for all ranks"):
            group.all_reduce(x)
    group.close()


def test_memory_is_the_nodes(node: Communicator) -> None:
    shared = node.shared((2, 3), torch.float32)
    assert shared.shape == (2, 3)
    if node.rank == 0:
        shared.fill_(7)
    node.barrier()
    assert (shared == 7).all()
    own = node.empty((4, 2), np.int32)
    assert own.shape == (4, 2)
    assert own.dtype == np.int32
    own[:] = node.rank
    node.barrier()
    assert (own == node.rank).all()


def test_ranks_may_ask_for_different_sizes(node: Communicator) -> None:
    x = node.empty(5 + 1000 * node.rank, np.float32)
    assert x.size == 5 + 1000 * node.rank
    x[:5] = node.rank
    node.all_reduce(x[:5], "max", algorithm="symmetric")
    assert (x[:5] == node.size - 1).all()


def test_slices_at_different_places_and_arrays_from_elsewhere_meet(node: Communicator) -> None:
    """Some ranks' arrays lie in symmetric memory, at one place or another, some do not: all of it adds up."""
    memory = node.empty(100, np.float32)
    for case in range(3):
        x = [memory[node.rank : node.rank + 50], memory[20:70], np.empty(50, np.float32)][
            0 if case == 0 else 1 + (node.rank % 2 if case == 1 else 0)
        ]
        x[:] = node.rank
        node.barrier()
        node.all_reduce(x, algorithm="symmetric")
        assert (x == sum(range(node.size))).all(), case


def test_bits_do_not_depend_on_how_the_data_is_cut(node: Communicator) -> None:
    """One all_reduce, many of slices, a reduce_scatter, from symmetric memory and not: the same bits, in rank order."""
    size = 300_007
    inputs = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(node.size)]
    expected = inputs[0].copy()
    for x in inputs[1:]:
        expected += x
    mine = inputs[node.rank]
    results: list[np.ndarray] = []
    for memory in (node.empty(size, np.float32), np.empty(size, np.float32)):
        memory[:] = mine
        node.barrier()
        node.all_reduce(memory, algorithm="symmetric")
        results.append(memory.copy())
        memory[:] = mine
        node.barrier()
        for start in range(0, size, 77_777):
            node.all_reduce(memory[start : start + 77_777], algorithm="symmetric")
        results.append(memory.copy())
        memory[:] = mine
        node.barrier()
        out = np.zeros(size, np.float32)
        own = np.zeros(even_counts(size, node.size)[node.rank], np.float32)
        node.reduce_scatter(own, memory, algorithm="symmetric")
        node.all_gather(out, own)
        results.append(out)
    for result in results:
        assert result.tobytes() == expected.tobytes()


def test_reductions_refuse_an_array_that_is_one_for_all(node: Communicator) -> None:
    x = node.shared(6, np.float32)
    for call in (node.all_reduce, node.reduce, lambda x: node.reduce_scatter(np.empty(6, np.float32), x)):
        if node.size > 1:
            with pytest.raises(ArgumentError, match="needs one a rank"):
                call(x)


def scatter_with_other_counts(comm: Communicator) -> None:
    """The sum of the counts is the same, so that the parts would overlap."""
    counts = [2, *[2] * (comm.size - 1)]
    if comm.rank == 1:
        counts[:2] = 1, 3
    comm.reduce_scatter(np.empty(counts[comm.rank]), np.ones(sum(counts)), counts=counts, algorithm="symmetric")


MISMATCHES: list[tuple[str, Callable[[Communicator], Any]]] = [
    ("elements", lambda c: c.all_reduce(np.ones(10 + (c.rank == 1)), algorithm="symmetric")),
    ("dtypes", lambda c: c.all_reduce(np.ones(10, "f4" if c.rank == 1 else "i4"), algorithm="symmetric")),
    ("operators", lambda c: c.all_reduce(np.ones(10), "max" if c.rank == 1 else "sum", algorithm="symmetric")),
    ("roots", lambda c: c.broadcast(np.ones(10), int(c.rank == 1), algorithm="symmetric")),
    (
        "operations",
        lambda c: (c.reduce if c.rank == 1 else c.all_reduce)(np.ones(10), algorithm="symmetric"),
    ),
    ("counts", scatter_with_other_counts),
    (
        "splits",
        lambda c: (
            c.all_to_all(
                np.empty(2 * c.size), np.empty(2 * c.size + (c.rank == 1)), [2] * c.size, algorithm="symmetric"
            )
            if c.rank != 1
            else c.all_to_all(
                np.empty(2 * c.size),
                np.empty(2 * c.size + 1),
                [2] * c.size,
                [3] + [2] * (c.size - 1),
                algorithm="symmetric",
            )
        ),
    ),
]


@pytest.mark.parametrize("what", [name for name, _ in MISMATCHES])
def test_what_does_not_fit_is_the_same_error_on_all_ranks(node: Communicator, what: str) -> None:
    call = dict(MISMATCHES)[what]
    if node.size > 1:
        with pytest.raises(MismatchError) as caught:
            call(node)
        texts = node.mpi.allgather(str(caught.value))
        assert len(set(texts)) == 1, texts
        assert "rank 1" in texts[0] or "ranks 1" in texts[0]
    x = np.ones(5)
    node.all_reduce(x, algorithm="symmetric")  # the group goes on
    assert (x == node.size).all()


def resident() -> int:
    """Bytes of memory of this process, without what it shares with others."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


def test_nothing_leaks(node: Communicator) -> None:
    """Memory, files, file descriptors and mappings stay as they are over 2000 operations, groups and allocations."""
    x, kept = np.ones(3000, np.float32), node.empty(3000, np.float32)

    def work(rounds: int) -> None:
        for number in range(rounds):
            memory = node.empty(5000, np.float32)
            for array in (x, kept, memory):
                array[:] = 1
                node.all_reduce(array, algorithm=("symmetric", "ring", "mpi", "auto")[number % 4])
            work = node.all_gather(np.empty(node.size * 10, np.float32), x[:10], async_op=True)
            assert work is not None
            work.wait()
            if number % 50 == 0:
                group = node.split(0)
                assert group is not None
                group.barrier()
                group.close()
        gc.collect()
        node.barrier()

    def state() -> tuple[int, int, list[str]]:
        maps = Path("/proc/self/maps").read_text().count("mpidl-")
        files = [name for name in os.listdir("/dev/shm") if name.startswith("mpidl-")]
        return len(os.listdir("/proc/self/fd")), maps, files

    work(200)
    before, memory = state(), resident()
    work(400)  # of 5 operations each
    after, grown = state(), resident() - memory
    node.barrier()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    left, limit = set(after[2]) - set(before[2]), time.monotonic() + 10
    while left and time.monotonic() < limit:  # another job of this machine removes the names of its own files soon
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    assert not left
    assert grown < 4 << 20, f"{grown >> 10} KiB more"
