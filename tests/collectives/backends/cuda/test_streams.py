"""Operations on GPU memory keep to the caller's stream, and hold their arrays as long as they must; on the stand-in."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import ArgumentError, Communicator, Work, even_counts
from collectives.backends.cuda import staged
from collectives.backends.cuda.backend import GpuBackend
from collectives.backends.cuda.copies import GpuCopies
from tests.collectives.backends.cuda.standin import Gpu, Stream

pytestmark = pytest.mark.mpi


def blocked(gpu: Gpu) -> tuple[Stream, threading.Event]:
    """A stream on which nothing that is queued runs before the event is set."""
    stream, gate = gpu.stream(), threading.Event()
    stream.queue(gate.wait)
    return stream, gate


def test_an_operation_comes_after_what_its_caller_s_stream_holds(comm: Communicator, standin: Gpu) -> None:
    stream, gate = blocked(standin)
    with standin.using(stream):
        x = standin.put(torch.full((1000,), float(comm.rank + 1)))  # not there yet
        work = comm.all_reduce(x, async_op=True)
        assert isinstance(work, Work)
        assert not work.is_completed()
        gate.set()
        work.wait()
        assert (standin.get(x) == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.one_node
def test_no_host_waits_for_a_gpu(comm: Communicator, standin: Gpu) -> None:
    """By ipc, operations return while what they come after has not begun, also on arrays from elsewhere."""
    standin.own = True
    placed = comm.empty(1000, torch.float32, device="cuda:0")
    standin.fill(placed, torch.ones(1000))
    comm.all_reduce(placed)
    comm.all_reduce(standin.put(torch.ones(1000)))  # whatever is to be set up
    stream, gate = blocked(standin)
    with standin.using(stream):
        x, whole = standin.put(torch.ones(300_000)), standin.put(torch.zeros(1000 * comm.size))
        for _ in range(3):
            comm.all_reduce(x)
            comm.all_reduce(placed)
        comm.all_gather(whole, placed, [1000] * comm.size)
        assert not stream.record().is_done()
        gate.set()
        assert (standin.get(x) == comm.size**3).all()
        assert (standin.get(whole) == comm.size**4).all()


def test_what_is_queued_after_an_operation_sees_its_result(comm: Communicator, gpu: Gpu) -> None:
    """The result is read on the caller's stream without any waiting by the host in between."""
    for _ in range(20):
        with gpu.using(gpu.stream()):
            x, y = gpu.put(torch.ones(300_000)), gpu.put(torch.zeros(300_000))
            comm.all_reduce(x)
            gpu.assign(y, x)
            assert (gpu.get(y) == comm.size).all()


