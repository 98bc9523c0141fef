"""DataLoader: which batches a rank gets, loading ahead, states, and workers that are no ranks."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import mpidl
from mpidl.data import DataLoader, DistributedSampler
from mpidl.data.workers import environment_without_rank
from mpidl.errors import ConfigurationError

WAYS = {"thread": {}, "none": {"prefetch_factor": 0}, "workers": {"num_workers": 1}}


class Numbers(Dataset):
    """Sample i is i. loaded: which samples were asked for in this process, by which threads. broken: raises `error`."""

    def __init__(self, samples: int, broken: int = -1, error: type[Exception] = KeyError) -> None:
        self.samples, self.broken, self.error = samples, broken, error
        self.loaded: list[int] = []
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise self.error(f"sample {index} is broken")
        self.loaded.append(index)
        self.threads.add(threading.get_ident())
        return index


class Whereabouts(Dataset):
    """A worker's view of MPI: sample, process, variables of a rank, whether MPI is initialised."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int, int, bool]:
        from mpi4py import MPI

        of_a_rank = ("PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD", "MPI_LOCAL", "HYDI_")
        variables = [name for name in os.environ if name.startswith(of_a_rank)]
        return index, os.getpid(), len(variables), MPI.Is_initialized()


class Draws(Dataset):
    """Random numbers of a worker's global generators: torch's, numpy's and python's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return int(torch.randint(1 << 30, ())), int(np.random.randint(1 << 30)), random.getrandbits(30)


class Noted(Draws):
    """Notes which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.read.append(index)
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def loader(dataset: Dataset, batch_size: int = 4, ranks: int = 1, rank: int = 0, **settings) -> DataLoader:
    sampler = DistributedSampler(
        dataset,
        num_replicas=ranks,
        rank=rank,
        **{name: settings.pop(name) for name in ("shuffle", "seed") if name in settings},
        drop_last=settings.get("drop_last", False),
    )
    return DataLoader(dataset, batch_size, sampler=sampler, **settings)


def batches(of: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in of]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def all_end(processes: set[int]) -> bool:
    """Waits until they end; returns False if they do not."""
    return in_a_while(lambda: not any(is_alive(process) for process in processes))


def in_a_while(reached: Callable[[], bool]) -> bool:
    """Waits up to ten seconds for a condition, and returns it."""
    until = time.monotonic() + 10
    while not reached() and time.monotonic() < until:
        time.sleep(0.02)
    return reached()


# ---- without workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_are_those_of_torch(ahead: int, drop_last: bool) -> None:
    for rank in range(3):
        own = loader(Numbers(50), 4, 3, rank, seed=2, prefetch_factor=ahead, drop_last=drop_last)
        sampler = torch.utils.data.DistributedSampler(range(50), num_replicas=3, rank=rank, seed=2, drop_last=drop_last)
        other = torch.utils.data.DataLoader(Numbers(50), 4, sampler=sampler, drop_last=drop_last)
        for epoch in (0, 1):
            own.set_epoch(epoch)
            sampler.set_epoch(epoch)
            assert len(own) == len(other)
            assert batches(own) == [batch.tolist() for batch in other]
        own.close()


