"""all_reduce, reduce_scatter and reduce against a float64 reference."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from collectives import Communicator, PremulSum, even_counts
from collectives.schedules.algorithms import ALGORITHMS
from tests.collectives.reference import BITWISE, OPERATORS, assert_equal, dtypes, named, reduced, serves, sizes, values

pytestmark = pytest.mark.mpi
ALL_REDUCE = [*ALGORITHMS["all_reduce"], "shared memory"]
REDUCE_SCATTER = [*ALGORITHMS["reduce_scatter"], "shared memory"]


def cases(comm: Communicator, op: str, algorithm: str):
    """(what, this rank's input, all inputs' reduction) for the dtypes and sizes that the combination serves."""
    for dtype in dtypes(algorithm):
        if serves(op, dtype, algorithm):
            for size in sizes(comm.size):
                inputs = [values(size, rank, dtype) for rank in range(comm.size)]
                yield f"{op} {algorithm} {dtype} [{size}]", inputs[comm.rank], reduced(inputs, op)


@pytest.mark.parametrize("algorithm", ["auto", *ALL_REDUCE, "mpi"])
@pytest.mark.parametrize("op", OPERATORS)
def test_all_reduce(comm: Communicator, op: str, algorithm: str) -> None:
    for what, x, expected in cases(comm, op, algorithm):
        assert comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm)) is None
        assert_equal(x, expected, what)


@pytest.mark.parametrize("algorithm", ["auto", *REDUCE_SCATTER, "mpi"])
@pytest.mark.parametrize("op", OPERATORS)
def test_reduce_scatter(comm: Communicator, op: str, algorithm: str) -> None:
    for what, x, expected in cases(comm, op, algorithm):
        counts = even_counts(x.numel(), comm.size)
        start = sum(counts[: comm.rank])
        own = slice(start, start + counts[comm.rank])
        before = x.clone()
        out = torch.zeros(counts[comm.rank], dtype=x.dtype)
        comm.reduce_scatter(out, x, op, algorithm=named(comm, "reduce_scatter", algorithm))
        assert_equal(out, expected[own], what)
        assert torch.equal(x, before), f"{what}: the input was changed"
        comm.reduce_scatter(x[own], x, op, algorithm=named(comm, "reduce_scatter", algorithm))
        assert_equal(x[own], expected[own], f"{what} in place")


@pytest.mark.parametrize("algorithm", ["auto", *ALL_REDUCE, "mpi"])
def test_operators_on_bits(comm: Communicator, algorithm: str) -> None:
    for dtype in ("int8", "uint8", "int32", "int64", "bool"):
        for op in BITWISE:
            for size in (1, comm.size + 1, 1003):
                random = [np.random.default_rng((rank, size)) for rank in range(comm.size)]
                bits = [each.integers(-128, 128, size) for each in random]  # all bits of a byte, signs too
                inputs = [torch.from_numpy(b % 3 > 0 if dtype == "bool" else b.astype(dtype)) for b in bits]
                expected, what = reduced(inputs, op), f"{op} {algorithm} {dtype} [{size}]"
                x = inputs[comm.rank].clone()
                comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm))
                assert_equal(x, expected, what)
                for operation in ("reduce", "reduce_scatter"):
                    found = named(comm, operation, algorithm)
                    if found not in comm.algorithms(operation):
                        continue
                    x = inputs[comm.rank].clone()
                    if operation == "reduce":
                        comm.reduce(x, op=op, algorithm=found)
                        assert comm.rank or torch.equal(x, expected), what
                        continue
                    counts = even_counts(size, comm.size)
                    start = sum(counts[: comm.rank])
                    out = torch.zeros(counts[comm.rank], dtype=x.dtype)
                    comm.reduce_scatter(out, x, op, algorithm=found)
                    assert_equal(out, expected[start : start + counts[comm.rank]], what)


def test_reduce_scatter_with_counts(comm: Communicator) -> None:
    counts = [3 * rank for rank in range(comm.size)]
    inputs = [values(sum(counts), rank) for rank in range(comm.size)]
    start = sum(counts[: comm.rank])
    for algorithm in (*REDUCE_SCATTER, "mpi"):
        out = torch.zeros(counts[comm.rank])
        comm.reduce_scatter(out, inputs[comm.rank], counts=counts, algorithm=named(comm, "reduce_scatter", algorithm))
        assert_equal(out, reduced(inputs, "sum")[start : start + counts[comm.rank]], algorithm)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["reduce"], "shared memory", "mpi"])
@pytest.mark.parametrize("op", OPERATORS)
def test_reduce_changes_the_root_only(comm: Communicator, op: str, algorithm: str) -> None:
    for what, x, expected in cases(comm, op, algorithm):
        root = x.numel() % comm.size
        before = x.clone()
        comm.reduce(x, root, op, algorithm=named(comm, "reduce", algorithm))
        assert_equal(x, expected if comm.rank == root else before, what)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["scan"], "shared memory", "mpi"])
@pytest.mark.parametrize("op", [*(op for op in OPERATORS if op != "avg"), "bxor"])
def test_prefixes(comm: Communicator, op: str, algorithm: str) -> None:
    for dtype in dtypes(algorithm):
        if not serves(op, dtype, algorithm) or (op == "bxor" and "float" in dtype):
            continue
        for size in sizes(comm.size):
            inputs = [values(size, rank, dtype) for rank in range(comm.size)]
            what = f"{op} {algorithm} {dtype} [{size}]"
            x = inputs[comm.rank].clone()
            comm.scan(x, op, algorithm=named(comm, "scan", algorithm))
            assert_equal(x, reduced(inputs[: comm.rank + 1], op), f"scan {what}")
            x = inputs[comm.rank].clone()
            comm.exscan(x, op, algorithm=named(comm, "exscan", algorithm))
            assert_equal(x, reduced(inputs[: comm.rank], op) if comm.rank else inputs[0], f"exscan {what}")


def test_prefixes_of_sixteen_bit_floats_are_rounded_once_and_premultiplied(comm: Communicator) -> None:
    for operation, own in ((comm.scan, 1), (comm.exscan, 0)):
        x = torch.full((7,), 2048.0 if comm.rank == 0 else 1.0, dtype=torch.float16)
        work = operation(x, async_op=True)
        assert work is not None
        work.wait()
        added = max(0, comm.rank - 1 + own)
        assert torch.equal(x, torch.full((7,), 2048.0 + added).to(torch.float16))
        y = np.ones(400_000, np.float32)  # several segments
        operation(y, PremulSum(comm.rank + 1))
        last = comm.rank + own
        assert (y == (last * (last + 1) / 2 if last else 1)).all()


def test_numpy_arrays_of_any_shape_and_slices_of_larger_ones(comm: Communicator) -> None:
    for shape in [(), (3, 4), (2, 0, 5), (2, 3, 4)]:
        x = np.full(shape, comm.rank + 1.0)
        comm.all_reduce(x, algorithm="ring")
        np.testing.assert_array_equal(x, np.full(shape, comm.size * (comm.size + 1) / 2))
    whole = np.full(10, float(comm.rank))
    comm.all_reduce(whole[3:7], "max")
    np.testing.assert_array_equal(whole, [comm.rank] * 3 + [comm.size - 1] * 4 + [comm.rank] * 3)


@pytest.mark.parametrize("in_another_thread", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("algorithm", ["auto", *ALL_REDUCE, "mpi"])
def test_overflow_and_invalid_values_are_results(comm: Communicator, algorithm: str, in_another_thread: bool) -> None:
    """On one rank alone numpy may be told to raise, and warnings to be errors."""
    extremes = np.array([3e38, -3e38, 1e-30, np.inf, 0.0, np.nan], np.float32)
    mine = extremes.copy()
    mine[3] *= 1 if comm.rank % 2 else -1
    stern = {"all": "raise"} if comm.rank == 0 else {}
    with np.errstate(**stern), warnings.catch_warnings():
        warnings.simplefilter("error")
        for op in (*OPERATORS, PremulSum(1e30)):
            if algorithm == "mpi" and op not in OPERATORS:
                continue
            x = mine.copy()
            work = comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm), async_op=in_another_thread)
            if work is not None:
                work.wait()
            assert np.isnan(x[5])
            if op == "sum":
                expected = [np.inf, -np.inf, 1e-30 * comm.size, -np.inf if comm.size == 1 else np.nan, 0]
                expected[:2] = extremes[:2] if comm.size == 1 else expected[:2]
                np.testing.assert_allclose(x[:5], np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.each("algorithm")
@pytest.mark.parametrize("algorithm", ["auto", *ALL_REDUCE, "mpi"])
@pytest.mark.parametrize("op", OPERATORS)
def test_signed_zeros_and_nans_are_the_same_bits_on_all_ranks(comm: Communicator, op: str, algorithm: str) -> None:
    """Which zero or which NaN comes out is open, but it is one for all ranks, and NaN where it has to be."""
    for name in ("float64", "float32", "float16", "bfloat16", "complex64"):
        if not serves(op, name, algorithm) or (op in ("min", "max") and name == "complex64"):
            continue
        for size in (1, 2, 317, 20_011):
            dtype = getattr(torch, name)
            generator = torch.Generator().manual_seed(comm.rank + (size == 1))
            special = [0.0, -0.0, float("nan"), -float("nan"), 1.0, float("inf"), -float("inf")]
            x = torch.tensor(special)[torch.randint(len(special), (size,), generator=generator)].to(dtype)
            if size == 1:
                x = torch.full((1,), float("nan") * (-1) ** comm.rank).to(dtype)
            real = torch.view_as_real(x).flatten() if dtype.is_complex else x
            bits = real.view(torch.uint8)
            bits[:: real.dtype.itemsize] ^= torch.where(real.isnan(), comm.rank % 8, 0).to(torch.uint8)  # own payloads
            everyone = torch.empty(comm.size * len(bits), dtype=torch.uint8)
            comm.all_gather(everyone, bits)
            inputs = list(everyone.view(dtype).view(comm.size, -1))
            comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm))
            what = f"{op} {algorithm} {dtype} [{size}]"
            if not dtype.is_complex:
                expected = reduced(inputs, op).double()
                assert_equal(x.double().nan_to_num(7.0, 8.0, -8.0), expected.nan_to_num(7.0, 8.0, -8.0), what)
            comm.all_gather(everyone, bits)
            assert (everyone.view(comm.size, -1) == everyone.view(comm.size, -1)[0]).all(), what


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_add_up(comm: Communicator, dtype: str) -> None:
    for algorithm in (*ALL_REDUCE, "mpi"):
        x = np.full(5, 1 + comm.rank * 1j, dtype)
        comm.all_reduce(x, "avg", algorithm=named(comm, "all_reduce", algorithm))
        np.testing.assert_allclose(x, np.full(5, 1 + (comm.size - 1) / 2 * 1j, dtype))


def test_sixteen_bit_floats_are_rounded_once(comm: Communicator) -> None:
    """2048 + 1 is 2048 in fp16, and 256 + 1 is 256 in bf16: adding in those types would lose every one."""
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        for algorithm in ALL_REDUCE:
            x = torch.full((7,), large if comm.rank == 0 else 1.0, dtype=dtype)
            comm.all_reduce(x, algorithm=named(comm, "all_reduce", algorithm))
            assert torch.equal(x, torch.full((7,), large + comm.size - 1).to(dtype))


@pytest.mark.parametrize("algorithm", [*ALL_REDUCE, "mpi"])
@pytest.mark.parametrize("size", [1003, 1_000_003])
def test_results_are_bitwise_equal_on_all_ranks_and_near_the_reference(
    comm: Communicator, size: int, algorithm: str
) -> None:
    inputs = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(comm.size)]
    x = inputs[comm.rank].copy()
    comm.all_reduce(x, "avg", algorithm=named(comm, "all_reduce", algorithm))
    exact = np.mean(np.stack(inputs).astype(np.float64), 0)
    np.testing.assert_allclose(x, exact, rtol=0, atol=1e-6)
    of_rank_0 = x.copy()
    comm.broadcast(of_rank_0)
    assert (x == of_rank_0).all()


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounded_and_premultiplied_results_are_bitwise_equal_on_all_ranks(
    comm: Communicator, dtype: torch.dtype, algorithm: str
) -> None:
    for size in (1, 1003, 300_001):  # the last: several segments, and pieces of the pipelined algorithms
        random = [torch.Generator().manual_seed(rank) for rank in range(comm.size)]
        inputs = [torch.randn(size, generator=each).to(dtype) for each in random]
        for op in ("sum", PremulSum(comm.rank + 0.5)):
            x = inputs[comm.rank].clone()
            comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm))
            factors = [1.0] * comm.size if op == "sum" else [rank + 0.5 for rank in range(comm.size)]
            exact = sum(each.double() * factor for each, factor in zip(inputs, factors, strict=True))
            torch.testing.assert_close(x.double(), exact, rtol=2.0**-8, atol=1e-2)
            of_rank_0 = x.clone()
            comm.broadcast(of_rank_0)
            assert torch.equal(x, of_rank_0)


@pytest.mark.parametrize("algorithm", REDUCE_SCATTER)
def test_premultiplied_parts_leave_the_input_alone(comm: Communicator, algorithm: str) -> None:
    for dtype in (torch.float32, torch.float16):
        x = torch.full((5 * comm.size,), 2.0, dtype=dtype)
        out = torch.zeros(5, dtype=dtype)
        comm.reduce_scatter(out, x, PremulSum(comm.rank + 1), algorithm=named(comm, "reduce_scatter", algorithm))
        assert torch.equal(out, torch.full((5,), float(comm.size * (comm.size + 1)), dtype=dtype))
        assert torch.equal(x, torch.full_like(x, 2.0))


def test_a_nan_anywhere_is_seen_everywhere(comm: Communicator) -> None:
    for op in OPERATORS:
        for algorithm in (*ALL_REDUCE, "mpi"):
            x = np.array([np.nan if comm.rank == comm.size - 1 else 1.0, 1.0])
            comm.all_reduce(x, op, algorithm=named(comm, "all_reduce", algorithm))
            assert np.isnan(x[0])
            assert not np.isnan(x[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_auto_keeps_a_nan_in_min_and_max(comm: Communicator, dtype: type[np.floating]) -> None:
    """Also where the library's own, which compares and may drop it, is fastest."""
    for op in ("min", "max"):
        for rank in range(comm.size):
            x = np.full(comm.size, np.nan if comm.rank == rank else comm.rank, dtype)
            part, whole, root = np.zeros(1, dtype), x.copy(), x.copy()
            comm.reduce_scatter(part, x.copy(), op)
            comm.all_reduce(whole, op)
            comm.reduce(root, op=op)
            assert np.isnan(part).all()
            assert np.isnan(whole).all()
            assert np.isnan(root).all() or comm.rank != 0
