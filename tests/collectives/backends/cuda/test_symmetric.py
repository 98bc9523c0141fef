"""GPU memory that ranks map: operations on it, arrays in it, and when it goes; on the stand-in."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator, OperationError, even_counts
from collectives.backends.cuda.memory import retired
from tests.collectives.backends.cuda.standin import Gpu
from tests.collectives.reference import DTYPES, assert_equal, reduced, sizes, values

pytestmark = pytest.mark.mpi


def on(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}"


def placed(comm: Communicator, gpu: Gpu, values: torch.Tensor) -> Any:
    """A tensor in symmetric memory with these values."""
    x = comm.empty(tuple(values.shape), values.dtype, device=on(gpu))
    gpu.fill(x, values)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_on_symmetric_memory(comm: Communicator, gpu: Gpu, dtype: str) -> None:
    for size in sizes(comm.size):
        inputs = [values(size, rank, dtype) for rank in range(comm.size)]
        mine, counts, rank = inputs[comm.rank], even_counts(size, comm.size), comm.rank
        start = sum(counts[:rank])
        own = slice(start, start + counts[rank])
        x = placed(comm, gpu, mine)
        comm.all_reduce(x, "max")
        assert_equal(gpu.get(x), reduced(inputs, "max"), f"all_reduce {size}")
        x = placed(comm, gpu, mine)
        comm.reduce(x, comm.size - 1)
        assert_equal(gpu.get(x), reduced(inputs, "sum") if rank == comm.size - 1 else mine, f"reduce {size}")
        x, out = placed(comm, gpu, mine), gpu.put(torch.zeros_like(mine[own]), "tensor")
        comm.reduce_scatter(out, x, "prod")
        assert_equal(gpu.get(out), reduced(inputs, "prod")[own], f"reduce_scatter {size}")
        assert_equal(gpu.get(x), mine, f"the input of reduce_scatter {size}")
        whole = inputs[0]
        out = placed(comm, gpu, torch.zeros_like(whole))
        part = out[own]
        gpu.fill(part, whole[own])
        comm.all_gather(out, part)
        assert_equal(gpu.get(out), whole, f"all_gather {size}")
        x = placed(comm, gpu, mine)
        comm.broadcast(x, comm.size - 1)
        assert_equal(gpu.get(x), inputs[-1], f"broadcast {size}")
        x, out = placed(comm, gpu, mine), gpu.put(torch.zeros(comm.size * counts[rank], dtype=mine.dtype), "tensor")
        comm.all_to_all(out, x)
        parts = [each[own] for each in inputs]
        assert_equal(gpu.get(out), torch.cat(parts), f"all_to_all {size}")
        x = placed(comm, gpu, whole[own])
        target = gpu.put(torch.zeros_like(whole), "tensor") if rank == 0 else None
        comm.gather(target, x, 0, counts)
        assert target is None or torch.equal(gpu.get(target), whole), f"gather {size}"
        source = placed(comm, gpu, whole)
        comm.scatter(x, source if rank == 0 else None, 0, counts)
        assert_equal(gpu.get(x), whole[own], f"scatter {size}")


@pytest.mark.one_node
def test_symmetric_memory_is_reduced_without_a_copy(comm: Communicator, standin: Gpu) -> None:
    x = placed(comm, standin, torch.ones(1000))
    comm.all_reduce(x)
    standin.copies.clear()
    comm.all_reduce(x)
    assert standin.copies == []
    assert (standin.get(x) == comm.size**2).all()
    y = standin.put(torch.ones(1000))
    comm.all_reduce(y)
    standin.copies.clear()
    comm.all_reduce(y)
    assert set(standin.copies) <= {"inside"}


@pytest.mark.one_node
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("own", [False, True], ids=["one GPU", "a GPU for each rank"])
def test_one_rank_works_for_all_that_share_its_gpu(comm: Communicator, standin: Gpu, own: bool) -> None:
    """Rank 0 queues all work on symmetric memory in place. Where each rank has a GPU, each does its part."""
    standin.own = own
    counts = [40 + rank for rank in range(comm.size)]
    x = placed(comm, standin, torch.full((sum(counts),), comm.rank + 1.0))
    part = x.split(counts)[comm.rank]
    for reduce in (lambda: comm.all_reduce(x), lambda: comm.reduce_scatter(part, x, counts=counts)):
        standin.reductions = 0
        reduce()
        assert (standin.reductions > 0) == (own or comm.rank == 0)
    assert (standin.get(part) == comm.size * comm.size * (comm.size + 1) / 2).all()
    standin.fill(part, torch.full((counts[comm.rank],), float(comm.rank)))
    standin.copies.clear()
    comm.all_gather(x, part, counts)
    assert ("inside" in standin.copies) == (own or comm.rank == 0)
    assert all((value == rank).all() for rank, value in enumerate(standin.get(x).split(counts)))
    y = placed(comm, standin, torch.full((50,), float(comm.rank)))
    standin.copies.clear()
    comm.broadcast(y, 1)
    assert ("inside" in standin.copies) == (comm.rank != 1 if own else comm.rank == 0)
    assert (standin.get(y) == 1).all()


@pytest.mark.one_node
def test_bits_do_not_depend_on_the_memory_or_the_cut(
    comm: Communicator, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From symmetric memory, from elsewhere in many chunks, in slices: the same bits, in the order of ranks."""
    monkeypatch.setattr("collectives.backends.cuda.symmetric.CHUNK_BYTES", 100_000)
    size = 100_003
    inputs = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    expected = inputs[0].clone()
    for each in inputs[1:]:
        expected += each
    for x in (placed(comm, gpu, inputs[comm.rank]), gpu.put(inputs[comm.rank])):
        comm.all_reduce(x)
        assert torch.equal(gpu.get(x), expected)
        gpu.fill(x, inputs[comm.rank])
        for start in range(0, size, 33_333):
            comm.all_reduce(x[start : start + 33_333])
        assert torch.equal(gpu.get(x), expected)
        gpu.fill(x, inputs[comm.rank])
        comm.all_reduce(x, algorithm="symmetric")
        assert torch.equal(gpu.get(x), expected)


