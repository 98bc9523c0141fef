"""Every form of every operation is checked and timed; wrong results are counted; cold arrays are cold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.bench import measurement, reference
from collectives.bench.buffers import ArraySets, cold, needs_second
from collectives.bench.device import BenchDevice
from collectives.bench.measurement import Row, measure
from collectives.bench.operations import OPERATIONS, OPERATORS, Case, bus_bandwidth
from collectives.bench.options import read

# nccl-tests, doc/PERFORMANCE.md, for 4 ranks.
FACTORS = {
    **{"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75},
    **{"broadcast": 1, "reduce": 1, "gather": 0.75, "scatter": 0.75, "scan": 1, "exscan": 1},
}


def case(name: str, size: int = 4000, dtype: str = "float32", op: str = "sum", root: int = 0) -> Case:
    operation = OPERATIONS[name]
    return Case(operation, dtype, op if operation.reduces else "none", root if operation.rooted else -1, size)


def rows_of(comm: Communicator, text: str, what: Case) -> tuple[list[Row], set[str]]:
    """The rows of a case, and the sides that do not serve it."""
    found = list(measure(comm, BenchDevice(), read(text.split(), comm.size), what))
    return [row for row in found if isinstance(row, Row)], {name for name in found if isinstance(name, str)}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_fresh_arrays_were_just_written_by_those_who_have_the_input(comm: Communicator) -> None:
    """By the kernel too, which reaches them where they are."""
    text = "--algorithms auto,kernel --compare mpi --fresh -n 2 -w 0 --buffers user"
    options = read(text.split(), comm.size)
    device = BenchDevice.of_cpu(comm, options.sides)
    for name, operation in OPERATIONS.items():
        what = case(name, root=comm.size - 1)
        rows = [row for row in measure(comm, device, options, what) if isinstance(row, Row)]
        served = {"auto", "mpi"} | ({"kernel"} if device.groups and operation.name not in ("scan", "exscan") else set())
        assert {(row.algorithm, row.cache) for row in rows} == {(s, c) for s in served for c in ("warm", "fresh")}
        assert {row.wrong for row in rows} == {0}
        assert all("mpi" in row.ratios for row in rows if row.algorithm != "mpi")
        for place in operation.places:
            arena = ArraySets(comm, what, "user", 1, "cpu", has_second=needs_second(what, operation.places))
            arrays, program = arena.arrays(0, place), arena.between_calls(place)
            arrays.out.fill_(2), arrays.x.fill_(1)
            program()
            is_written = name not in ("broadcast", "scatter") or comm.rank == comm.size - 1
            assert bool((arrays.x == 0).all()) == is_written, (name, place)
    for group in device.groups.values():
        group.close()


def test_bus_bandwidth_is_by_the_formulas_of_nccl_tests() -> None:
    assert set(FACTORS) == set(OPERATIONS)
    for name, factor in FACTORS.items():
        assert bus_bandwidth(OPERATIONS[name], 2_000_000_000, 0.5, 4) == pytest.approx(4 * factor), name


@pytest.mark.mpi
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_form_of_an_operation_is_right_and_timed(comm: Communicator, name: str) -> None:
    root = comm.size - 1
    text = "-n 2 -w 0 -c 2 --algorithms auto,symmetric,tree --compare mpi,copy --cold --cache 20K"
    rows, absent = rows_of(comm, text, case(name, root=root))
    assert {row.place for row in rows} == set(OPERATIONS[name].places)
    assert {row.cache for row in rows} == {"warm", "cold"}
    assert {(row.algorithm, row.place) for row in rows if row.buffer == "user"} >= {
        (side, place) for side in ("auto", "mpi") for place in OPERATIONS[name].places
    }
    assert {row.algorithm for row in rows if row.buffer == "symmetric"} <= {"auto", "symmetric"}
    whole = 1000 // comm.size * comm.size
    for row in rows:
        assert row.bytes == 4 * whole
        assert row.count == (whole // comm.size if FACTORS[name] == 0.75 else whole)
        assert 0 < row.time_us <= row.p95_us <= row.p99_us <= row.max_us
        assert row.algbw_gbs == pytest.approx(row.bytes / row.time_us / 1e3)
        assert row.busbw_gbs == pytest.approx(row.algbw_gbs * OPERATIONS[name].bus(comm.size))
        assert row.wrong == (None if row.algorithm == "copy" else 0), row
        assert ("mpi" in row.ratios) == (row.algorithm not in ("mpi", "copy")) or row.algorithm == "copy"
    assert ("copy" in absent) == (name not in ("all_reduce", "reduce_scatter", "all_to_all"))


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "uint8", "int64"])
def test_every_type_and_operator_is_right(comm: Communicator, dtype: str) -> None:
    for op in OPERATORS:
        for name in ("all_reduce", "scan"):
            if (op == "avg" and "float" not in dtype) or (op == "avg" and name == "scan"):
                continue
            rows, _ = rows_of(comm, "-n 1 -w 0 --compare mpi", case(name, dtype=dtype, op=op))
            assert [row.wrong for row in rows] == [0] * len(rows), (op, name)
            has_mpi = op != "avg" and dtype not in ("float16", "bfloat16")
            assert any(row.algorithm == "mpi" for row in rows) == has_mpi, (op, name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_elements_that_are_wrong_are_counted(name: str) -> None:
    what, ranks, rank, part = case(name, root=1), 3, 1, 100
    size = 3 * part if name not in ("reduce_scatter", "scatter") else part
    right = reference.expected(what, np.arange(size), part, rank, ranks, 5)
    assert right is not None
    result = torch.from_numpy(right.astype(np.float32))
    assert reference.wrong_elements(result, what, part, rank, ranks, 5) == 0
    result[7], result[-1] = float("nan"), result[-1] + 1
    assert reference.wrong_elements(result, what, part, rank, ranks, 5) == 2
    other = torch.from_numpy(reference.expected(what, np.arange(size), part, rank, ranks, 6).astype(np.float32))
    assert reference.wrong_elements(other, what, part, rank, ranks, 5) > size // 3, "of another iteration"


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_wrong_result_of_one_rank_is_counted_on_all(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Communicator.all_reduce

    def wrong(self: Communicator, x: Any, *arguments: Any, **settings: Any) -> Any:
        done = right(self, x, *arguments, **settings)
        if isinstance(x, torch.Tensor) and comm.rank == 1:
            x[3] += 1
        return done

    monkeypatch.setattr(Communicator, "all_reduce", wrong)
    rows, _ = rows_of(comm, "-n 1 -w 0 -c 3 --compare mpi --places in --buffers user", case("all_reduce"))
    assert {row.algorithm: row.wrong for row in rows} == {"auto": 3, "mpi": 0}


@pytest.mark.parametrize("touched", [64, 1 << 10, 1 << 16, 5 << 20, 1 << 28])
@pytest.mark.parametrize("most", [2, 7, 900])
def test_more_than_the_caches_hold_lies_between_two_uses_of_an_array(touched: int, most: int) -> None:
    caches = 33 << 20
    rotation = cold(touched, caches, most)
    assert 2 <= rotation.sets <= most
    assert (rotation.sets - 1) * touched + rotation.sets * rotation.swept > caches
    assert rotation.swept == 0 or rotation.sets == most, "other memory only where there are too few arrays"


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1 << 10, 64 << 10])
def test_cold_calls_rotate_through_more_than_the_caches_hold(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """By the addresses that calls are given, and the bytes that are read between them."""
    caches, seen, right = 1 << 20, [], Communicator.all_reduce

    def noted(self: Communicator, x: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(x, torch.Tensor):
            seen.append((x.data_ptr(), x.nbytes))
        return right(self, x, *arguments, **settings)

    class Noted(measurement.Sweep):
        def read(self, nbytes: int) -> None:
            seen.append((0, nbytes))
            super().read(nbytes)

    monkeypatch.setattr(Communicator, "all_reduce", noted)
    monkeypatch.setattr(measurement, "Sweep", Noted)
    monkeypatch.setattr(measurement, "KEPT_CALLS", 50)
    text = f"-n 120 -w 0 -c 0 --cold --cache {caches} --places in --buffers user"
    rows, _ = rows_of(comm, text, case("all_reduce", size))
    assert [row.cache for row in rows] == ["warm", "cold"]
    warm, first = seen[0][0], [place for place, _ in seen].index(0)  # of the first repetition
    before: dict[int, int] = {}
    compared = touched = 0
    for place, nbytes in seen[first:]:
        if place == warm:
            continue
        if place in before:
            compared += 1
            assert touched - before[place] > caches
        touched += nbytes
        if place:
            before[place] = touched
    assert set(before) == {place for place, _ in seen} - {0, warm}, "every set is used"
    assert compared > 20


@pytest.mark.mpi
def test_a_ratio_is_of_the_same_repetitions(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast in some repetitions; so are both sides."""

    def sample(comm: Communicator, steps: list[Any], count: int, *_: Any) -> np.ndarray[Any, Any]:
        assert len(steps) == 2
        speed = np.array([1.0, 2.0, 8.0])
        return np.stack([3e-6 * speed, 2e-6 * speed], 1)

    monkeypatch.setattr(measurement, "sample", sample)
    rows, _ = rows_of(comm, "-n 3 -c 0 -a 1 --compare mpi --places in --buffers user", case("all_reduce"))
    assert [(row.algorithm, row.ratios) for row in rows] == [("auto", {"mpi": pytest.approx(1.5)}), ("mpi", {})]
    assert [row.time_us for row in rows] == pytest.approx([6.0, 4.0])
    assert [row.max_us for row in rows] == pytest.approx([24.0, 16.0])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_the_time_of_a_repetition_is_of_the_rank_that_average_names(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(comm: Communicator, steps: list[Any], count: int, *_: Any) -> np.ndarray[Any, Any]:
        return np.full((count, len(steps)), 1e-6 * (5 + comm.rank))

    monkeypatch.setattr(measurement, "sample", sample)
    wanted = {0: lambda times: times[0], 1: lambda times: sum(times) / len(times), 2: min, 3: max}
    times = [5.0 + rank for rank in range(comm.size)]
    for average, of in wanted.items():
        text = f"-n 3 -m 2 -c 0 -a {average} --places in --buffers user"
        (row,), _ = rows_of(comm, text, replace(case("all_reduce"), size=64))
        assert row.time_us == pytest.approx(of(times) / 2), "of one of two calls in a row"
