"""Choice of the transport, what MPIDL_CUDA asks for, and false claims of libraries and GPUs, on a stand-in."""

from __future__ import annotations

import pytest
import torch

from collectives import ArgumentError, Communicator
from collectives.backends.cuda import barrier
from collectives.backends.cuda.transports import decide, requested
from tests.collectives.backends.cuda.standin import Gpu


def works(ipc: list[bool], aware: list[bool]) -> dict[str, list[bool]]:
    return {"ipc": ipc, "aware": aware, "staged": [True] * len(ipc)}


def test_each_pair_takes_the_first_way_that_works_from_both_sides() -> None:
    """Ranks 0 and 1 share a host, 2 is on another one; rank 1's library reaches rank 2, but not the other way round."""
    found = decide(
        ["auto"] * 3,
        [
            works([True, True, False], [True, True, True]),
            works([True, True, False], [True, True, True]),
            works([False, False, True], [True, False, True]),
        ],
    )
    assert found.pairs == (("ipc", "ipc", "aware"), ("ipc", "ipc", "staged"), ("aware", "staged", "ipc"))
    assert (found.common, found.island) == ("staged", 0)  # as the hosts have different numbers of ranks


@pytest.mark.parametrize(
    ("islands", "size"), [([0, 0, 1, 1], 2), ([0, 0, 0, 1, 1, 1], 3), ([0, 1, 0, 1], 0), ([0, 0, 0, 1], 0), ([0, 0], 0)]
)
def test_ipc_serves_islands_of_ranks_that_follow_each_other(islands: list[int], size: int) -> None:
    row = [True] * len(islands)
    rows = [works([other == mine for other in islands], row) for mine in islands]
    found = decide(["auto"] * len(islands), rows)
    assert (found.common, found.island) == ("aware" if len(set(islands)) > 1 else "ipc", size)
    assert decide(["aware"] * len(islands), rows).island == 0


@pytest.mark.parametrize("way", ["ipc", "aware"])
def test_a_way_that_serves_all_pairs_serves_all_ranks(way: str) -> None:
    all_, none = [True, True], [False, False]
    row = works(all_, none) if way == "ipc" else works(none, all_)
    assert decide(["auto"] * 2, [row, row]).common == way
    assert decide(["staged"] * 2, [row, row]).common == "staged"


def test_a_way_that_is_asked_for_and_does_not_work_is_an_error() -> None:
    rows = [works([True, False], [False, False]), works([False, True], [False, False])]
    with pytest.raises(ArgumentError, match=r"MPIDL_CUDA=ipc: .*between ranks 0 and 1"):
        decide(["ipc"] * 2, rows)
    with pytest.raises(ArgumentError, match=r"MPIDL_CUDA differs .*rank 0: ipc, rank 1: staged"):
        decide(["ipc", "staged"], rows)


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_CUDA", "fast")
    with pytest.raises(ArgumentError, match=r"MPIDL_CUDA: got 'fast'; .*ipc, aware, staged"):
        requested()


def taken(comm: Communicator, standin: Gpu) -> str:
    """The way of an all_reduce that comes out right."""
    x = standin.put(torch.full((1000,), float(comm.rank)))
    comm.all_reduce(x)
    assert (standin.get(x) == sum(range(comm.size))).all()
    transport: str = comm.stats()["gpu"]["transport"]
    return transport


@pytest.mark.one_node
@pytest.mark.mpi
def test_ranks_of_one_host_take_ipc(comm: Communicator, standin: Gpu) -> None:
    assert taken(comm, standin) == "ipc"


