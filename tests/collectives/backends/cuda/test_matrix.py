"""Every operation on GPU memory, by every way, against a float64 reference; on the stand-in."""

from __future__ import annotations

import pytest
import torch

from collectives import Communicator, PremulSum, even_counts
from tests.collectives.backends.cuda.standin import Gpu
from tests.collectives.reference import BITWISE, DTYPES, OPERATORS, assert_equal, reduced, serves, sizes, values

pytestmark = pytest.mark.mpi
ISLANDS = pytest.param("islands", marks=[pytest.mark.one_node, pytest.mark.ranks(4)])
IPC = [pytest.param(way, marks=pytest.mark.one_node) for way in ("ipc", "ipc between GPUs")]
WAYS = ["staged", *IPC, "aware", ISLANDS]
KINDS = ["array", "tensor"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, comm: Communicator, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "islands":  # ipc inside of each, staged between them
        if not isinstance(gpu, Gpu):
            pytest.skip("needs GPUs that do not reach each other")
        gpu.island = comm.rank // 2
        monkeypatch.delenv("MPIDL_CUDA", raising=False)
        return "islands"
    transport = request.param.split()[0]
    if isinstance(gpu, Gpu):
        gpu.aware, gpu.own = "yes", request.param == "ipc between GPUs"
    elif request.param == "ipc between GPUs":
        pytest.skip("what 'ipc' takes where each rank has a GPU")
    elif request.param == "aware" and gpu.aware == "no":
        pytest.skip("the MPI library does not take device memory")
    monkeypatch.setenv("MPIDL_CUDA", transport)
    return str(transport)


def own_part(comm: Communicator, whole: torch.Tensor, counts: list[int]) -> torch.Tensor:
    start = sum(counts[: comm.rank])
    return whole[start : start + counts[comm.rank]]


def uneven(comm: Communicator) -> list[int]:
    return [5 * rank for rank in range(comm.size)]


@pytest.mark.parametrize("op", OPERATORS)
def test_reductions(comm: Communicator, gpu: Gpu, way: str, op: str) -> None:
    for number, dtype in enumerate(DTYPES):
        if not serves(op, dtype, "auto"):
            continue
        for size in sizes(comm.size):
            what = f"{op} {dtype} [{size}]"
            inputs = [values(size, rank, dtype) for rank in range(comm.size)]
            expected, mine, kind = reduced(inputs, op), inputs[comm.rank], KINDS[(number + size) % 2]
            x = gpu.put(mine, kind)
            comm.all_reduce(x, op)
            assert_equal(gpu.get(x), expected, f"all_reduce {what}")
            root = size % comm.size
            x = gpu.put(mine, kind)
            comm.reduce(x, root, op)
            assert_equal(gpu.get(x), expected if comm.rank == root else mine, f"reduce {what}")
            counts = even_counts(size, comm.size)
            start = sum(counts[: comm.rank])
            x, out = gpu.put(mine, kind), gpu.put(torch.zeros(counts[comm.rank], dtype=mine.dtype), kind)
            comm.reduce_scatter(out, x, op)
            assert_equal(gpu.get(out), own_part(comm, expected, counts), f"reduce_scatter {what}")
            assert torch.equal(gpu.get(x), mine), f"reduce_scatter {what} changed its input"
            own = x[start : start + counts[comm.rank]]
            comm.reduce_scatter(own, x, op)
            assert_equal(gpu.get(own), own_part(comm, expected, counts), f"reduce_scatter {what} in place")


def test_prefixes_and_operators_on_bits(comm: Communicator, gpu: Gpu, way: str) -> None:
    for dtype in ("float32", "bfloat16", "int32", "uint8", "bool"):
        for number, size in enumerate(sizes(comm.size)):
            inputs, kind = [values(size, rank, dtype) for rank in range(comm.size)], KINDS[number % 2]
            for op in ("sum", *(BITWISE if "float" not in dtype else ())):
                what = f"{op} {dtype} [{size}]"
                for operation, stop in (("all_reduce", comm.size), ("scan", comm.rank + 1), ("exscan", comm.rank)):
                    x = gpu.put(inputs[comm.rank], kind)
                    getattr(comm, operation)(x, op)
                    expected = reduced(inputs[:stop], op) if stop else inputs[0]
                    assert_equal(gpu.get(x), expected, f"{operation} {what}")


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64"])
def test_movements(comm: Communicator, gpu: Gpu, way: str, dtype: str) -> None:
    for number, size in enumerate(sizes(comm.size)):
        kind = KINDS[number % 2]
        for counts in (even_counts(size, comm.size), uneven(comm)):
            whole = values(sum(counts), 9, dtype)
            given = None if counts == even_counts(sum(counts), comm.size) else counts
            mine = own_part(comm, whole, counts)
            nothing = torch.zeros_like(whole)
            out, x = gpu.put(nothing, kind), gpu.put(mine, kind)
            comm.all_gather(out, x, given)
            assert torch.equal(gpu.get(out), whole), ("all_gather", counts)
            start = sum(counts[: comm.rank])
            out = gpu.put(nothing, kind)
            own = out[start : start + counts[comm.rank]]
            gpu.fill(own, mine)
            comm.all_gather(out, own, given)
            assert torch.equal(gpu.get(out), whole), ("all_gather in place", counts)
            for root in {0, comm.size - 1}:
                out = gpu.put(nothing, kind) if comm.rank == root else None
                comm.gather(out, gpu.put(mine, kind), root, counts)
                assert out is None or torch.equal(gpu.get(out), whole), ("gather", counts, root)
                part = gpu.put(torch.zeros_like(mine), kind)
                comm.scatter(part, gpu.put(whole, kind) if comm.rank == root else None, root, counts)
                assert torch.equal(gpu.get(part), mine), ("scatter", counts, root)
        for root in range(comm.size):
            x = gpu.put(values(size, comm.rank, dtype), kind)
            comm.broadcast(x, root)
            assert torch.equal(gpu.get(x), values(size, root, dtype)), ("broadcast", size, root)
        inputs = [values(size, rank, dtype) for rank in range(comm.size)]
        counts = even_counts(size, comm.size)
        expected = torch.cat([own_part(comm, x, counts) for x in inputs])
        out = gpu.put(torch.zeros_like(expected), kind)
        comm.all_to_all(out, gpu.put(inputs[comm.rank], kind))
        assert torch.equal(gpu.get(out), expected), ("all_to_all", size)


def test_all_to_all_with_splits(comm: Communicator, gpu: Gpu, way: str) -> None:
    ranks = range(comm.size)
    leaving = [[r + 2 * q for q in ranks] for r in ranks]
    inputs = [values(sum(leaving[r]), r) for r in ranks]
    arriving = [leaving[q][comm.rank] for q in ranks]
    out = gpu.put(torch.zeros(sum(arriving)))
    comm.all_to_all(out, gpu.put(inputs[comm.rank]), arriving, leaving[comm.rank])
    assert torch.equal(gpu.get(out), torch.cat([inputs[q].split(leaving[q])[comm.rank] for q in ranks]))


@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"]
)
def test_arrays_of_many_chunks(
    comm: Communicator, gpu: Gpu, way: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns of every slot and buffer, and a short last chunk, in bf16 and float32."""
    for name in ("staged.SLOT_BYTES", "symmetric.CHUNK_BYTES", "aware.SCRATCH_BYTES"):
        monkeypatch.setattr(f"collectives.backends.cuda.{name}", 256 << 10)
    for dtype in (torch.float32, torch.bfloat16):
        size = 400_003 if dtype == torch.float32 else 800_005
        inputs = [values(size, rank).to(dtype) for rank in range(comm.size)]
        mine, counts = inputs[comm.rank], even_counts(size, comm.size)
        parts = [own_part(comm, x, counts) for x in inputs]
        x = gpu.put(mine)
        if operation == "all_reduce":
            comm.all_reduce(x)
            found, expected = x, reduced(inputs, "sum")
        elif operation == "reduce_scatter":
            found, expected = gpu.put(torch.zeros_like(parts[0])), own_part(comm, reduced(inputs, "sum"), counts)
            comm.reduce_scatter(found, x)
        elif operation == "broadcast":
            comm.broadcast(x, comm.size - 1)
            found, expected = x, inputs[-1]
        elif operation == "all_to_all":
            expected = torch.cat(parts)
            found = gpu.put(torch.zeros_like(expected))
            comm.all_to_all(found, x)
        else:
            whole = inputs[0]
            found, expected = gpu.put(torch.zeros_like(whole)), whole
            part = gpu.put(own_part(comm, whole, counts))
            if operation == "all_gather":
                comm.all_gather(found, part)
            else:
                comm.gather(found if comm.rank == 0 else None, part, 0, counts)
                back = gpu.put(torch.zeros_like(own_part(comm, whole, counts)))
                comm.scatter(back, found if comm.rank == 0 else None, 0, counts)
                found, expected = back, own_part(comm, whole, counts)
        assert torch.equal(gpu.get(found), expected), (operation, dtype)


def test_results_are_bitwise_equal_on_all_ranks(comm: Communicator, gpu: Gpu, way: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for op in ("sum", "avg", PremulSum(comm.rank + 0.5)):
            inputs = [
                torch.randn(100_003, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(comm.size)
            ]
            x = gpu.put(inputs[comm.rank], "tensor")
            comm.all_reduce(x, op)
            found = gpu.get(x)
            of_rank_0 = found.clone()
            comm.broadcast(of_rank_0)
            assert torch.equal(found, of_rank_0)
            factors = [rank + 0.5 if isinstance(op, PremulSum) else 1.0 for rank in range(comm.size)]
            exact = sum(each.double() * factor for each, factor in zip(inputs, factors, strict=True))
            exact = exact / comm.size if op == "avg" else exact
            torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-2)


def test_complex_numbers_and_nan(comm: Communicator, gpu: Gpu, way: str) -> None:
    x = gpu.put(torch.full((5,), complex(1, comm.rank), dtype=torch.complex64))
    comm.all_reduce(x, "avg")
    assert torch.equal(gpu.get(x), torch.full((5,), complex(1, (comm.size - 1) / 2), dtype=torch.complex64))
    for op in ("sum", "avg", "prod"):
        x = gpu.put(torch.tensor([float("nan") if comm.rank == comm.size - 1 else 1.0, 1.0]))
        comm.all_reduce(x, op)
        assert gpu.get(x).isnan().tolist() == [True, False]


def test_lists_run_as_one(comm: Communicator, gpu: Gpu, way: str) -> None:
    lengths = [3, 0, 1000, 300_000, 7]
    inputs = [[values(n, rank, seed=i) for i, n in enumerate(lengths)] for rank in range(comm.size)]
    expected = [reduced([each[i] for each in inputs], "sum") for i in range(len(lengths))]
    xs = [gpu.put(x) for x in inputs[comm.rank]]
    comm.all_reduce(xs)
    assert all(torch.equal(gpu.get(x), e) for x, e in zip(xs, expected, strict=True))
    xs = [gpu.put(x) for x in inputs[comm.rank]]
    owns = [gpu.put(torch.zeros(even_counts(n, comm.size)[comm.rank])) for n in lengths]
    comm.reduce_scatter(owns, xs)
    for own, e in zip(owns, expected, strict=True):
        assert torch.equal(gpu.get(own), own_part(comm, e, even_counts(e.numel(), comm.size)))
    wholes = [gpu.put(torch.zeros(n)) for n in lengths]
    comm.all_gather(wholes, owns)
    assert all(torch.equal(gpu.get(x), e) for x, e in zip(wholes, expected, strict=True))
    xs = [gpu.put(x) for x in inputs[comm.rank]]
    comm.broadcast(xs, comm.size - 1)
    assert all(torch.equal(gpu.get(x), e) for x, e in zip(xs, inputs[-1], strict=True))