def test_some_ranks_arrays_lie_in_symmetric_memory_and_some_do_not(comm: Communicator, gpu: Gpu) -> None:
    memory = comm.empty(100, torch.float32, device=on(gpu))
    for x in (memory[comm.rank : comm.rank + 50], memory[20:70] if comm.rank % 2 else gpu.put(torch.zeros(50))):
        gpu.fill(x, torch.full((50,), float(comm.rank)))
        comm.all_reduce(x)
        assert (gpu.get(x) == sum(range(comm.size))).all()


@pytest.mark.one_node
def test_shared_memory_is_one_for_all_ranks(comm: Communicator, standin: Gpu) -> None:
    x = comm.shared(7 * comm.size, torch.bfloat16, device=on(standin))
    own = x[7 * comm.rank : 7 * (comm.rank + 1)]
    standin.fill(own, torch.full((7,), float(comm.rank), dtype=torch.bfloat16))
    standin.copies.clear()
    comm.all_gather(x, own)
    assert standin.copies == []
    assert torch.equal(standin.get(x), torch.arange(comm.size).repeat_interleave(7).to(torch.bfloat16))
    assert comm.is_shared(x)
    assert not comm.is_shared(standin.put(torch.ones(2)))
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="one for all ranks"):
            comm.all_reduce(x)


def test_memory_goes_when_all_ranks_have_dropped_it(comm: Communicator, standin: Gpu) -> None:
    """At whatever times they drop it; and the others still reach what a rank that was faster has dropped."""
    gc.collect()
    comm.all_reduce(standin.put(torch.ones(1)))
    with standin.current():
        retired(standin).sweep()

    def allocations() -> int:
        standin.synchronize()
        return len(standin._maps)

    x = standin.put(torch.ones(5))
    comm.all_reduce(x)
    before = allocations()
    for _ in range(3):
        y = comm.empty(1000, torch.float32, device=on(standin))
        standin.fill(y, torch.ones(1000))
        comm.all_reduce(y)
        z = comm.shared(1000, np.float32, device=on(standin))
        if comm.local_rank % 2:
            mine = y.data_ptr()
            del y, z
            comm.all_reduce(x)  # sweeps
            assert mine in standin._maps, "the first rank of the node has it open still"
        else:
            comm.all_reduce(x)
            assert (standin.get(y) == comm.size).all()
            standin.fill(z, torch.ones(1000))
            standin.synchronize()
            del y, z
        gc.collect()
        for _ in range(3):
            comm.all_reduce(x)
            comm.barrier()
    assert allocations() == before


def test_arrays_outlive_their_communicator(comm: Communicator, gpu: Gpu) -> None:
    group = comm.split(0)
    assert group is not None
    x = group.empty(10, torch.float32, device=on(gpu))
    gpu.fill(x, torch.ones(10))
    group.all_reduce(x)
    group.close()
    assert (gpu.get(x) == comm.size).all()
    comm.all_reduce(x)
    assert (gpu.get(x) == comm.size**2).all()


def test_a_gpu_without_room_is_an_error_on_all_ranks(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = standin.put(torch.ones(4))
    comm.all_reduce(x)
    allocate = standin.allocate

    def full(nbytes: int) -> int:
        if comm.rank == comm.size - 1:
            raise MemoryError
        return allocate(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(standin, "allocate", full)
        with pytest.raises(OperationError, match=r"empty: .*no room for 7 of float32"):
            comm.empty(7, torch.float32, device=on(standin))
    comm.all_reduce(x)
    assert (standin.get(x) == comm.size**2).all()


def test_devices_that_are_none_are_refused(comm: Communicator, gpu: Gpu) -> None:
    for device in ("meta", "gpu", 3.5):
        with pytest.raises(ArgumentError, match=r"empty: got device .*; needs a CPU"):
            comm.empty(3, torch.float32, device=device)
    assert isinstance(comm.empty(3, np.float32), np.ndarray)
