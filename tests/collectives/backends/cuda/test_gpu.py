"""Tests that need a GPU: the kernels compute there what they do on the host, and that streams are kept."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator, OperationError
from collectives.base.buffers import DTYPES, Buffer, DType
from tests.collectives.backends.cuda.real import RealGpu
from tests.collectives.backends.cuda.test_kernels import OPS, data, is_nan, served

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> RealGpu:
    from mpi4py import MPI

    return RealGpu(MPI.COMM_WORLD.Get_rank())


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_a_kernel_gives_the_host_s_bits(cuda: RealGpu, dtype: DType, name: str) -> None:
    """Whatever the arrays' addresses are, and with an output that is an input."""
    op = served(name, dtype)
    if op is None:
        return
    factors = [1.5, -2.0, 0.25]
    for size in (1, 7, 131, 100_003):
        for offsets in ((0, 0, 0), (1, 1, 1), (0, 1, 2)):
            inputs = [data(dtype, size, seed, offset) for seed, offset in enumerate(offsets)]
            expected = np.empty_like(inputs[0])
            with np.errstate(all="ignore"):
                op.combine(inputs, [expected], dtype, factors)
            memory = [torch.zeros(size * dtype.itemsize + 64, dtype=torch.uint8, device="cuda") for _ in range(4)]
            starts = [offset * dtype.itemsize for offset in (*offsets, offsets[0])]
            for each, start, flat in zip(memory, starts, inputs, strict=False):
                each[start : start + flat.nbytes] = torch.from_numpy(flat.view(np.uint8).copy()).cuda()
            places = [each.data_ptr() + start for each, start in zip(memory, starts, strict=True)]
            with cuda.current():
                stream = cuda.driver.stream_of(memory[0])
                cuda.driver.combine(op, dtype, places[:3], [places[0], places[3]], size, factors, stream)
            for which in (0, 3):
                bits = memory[which][starts[which] :][: expected.nbytes].cpu().numpy()
                found = bits.view(dtype.storage)
                if dtype.kind == "c":
                    np.testing.assert_allclose(found, expected, 1e-4)
                    continue
                same = (bits == expected.view(np.uint8)).reshape(size, -1).all(1)
                if dtype.kind == "f":
                    same |= is_nan(found, dtype) & is_nan(expected, dtype)
                assert same.all(), (dtype.name, name, size, offsets)


def long_work(x: torch.Tensor) -> None:
    """Queues some milliseconds of work that ends with x += 1."""
    y = torch.ones(2048, 2048, device=x.device)
    for _ in range(50):
        y = y @ y * 1e-4
    x += 1 + 0 * y[0, 0]


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_the_current_stream_of_a_library_is_kept(comm: Communicator, cuda: RealGpu, library: str) -> None:
    """An operation that did not wait for it would add up zeros, and a reader that did not wait would see ones."""
    stream = cuda.stream()
    for _ in range(10):
        x = torch.zeros(1_000_000, device="cuda")
        torch.cuda.synchronize()
        with cuda.using(stream):
            long_work(x)
            given: Any = x if library == "torch" else cuda._cupy.asarray(x)
            comm.all_reduce(given)
            found = x.clone()
        stream.synchronize()
        assert (found == comm.size).all()


@pytest.mark.mpi
def test_a_graph_that_is_captured_is_refused(comm: Communicator, cuda: RealGpu) -> None:
    x = torch.ones(100, device="cuda")
    comm.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ArgumentError, match="while a CUDA graph is captured"):
        comm.all_reduce(x)
    comm.all_reduce(x)
    assert (x == comm.size**2).all()


@pytest.mark.one_node
@pytest.mark.mpi
def test_ranks_of_one_host_take_ipc(comm: Communicator, cuda: RealGpu) -> None:
    comm.all_reduce(torch.ones(3, device="cuda"))
    assert comm.stats()["gpu"]["transport"] == "ipc"


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_256_mib_come_out_right(comm: Communicator, cuda: RealGpu, dtype: torch.dtype) -> None:
    """In symmetric memory and elsewhere, bitwise equal on all ranks."""
    size = (256 << 20) // dtype.itemsize
    torch.manual_seed(comm.rank)
    values = torch.randn(size, device="cuda").to(dtype)
    found = []
    for x in (comm.empty(size, dtype, device=f"cuda:{cuda.index}"), torch.empty_like(values)):
        x.copy_(values)
        comm.all_reduce(x)
        found.append(x)
    assert torch.equal(found[0], found[1])
    of_rank_0 = found[0].clone()
    comm.broadcast(of_rank_0)
    assert torch.equal(found[0], of_rank_0)


