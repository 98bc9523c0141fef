"""torch.profiler shows forward passes, buckets, gatherings and collectives; nothing is recorded where none is on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import mpidl
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi


def test_a_step_of_ddp(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(zero.made(zero.Several), process_group=comm, bucket_cap_mb=1e-5)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        wrapped(zero.data(comm.rank)).square().sum().backward()
        comm.barrier()
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()
        if comm.size > 1:
            comm.send(torch.ones(3), (comm.rank + 1) % comm.size, async_op=True)
            comm.recv(torch.empty(3), (comm.rank - 1) % comm.size)
    seen = Counter(event.name for event in profiled.events())
    assert seen["DistributedDataParallel.forward"] == seen["mpidl::finish_backward"] == 1
    assert seen["mpidl::bucket"] == len(wrapped.stats()["buckets"]) > 1
    assert seen["collectives::barrier"] == 1
    assert seen["collectives::send"] == seen["collectives::recv"] == int(comm.size > 1)
    assert seen["collectives::all_reduce"] >= 1


def test_an_asynchronous_operation_alone(comm) -> None:
    """One that begins in the progress thread, and one of the program's thread that is queued behind it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        comm.all_gather(torch.empty(comm.size), torch.ones(1))
        assert work is not None
        work.wait()
    seen = Counter(event.name for event in profiled.events())
    assert seen["collectives::all_reduce"] == seen["collectives::all_gather"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_zero(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 99))
        zero.plainly(model, comm.rank, 0).backward()
        optimizer.step()
    seen = Counter(event.name for event in profiled.events())
    assert seen["ZeroOptimizer.forward"] == 2  # one of them failed
    assert seen["mpidl::bucket"] > 1
    assert seen["mpidl::finish_backward"] == seen["Optimizer.step#ZeroOptimizer.step"] == 1
    gathers = (way == "stage 3 gathered" and comm.size > 1) or (way == "stage 3" and comm.nodes > 1)
    assert (seen["mpidl::gather"] > 3) == gathers


def test_nothing_is_recorded_without_a_profiler(comm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    wrapped = mpidl.DistributedDataParallel(zero.made(zero.Several), process_group=comm)
    wrapped(zero.data(comm.rank)).square().sum().backward()
    model, _ = zero.engine(comm, zero.Several, "stage 3 gathered")
    zero.plainly(model, comm.rank, 0).backward()
    comm.barrier()