@pytest.mark.one_node
@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("aware", ["no", "yes"])
def test_between_islands_travels_what_each_has_reduced(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch, aware: str
) -> None:
    """In several chunks, on paused streams, several operations at a time, and the same bits on all ranks."""
    monkeypatch.setattr("collectives.backends.cuda.levels.CHUNK_BYTES", 4000)
    standin.seed, standin.aware, standin.island = 3, aware, comm.rank // 2
    assert taken(comm, standin) == ("aware" if aware == "yes" else "staged")
    for dtype in (torch.float32, torch.bfloat16):
        x = comm.empty(5003, dtype, device="cuda:0")  # of the island's symmetric memory
        given = [torch.randn(5003, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
        standin.fill(x, given[comm.rank])
        y = standin.put(given[comm.rank])
        gathered = standin.put(torch.zeros(4 * 5003, dtype=dtype))
        comm.all_gather(gathered, x)
        works = [comm.all_reduce(each, "avg", async_op=True) for each in (x, y)]
        for work in works:
            work.wait()
        expected = (sum(each.double() for each in given) / 4).to(dtype)
        torch.testing.assert_close(standin.get(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        bits = comm.mpi.allgather([standin.get(each).view(torch.uint8).numpy().tobytes() for each in (x, y)])
        assert len({each for pair in bits for each in pair}) == 1
        assert torch.equal(standin.get(gathered), torch.cat(given))


@pytest.mark.one_node
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("events", ["yes", "no", "lies", "of ranks on one GPU"])
def test_streams_wait_for_streams_only_where_that_was_seen(
    comm: Communicator, standin: Gpu, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "DELAYS", 4 * barrier.DELAYS)  # hosts that share cores take longer
    standin.seed = 5  # streams pause
    standin.own = events != "of ranks on one GPU"  # whose hosts wait
    standin.events = events if standin.own and comm.rank == comm.size - 1 else "yes"
    assert taken(comm, standin) == "ipc"
    assert comm.stats()["gpu"]["streams_wait"] == (events == "yes")
    for size in (1, 5000):
        x, y = standin.put(torch.full((size,), comm.rank + 1.0)), comm.empty(size, torch.float32, device="cuda:0")
        standin.fill(y, torch.full((size,), comm.rank + 1.0))
        for _ in range(3):
            comm.all_reduce(x, "avg")
            comm.all_reduce(y, "avg")
        assert (standin.get(x) == (comm.size + 1) / 2).all()
        assert (standin.get(y) == (comm.size + 1) / 2).all()


@pytest.mark.mpi
def test_memory_that_cannot_be_pinned_is_replaced(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDL_CUDA", "staged")
    standin.pins = "none that is shared"
    assert taken(comm, standin) == "staged"
    assert len(standin._pinned) == 1
    x = standin.put(torch.full((3_000_000,), float(comm.rank)))
    comm.all_reduce(x)
    assert (standin.get(x) == sum(range(comm.size))).all()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("aware", ["no", "yes", "lies"])
def test_where_a_rank_exports_nothing_the_library_is_tried(comm: Communicator, standin: Gpu, aware: str) -> None:
    """A library that says that it takes device memory and does not move it is not believed."""
    standin.aware = aware
    standin.exports = comm.rank > 0
    assert taken(comm, standin) == ("aware" if aware == "yes" else "staged")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_one_rank_whose_library_does_not_say_so_is_enough(comm: Communicator, standin: Gpu) -> None:
    standin.exports = False
    standin.aware = "yes" if comm.rank else "no"
    assert taken(comm, standin) == "staged"


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_what_is_asked_for_and_does_not_work_is_the_same_error_on_all_ranks(
    comm: Communicator, standin: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDL_CUDA", "aware")
    with pytest.raises(ArgumentError) as caught:
        comm.all_reduce(standin.put(torch.ones(3)))
    texts = comm.mpi.allgather(str(caught.value))
    assert set(texts) == {"MPIDL_CUDA=aware: does not work between ranks 0 and 0"}


@pytest.mark.mpi
def test_an_algorithm_that_is_named_is_the_host_s(comm: Communicator, standin: Gpu) -> None:
    for algorithm in comm.algorithms("all_reduce"):
        x = standin.put(torch.full((1000,), 3.0))
        comm.all_reduce(x, algorithm=algorithm)
        assert (standin.get(x) == 3 * comm.size).all(), algorithm
    for algorithm in comm.algorithms("all_to_all"):
        x, out = standin.put(torch.full((4 * comm.size,), float(comm.rank))), standin.put(torch.zeros(4 * comm.size))
        comm.all_to_all(out, x, algorithm=algorithm)
        assert torch.equal(standin.get(out), torch.arange(comm.size).repeat_interleave(4).float()), algorithm


@pytest.mark.mpi
def test_debugging_compares_gpu_operations_too(standin: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from collectives import MismatchError

    monkeypatch.setenv("MPIDL_DEBUG", "1")
    comm = Communicator()
    x = standin.put(torch.ones(4))
    comm.all_reduce(x)
    comm.all_gather(standin.put(torch.ones(4 * comm.size)), x)
    assert (standin.get(x) == comm.size).all()
    if comm.size > 1:
        with pytest.raises(MismatchError, match=r"all_reduce of 4 float32 .*sum by auto"):
            comm.all_reduce(x if comm.rank else torch.ones(4))
    comm.close()