def test_batches_are_loaded_before_they_are_asked_for() -> None:
    data = Numbers(40)
    fourth, beyond = threading.Event(), threading.Event()

    class Watched(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 11:
                fourth.set()
            if index >= 20:
                beyond.set()
            return data[index]

    passing = iter(loader(Watched(40), shuffle=False, prefetch_factor=3))
    assert next(passing).tolist() == [0, 1, 2, 3]
    assert fourth.wait(30)
    assert next(passing).tolist() == [4, 5, 6, 7]
    assert not beyond.is_set()  # three batches behind the second end with sample 19
    assert data.threads != {threading.get_ident()}


def test_nothing_is_loaded_ahead_without_prefetch() -> None:
    data = Numbers(40)
    passing = iter(loader(data, shuffle=False, prefetch_factor=0))
    next(passing)
    assert data.loaded == [0, 1, 2, 3]
    assert data.threads == {threading.get_ident()}


@pytest.mark.thorough("workers-KeyError")
@pytest.mark.parametrize("error", [KeyError, FileNotFoundError, ConnectionResetError, EOFError])
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_an_error_of_the_dataset_is_raised_in_its_place(settings: dict, error: type[Exception]) -> None:
    before = set(multiprocessing.active_children())
    own = loader(Numbers(20, 9, error), shuffle=False, **settings)
    passing = iter(own)
    assert next(passing).tolist() == [0, 1, 2, 3]
    assert next(passing).tolist() == [4, 5, 6, 7]
    with pytest.raises(error, match="sample 9 is broken"):
        next(passing)
    assert next(passing).tolist() == [12, 13, 14, 15]
    own.close()
    assert set(multiprocessing.active_children()) <= before  # at once, not when garbage is collected


def test_a_pass_that_was_left_loads_no_more() -> None:
    entered, released = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 4 and not released.is_set():
                entered.set()
                assert released.wait(30)
            return super().__getitem__(index)

    data = Slow(400)
    own = loader(data, shuffle=False, prefetch_factor=3)
    for batch in own:
        assert batch.tolist() == [0, 1, 2, 3]
        assert entered.wait(30)  # the second batch is under way, the third waits
        break
    released.set()
    assert next(iter(own)).tolist() == [0, 1, 2, 3]
    own.close()
    assert data.loaded[:12] == [*range(8), *range(4)]


def test_close_ends_the_thread_and_the_passes() -> None:
    before = set(threading.enumerate())
    own = loader(Numbers(40))
    passing = iter(own)
    next(passing)
    assert set(threading.enumerate()) != before
    own.close()
    assert set(threading.enumerate()) == before
    assert list(passing) == []
    assert len(batches(own)) == 10  # a later loop starts it anew
    own.close()
    own.close()


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_the_loader_draws_nothing_from_the_global_generators(settings: dict) -> None:
    def states() -> tuple[str, ...]:
        return str(torch.get_rng_state().tolist()), str(np.random.get_state()[1].tolist()), str(random.getstate())

    before = states()
    own = loader(Numbers(20), shuffle=True, **settings)
    for epoch in range(2):
        own.set_epoch(epoch)
        assert len(batches(own)) == 5
    own.load_state_dict(own.state_dict())
    own.close()
    assert states() == before


def test_the_order_is_drawn_before_the_caller_draws() -> None:
    """A sampler that uses the global random numbers gets the same ones as without a thread."""
    orders = []
    for ahead in (0, 2):
        torch.manual_seed(3)
        data = Numbers(20)
        own = DataLoader(data, 2, sampler=torch.utils.data.RandomSampler(data), prefetch_factor=ahead)
        passing = iter(own)
        first = next(passing).tolist()
        drawn = torch.rand(1).item()
        orders.append((first, drawn, [batch.tolist() for batch in passing]))
        own.close()
    assert orders[0] == orders[1]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("handed", [0, 1, 3])
def test_states_count_what_was_handed_out(ahead: int, before: int, after: int, handed: int) -> None:
    whole = batches(loader(Numbers(60), 60, seed=1, prefetch_factor=0))[0]
    first = [loader(Numbers(60), 4, before, rank, seed=1, prefetch_factor=ahead) for rank in range(before)]
    parts = []
    for own in first:
        passing = iter(own)
        parts.append([next(passing).tolist() for _ in range(handed)])
    states = [own.state_dict() for own in first]
    assert all(state == states[0] for state in states)
    assert states[0]["consumed"] == before * 4 * handed
    rest = []
    for rank in range(after):
        own = loader(Numbers(60), 5, after, rank, prefetch_factor=ahead)
        own.load_state_dict(states[0])
        own.set_epoch(0)
        rest.append(batches(own))
        assert own.state_dict()["consumed"] >= 60
        own.close()
    seen = [index for part in [*parts, *rest] for batch in part for index in batch]
    assert set(seen) == set(whole)
    assert len(seen) - 60 < after
    for own in first:
        own.close()


def test_an_epoch_that_drops_its_last_batch_is_finished_all_the_same() -> None:
    own = loader(Numbers(11), drop_last=True, prefetch_factor=0)
    assert [len(batch) for batch in batches(own)] == [4, 4]
    own.load_state_dict(own.state_dict())
    assert batches(own) == []
    own.set_epoch(1)
    assert own.state_dict()["consumed"] == 0
    assert len(batches(own)) == 2


def test_an_iterable_dataset_chooses_itself() -> None:
    own = DataLoader(Stream(), 4)
    assert batches(own) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    own.set_epoch(1)
    own.close()
    with pytest.raises(ConfigurationError, match=r"state_dict: .*needs a mpidl\.data\.DistributedSampler"):
        own.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": -1}, "num_workers: got -1; needs an integer of at least 0"),
        ({"prefetch_factor": -1}, "prefetch_factor: got -1; needs an integer of at least 0"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor: got 0; needs an integer of at least 1"),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, "got 'fork'; needs 'forkserver' or 'spawn'"),
        (
            {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context("fork")},
            "got 'fork'; needs 'forkserver' or 'spawn'",
        ),
        ({"multiprocessing_context": "spawn"}, "there are no workers; needs num_workers"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"shuffle": True}, "mutually exclusive with shuffle"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    data = Numbers(4)
    with pytest.raises(ConfigurationError, match=message):
        DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0), **settings)