def test_wait_orders_the_stream_that_is_current_then(comm: Communicator, gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    with gpu.using(first):
        x = gpu.put(torch.full((100_000,), 2.0))
        work = comm.all_reduce(x, async_op=True)
    assert work is not None
    with gpu.using(second):
        work.wait()
        assert (gpu.get(x) == 2 * comm.size).all()


def test_an_array_is_held_until_its_operation_has_ended(comm: Communicator, standin: Gpu) -> None:
    """The stand-in tells of memory that is freed while a stream may use it."""
    stream, gate = blocked(standin)
    for _ in range(10):
        with standin.using(stream):
            x = standin.put(torch.ones(50_000))
            comm.all_reduce(x, async_op=True)
        del x  # no reference is left, and nothing of it has begun
    gc.collect()
    gate.set()
    y = standin.put(torch.ones(3))
    comm.all_reduce(y)
    assert (standin.get(y) == comm.size).all()


def test_an_array_is_given_back_after_its_operation(comm: Communicator, standin: Gpu) -> None:
    before = len(standin._maps)
    for _ in range(5):
        x = standin.put(torch.ones(1000))
        work = comm.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
    del x, work
    comm.all_reduce(standin.put(torch.ones(1)))
    comm.all_reduce(standin.put(torch.ones(1)))
    standin.synchronize()
    gc.collect()
    standin.synchronize()
    assert len(standin._maps) <= before + 4  # what the communicator keeps for itself


def test_operations_run_in_the_order_of_issue_whatever_their_streams(comm: Communicator, gpu: Gpu) -> None:
    x = gpu.put(torch.ones(1000))
    gpu.synchronize()
    for _ in range(5):
        with gpu.using(gpu.stream()):
            work = comm.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
    comm.all_reduce(x)
    assert (gpu.get(x) == float(comm.size) ** 6).all()


def test_a_graph_that_is_captured_is_refused(comm: Communicator, standin: Gpu) -> None:
    stream = standin.stream()
    x = standin.put(torch.ones(5))
    stream.capturing = True
    with standin.using(stream), pytest.raises(ArgumentError, match="while a CUDA graph is captured"):
        comm.all_reduce(x)
    comm.all_reduce(x)
    assert (standin.get(x) == comm.size).all()


def test_copies_to_the_host_and_back_are_no_more_than_needed(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged: each element goes to the host once and comes back once; a root's input does not come back."""
    monkeypatch.setenv("MPIDL_CUDA", "staged")
    x = standin.put(torch.ones(1000))
    comm.all_reduce(x)
    standin.copies.clear()
    comm.all_reduce(x)
    assert sorted(standin.copies) == ["to device", "to host"]
    standin.copies.clear()
    comm.broadcast(x)
    assert standin.copies == ["to host" if comm.rank == 0 else "to device"]
    out = standin.put(torch.zeros(1000 * comm.size))
    own = out[1000 * comm.rank : 1000 * (comm.rank + 1)]
    standin.copies.clear()
    comm.all_gather(out, own)
    assert standin.copies == ["to host"] + ["to device"] * (comm.size - 1)


def test_a_staged_operation_that_fails_uses_its_arrays_no_more(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk is copied to the host while the host's operation on the first one fails."""
    monkeypatch.setenv("MPIDL_CUDA", "staged")
    monkeypatch.setattr(staged, "SLOT_BYTES", 4096)

    def fail(*_: Any) -> None:
        raise RuntimeError("the host's operation has failed")

    monkeypatch.setattr(staged.Staged, "_call", fail)
    x = standin.put(torch.ones(5000))
    with pytest.raises(RuntimeError, match="the host's operation has failed"):
        comm.all_reduce(x)
    standin.fill(x, torch.full((5000,), 2.0))  # on a stream that waits for nothing
    assert (standin.get(x) == 2).all()


def test_what_is_copied_stays_until_its_copy_is_done(standin: Gpu) -> None:
    """Also where nothing refers any more to the tensors, nor to the copies."""
    copies, x = GpuCopies(standin), standin.put(torch.ones(1000), "tensor")
    copies.start(copies.room(1000, torch.float32), x)
    del copies, x
    gc.collect()
    standin.synchronize()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("aware", ["no", "all", "one"])
def test_messages_go_from_and_to_gpu_memory(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch, aware: str
) -> None:
    """Round the ring, both ways, in the order of streams; also from a GPU to a host.

    aware: who hands device addresses to the MPI library; who does not goes through host memory.
    """
    if aware != "no":
        standin.aware = "yes"
        monkeypatch.setenv("MPIDL_CUDA", "aware")
        comm.all_reduce(standin.put(torch.ones(1)))
        if aware == "one" and comm.rank:
            monkeypatch.setattr(GpuBackend, "takes_device_addresses", lambda self, other: False)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, size in enumerate((0, 1, 1000, 300_000)):
        standin.copies.clear()
        stream, gate = blocked(standin)
        with standin.using(stream):
            x = standin.put(torch.full((size,), float(comm.rank)))
            y = standin.put(torch.zeros(size))
        gate.set()
        with standin.using(stream):
            taken = comm.recv(y, before, tag=tag, async_op=True)
            given = comm.send(x, after, tag=tag, async_op=True)
            assert taken is not None
            assert given is not None
            taken.wait()
            given.wait()
            assert (standin.get(y) == before).all()
    straight = aware == "all" or (aware == "one" and comm.rank == 0)
    assert bool(standin.copies) != straight, "the last one is too long to travel with its header"
    if comm.rank == 0:
        comm.send(standin.put(torch.arange(5.0)), 1)
    elif comm.rank == 1:
        z = torch.zeros(5)
        comm.recv(z, 0)
        assert torch.equal(z, torch.arange(5.0))


@pytest.mark.parametrize("way", ["staged", pytest.param("ipc", marks=pytest.mark.one_node), "aware"])
def test_two_hundred_operations_in_flight_on_random_streams(
    comm: Communicator, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Streams pause where they like, arrays are dropped while they are in use, and every result comes out right."""
    monkeypatch.setenv("MPIDL_CUDA", way)
    if isinstance(gpu, Gpu):
        gpu.aware, gpu.seed = "yes", comm.rank
    elif way == "aware" and gpu.aware == "no":
        pytest.skip("the MPI library does not take device memory")
    choose, streams = random.Random(7), [gpu.stream() for _ in range(4)]
    checks: list[Callable[[], None]] = []

    def check(stream: Stream, work: Work | None, x: Any, expected: torch.Tensor, what: str) -> Callable[[], None]:
        def run() -> None:
            with gpu.using(stream):
                if work is not None:
                    work.wait()
                assert torch.equal(gpu.get(x), expected), what

        return run

    ranks, rank = comm.size, comm.rank
    for number in range(200):
        stream, size = choose.choice(streams), choose.randrange(1, 3000)
        kind, async_op = (
            choose.choice(["sum", "max", "broadcast", "gather", "scatter", "dropped"]),
            choose.random() < 0.8,
        )
        waits_elsewhere = choose.choice(streams)
        with gpu.using(stream):
            x = gpu.put(torch.full((size,), float(rank + number)))
            if kind in ("sum", "max"):
                total = ranks * number + sum(range(ranks)) if kind == "sum" else number + ranks - 1
                work, expected, seen = comm.all_reduce(x, kind, async_op=async_op), torch.full((size,), float(total)), x
            elif kind == "broadcast":
                root = choose.randrange(ranks)
                work = comm.broadcast(x, root, async_op=async_op)
                expected, seen = torch.full((size,), float(root + number)), x
            elif kind == "gather":
                seen = gpu.put(torch.zeros(size * ranks))
                work = comm.all_gather(seen, x, [size] * ranks, async_op=async_op)
                expected = (torch.arange(ranks) + float(number)).repeat_interleave(size)
            elif kind == "scatter":
                parts = even_counts(size, ranks)
                seen = gpu.put(torch.zeros(parts[rank]))
                work = comm.reduce_scatter(seen, x, async_op=async_op)
                expected = torch.full((parts[rank],), float(ranks * number + sum(range(ranks))))
            else:
                comm.all_reduce(x, async_op=True)
                continue
            checks.append(check(waits_elsewhere if work else stream, work, seen, expected, f"{number} {kind}"))
        if choose.random() < 0.2:
            checks.pop(choose.randrange(len(checks)))()
    for run in checks:
        run()