def test_bf16_is_seen_in_both_ways(cuda: RealGpu) -> None:
    x = torch.ones(5, dtype=torch.bfloat16, device="cuda")
    from collectives.base.buffers import inspect

    seen = inspect(x, "x", writable=True)
    assert isinstance(seen, Buffer)
    assert (seen.address, seen.dtype.name, seen.size) == (x.data_ptr(), "bfloat16", 5)


@pytest.mark.mpi
def test_memory_that_is_not_there_is_an_error_on_all_ranks(comm: Communicator, cuda: RealGpu) -> None:
    """Arrays that were made before can still be used."""
    x = comm.empty(1000, torch.float32, device="cuda")
    x.fill_(1)
    whole = torch.cuda.get_device_properties(cuda.index).total_memory
    with pytest.raises(OperationError, match="no room for"):
        comm.empty(2 * whole, torch.uint8, device="cuda")
    comm.all_reduce(x)
    assert (x == comm.size).all()


@pytest.mark.mpi
@pytest.mark.limit(240)
def test_memory_that_comes_and_goes_200_times(comm: Communicator, cuda: RealGpu) -> None:
    """Each time other processes open it; in the end the GPU has as much free memory as before."""
    for _ in range(2):
        free = torch.cuda.mem_get_info(cuda.index)[0]
        for turn in range(100):
            x = comm.empty(300_000, torch.float32, device="cuda")
            x.fill_(turn)
            work = comm.all_reduce(x, async_op=True)
            assert work is not None
            if turn % 3 == 0:  # dropped while others may still read it
                del x, work
                continue
            work.wait()
            assert (x == turn * comm.size).all()
            del x, work
        for _ in range(3):
            comm.all_reduce(torch.ones(1, device="cuda"))
            comm.barrier()
    assert torch.cuda.mem_get_info(cuda.index)[0] >= free - (64 << 20)


@pytest.mark.mpi
def test_two_communicators_take_turns(comm: Communicator, cuda: RealGpu) -> None:
    """Their operations are under way side by side, on streams of their own."""
    other = comm.duplicate()
    xs = [group.empty(3_000_000, torch.float32, device="cuda") for group in (comm, other)]
    streams = [cuda.stream(), cuda.stream()]
    for turn in range(20):
        works = []
        for group, x, stream in zip((comm, other), xs, streams, strict=True):
            with torch.cuda.stream(stream):
                x.fill_(turn)
                works.append(group.all_reduce(x, async_op=True))
        for work, x, stream in zip(works, xs, streams, strict=True):
            with torch.cuda.stream(stream):
                assert work is not None
                work.wait()
                assert (x == turn * comm.size).all()
    other.close()


KILLED = """
import os, signal, sys
import torch
from collectives import Communicator
comm = Communicator()
x = comm.empty(50_000_000, torch.float32, device="cuda")
x.fill_(1)
for turn in range(200):
    if turn == 50 and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(x, "avg")
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_ends_the_job_and_gives_its_memory_back(ranks: int) -> None:
    """The others have its memory open, and it has theirs."""
    from tests.harness.launch import mpirun

    free = torch.cuda.mem_get_info()[0]
    done = mpirun(ranks, "-c", KILLED, timeout=120)
    assert done.returncode != 0
    deadline = time.monotonic() + 20
    while torch.cuda.mem_get_info()[0] < free - (64 << 20):  # if no other program uses the GPU
        assert time.monotonic() < deadline, "the killed job's memory is still in use"
        time.sleep(0.1)
    done = mpirun(ranks, "-c", KILLED.replace("turn == 50", "False"), timeout=120)
    assert done.returncode == 0, done.stderr