# ---- with workers ------------------------------------------------------------------------------------------


def test_workers_start_without_a_place_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("MPI4PY_RC_INITIALIZE", "1")
    before = dict(os.environ)
    with environment_without_rank():
        assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
        assert os.environ["MPI4PY_RC_INITIALIZE"] == "0"
    assert dict(os.environ) == before


def test_workers_draw_other_numbers_on_each_rank_in_each_worker_epoch_and_pass_and_the_same_again() -> None:
    def drawn(rank: int, epoch: int, passes: int = 1, seed: int = 0) -> list[tuple[int, ...]]:
        own = loader(Draws(), 2, 2, rank, seed=seed, num_workers=2)  # batches of worker 0 and 1
        own.set_epoch(epoch)
        for _ in range(passes):
            found = [tuple(torch.stack(batch).flatten().tolist()) for batch in own]
        own.close()
        return found

    found = [*drawn(0, 0), *drawn(1, 0), *drawn(0, 1), *drawn(0, 0, 2), *drawn(0, 0, seed=1)]
    numbers = [number for batch in found for number in batch]
    assert len(set(numbers)) == len(numbers)
    torch.manual_seed(1)  # what else was drawn does not count
    assert drawn(1, 0) == found[2:4]


def test_a_generator_of_the_user_gives_the_seeds_of_workers() -> None:
    given = torch.Generator().manual_seed(1)
    before = given.get_state()
    own = loader(Draws(), 2, num_workers=1, generator=given)
    iter(own)
    own.close()
    assert not torch.equal(given.get_state(), before)


@pytest.mark.mpi
def test_the_loader_makes_the_sampler_of_its_rank(comm) -> None:
    own = DataLoader(Numbers(24), 2, shuffle=True, process_group=comm, seed=4)
    expected = list(DistributedSampler(range(24), comm, seed=4))
    assert [index for batch in batches(own) for index in batch] == expected
    own.close()
    plain = DataLoader(Numbers(24), 2, process_group=comm)
    assert [index for batch in batches(plain) for index in batch] == list(range(24))[comm.rank :: comm.size]
    plain.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_workers_load_and_are_no_ranks(comm) -> None:
    own = DataLoader(
        Whereabouts(), 2, True, process_group=comm, num_workers=2, persistent_workers=True, prefetch_factor=2
    )
    expected = list(DistributedSampler(range(24), comm))
    passing = iter(own)
    first, processes, variables, initialised = next(passing)
    comm.barrier()  # the ranks' own MPI works while the workers run
    assert first.tolist() == expected[:2]
    assert not variables.any()
    assert not initialised.any()
    assert own.state_dict()["consumed"] == 2 * comm.size
    again = list(own)  # the first pass is left behind
    assert [index for batch in again for index in batch[0].tolist()] == expected
    workers = {process for batch in [(first, processes), *again] for process in batch[1].tolist()}
    assert len(workers) == 2
    assert os.getpid() not in workers
    own.load_state_dict({**own.state_dict(), "consumed": 4 * comm.size})
    assert [index for batch in own for index in batch[0].tolist()] == expected[4:]
    del passing
    own.close()
    assert all_end(workers)


JOB = """
import os, sys
from multiprocessing import resource_tracker
import torch, mpidl
from mpidl.data import DataLoader

class Deadly(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 31 and "worker" in sys.argv:
            os.kill(os.getpid(), 9)
        return os.getpid()

named = []

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # in one piece

def register(name, kind):
    named.append(f"/dev/shm/sem.{name[1:]}")
    registered(name, kind)

if __name__ == "__main__":
    registered, resource_tracker.register = resource_tracker.register, register
    comm = mpidl.init()
    for batch in DataLoader(Deadly(), 4, num_workers=1):
        if comm.rank == 1:
            say("workers", *set(batch.tolist()))
        say("semaphores", *named)
        comm.barrier()
        if comm.rank == 0 and "rank" in sys.argv:
            os.kill(os.getpid(), 9)
"""


def said(output: str, word: str) -> set[str]:
    """Values behind the word in all lines that begin with it."""
    return {found for line in output.splitlines() if line.startswith(word) for found in line.split()[1:]}


def test_a_worker_that_dies_ends_the_job(mpirun, tmp_path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = mpirun(2, script, "worker")
    assert done.returncode != 0
    assert "mpidl: rank 1 of 2 ends the job" in done.stderr
    assert "TrainingError: DataLoader: a worker died" in done.stderr
    others = {int(process) for process in said(done.stdout, "workers")}
    assert others
    assert all_end(others)


@pytest.mark.thorough
def test_a_killed_rank_leaves_neither_workers_nor_their_semaphores(mpirun, tmp_path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = mpirun(2, script, "rank")
    assert done.returncode != 0
    others = {int(process) for process in said(done.stdout, "workers")}
    assert others
    assert all_end(others)
    semaphores = said(done.stdout, "semaphores")
    assert len(semaphores) >= 4
    assert in_a_while(lambda: not any(map(os.path.exists, semaphores)))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_ranks_of_tp_load_in_step_with_the_program(comm) -> None:
    """A thread would draw between what the model draws, on each rank elsewhere."""
    with mpidl.Mesh(tp=2, comm=comm) as mesh, mpidl.Mesh(dp=2, comm=comm) as replicas:
        torch.manual_seed(3)
        seen = []
        for batch in DataLoader(Draws(), 2, mesh=mesh):
            time.sleep(0.01 * comm.rank)  # as ranks are, at different places at a time
            seen += [batch[0].tolist(), float(torch.rand(1))]
        everyone = mpidl.all_gather_object(comm, seen)
        assert everyone[0] == everyone[1]
        cases = [(0, {"mesh": mesh}), (2, {"mesh": replicas}), (3, {"mesh": mesh, "prefetch_factor": 3})]
        for ahead, settings in cases:
            dataset = Noted()
            loader = DataLoader(dataset, **settings)
            batches = iter(loader)  # else the pass would end with it
            next(batches)
            assert in_a_while(lambda dataset=dataset, ahead=ahead: len(dataset.read) == 1 + ahead)
            loader.close()
            assert len(dataset.read) == 1 + ahead
