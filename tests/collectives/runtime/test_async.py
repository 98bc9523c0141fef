"""Asynchronous operations: order, completion, failures, many in flight."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, OperationError, Work, WorkTimeout
from collectives.process import idle_wait
from collectives.runtime import background_errors
from collectives.runtime.positions import NO_WORDS
from collectives.runtime.progress import Progress
from tests.collectives.reference import named


@pytest.mark.mpi
def test_async_returns_a_work_that_completes(comm: Communicator) -> None:
    x = np.ones(5)
    work = comm.all_reduce(x, async_op=True)
    assert isinstance(work, Work)
    work.wait()
    assert work.is_completed()
    assert (x == comm.size).all()
    work.wait()  # again: at once


@pytest.mark.mpi
def test_over_nodes_a_call_in_the_background_sleeps_and_matches_those_of_programs(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has its in a thread that may sleep, the others in that of the program; none calls the blocking one."""
    naps: list[float] = []
    monkeypatch.setattr(idle_wait, "time", SimpleNamespace(sleep=naps.append))

    class Nonblocking:
        Allreduce = None
        Iallreduce = staticmethod(comm.mpi.Iallreduce)

    x = np.ones(5)
    mine: Any = Nonblocking()
    call = idle_wait.collective(mine, "Allreduce", x.copy(), x, over_nodes=True)

    def in_background() -> None:
        idle_wait.enter_background(lambda: False, may_sleep=True)
        call()

    if comm.rank == 0 and comm.size > 1:
        thread = threading.Thread(target=in_background)
        thread.start()
        while not naps:  # the others come once it has slept
            threading.Event().wait(0.001)
        comm.barrier()
        thread.join()
    else:
        comm.barrier()
        call()
    assert (x == comm.size).all()


@pytest.mark.mpi
@pytest.mark.one_node
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen on this system")
def test_the_thread_stays_on_the_core_that_issues_where_each_rank_has_one(comm: Communicator) -> None:
    """Where they have fewer it may go wherever one is free."""
    mine = os.sched_getaffinity(0)
    x, before = np.ones(5), threading.enumerate()

    def cores_of_the_thread() -> set[int]:
        work = comm.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        [thread] = [t for t in threading.enumerate() if t.name == "mpidl-progress" and t not in before]
        assert thread.native_id is not None
        return os.sched_getaffinity(thread.native_id)

    spare = len(set().union(*comm.mpi.allgather(mine))) - comm.size
    full = spare == 0
    try:
        for core in sorted(mine):
            if full:
                os.sched_setaffinity(0, {core})
            assert cores_of_the_thread() == ({core} if full else mine)
            assert os.sched_getaffinity(0) == ({core} if full else mine), "the program's own thread was moved"
    finally:
        os.sched_setaffinity(0, mine)


def test_a_system_that_lets_no_thread_choose_its_core_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from collectives.process import cores

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    cores.pin_thread(min(cores.usable()))
    monkeypatch.delattr(os, "sched_setaffinity")
    cores.pin_thread(0)
    assert cores.current() in {-1, *range(os.cpu_count() or 1)}
    monkeypatch.setattr(cores, "_current", None)
    assert cores.current() == -1


@pytest.mark.mpi
def test_every_operation_can_be_asynchronous(comm: Communicator) -> None:
    rank, ranks = comm.rank, comm.size
    x, parts, own = np.full(ranks, rank + 1.0), np.zeros(ranks), np.zeros(1)
    root = parts if rank == 0 else None
    works = [
        comm.all_reduce(x, "max", async_op=True),
        comm.reduce_scatter(own, x, async_op=True),
        comm.all_gather(parts, own, async_op=True),
        comm.broadcast(x, ranks - 1, async_op=True),
        comm.all_to_all(np.zeros(ranks), x, async_op=True),
        comm.gather(root, own, async_op=True),
        comm.scatter(own, root, async_op=True),
        comm.reduce(x, 0, async_op=True),
        comm.barrier(async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait(60)
    assert (own == ranks * ranks).all()
    assert (x == (ranks * ranks if rank == 0 else ranks)).all()


@pytest.mark.mpi
def test_order_of_issue_is_order_of_execution(comm: Communicator) -> None:
    """Each operation uses what the one before left in the same array."""
    x = np.ones(1000)
    for _ in range(5):
        comm.all_reduce(x, async_op=True)
    comm.all_reduce(x)  # synchronous: waits its turn
    assert (x == float(comm.size) ** 6).all()


@pytest.mark.mpi
def test_wait_gives_up_after_its_timeout(comm: Communicator) -> None:
    x = np.ones(3)
    if comm.rank == 0 and comm.size > 1:
        work = comm.all_reduce(x, async_op=True)
        assert work is not None
        with pytest.raises(WorkTimeout, match="all_reduce"):
            work.wait(0.05)
        assert not work.is_completed()
        comm.send(np.ones(1), 1)
        work.wait()
    else:
        if comm.rank == 1:
            comm.recv(np.ones(1), 0)
        comm.all_reduce(x)
    assert (x == comm.size).all()


@pytest.mark.mpi
def test_two_hundred_random_operations_in_flight(comm: Communicator) -> None:
    random = np.random.default_rng(3)  # the same on every rank
    expected, arrays, works = [], [], []
    for number in range(200):
        size = int(random.integers(0, 3000))
        x = np.full(size, float(comm.rank + number))
        sums = comm.size * (comm.size - 1) / 2 + comm.size * number
        kind = random.choice(["ring", "tree", "mpi", "auto", "shared memory", "broadcast", "gather"])
        if kind == "broadcast":
            root = int(random.integers(comm.size))
            works.append(comm.broadcast(x, root, async_op=True))
            expected.append(np.full(size, float(root + number)))
        elif kind == "gather":
            out = np.zeros(size * comm.size)
            works.append(comm.all_gather(out, x, async_op=True))
            expected.append(np.repeat(np.arange(comm.size) + float(number), size))
            x = out
        else:
            sync = bool(random.random() < 0.1)
            works.append(comm.all_reduce(x, algorithm=named(comm, "all_reduce", kind), async_op=not sync))
            expected.append(np.full(size, sums))
        arrays.append(x)
    for work in reversed(works):
        if work is not None:
            work.wait()
    for found, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.mpi
def test_a_failure_in_the_background_reaches_the_waiter(comm: Communicator) -> None:
    def fail() -> None:
        raise ValueError("deliberate")

    progress, went_on = Progress(), threading.Event()
    work = progress.submit("a task", fail)
    with pytest.raises(OperationError, match=r"a task failed: deliberate"):
        work.wait()
    progress.submit("another task", went_on.set).wait()
    assert went_on.is_set()
    progress.close()


@pytest.mark.mpi
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_after_a_failure_on_the_way_the_communicator_refuses_to_go_on(
    comm: Communicator, error: type[BaseException], prepared: bool
) -> None:
    """The others may be anywhere in the operation: nothing can be trusted after that."""
    group = comm.split(0)
    assert group is not None

    def fail() -> None:
        raise error("deliberate")

    x = np.ones(2)
    lives = weakref.ref(x)
    issue = partial(group._issuer.issue, "all_reduce", fail, NO_WORDS, False)
    if prepared:
        issue = group._issuer.prepare("all_reduce", fail, NO_WORDS).at_once
    with pytest.raises(error):
        issue(x)
    del issue
    del x
    gc.collect()
    assert lives() is not None, "another rank may still write to it"
    with pytest.raises(OperationError, match=r"cannot be used .*all_reduce \(operation 1 .*deliberate"):
        group.all_reduce(np.ones(2))
    group.close()


@pytest.mark.mpi
def test_threads_may_call_at_the_same_time_on_groups_of_their_own(comm: Communicator) -> None:
    groups = [comm.split(0, comm.rank) for _ in range(3)]
    results = [np.full(2000, float(comm.rank)) for _ in groups]

    def work(number: int) -> None:
        for _ in range(10):
            group = groups[number]
            assert group is not None
            group.all_reduce(results[number], "max")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((x == comm.size - 1).all() for x in results)
    for group in groups:
        assert group is not None
        group.close()


@pytest.mark.mpi
@pytest.mark.limit(60)
def test_an_operation_for_which_there_is_no_thread_was_not_issued(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0 alone, which then makes it without a thread. The ranks compare the numbers of what they issue."""
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    group = Communicator()
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "mpidl-progress":
            raise RuntimeError("can't start new thread")
        start(thread)

    x = np.ones(4)
    if comm.rank == 0:
        monkeypatch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            group.all_reduce(x, async_op=True)
        monkeypatch.undo()
        group.all_reduce(x)
    else:
        work = group.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
    assert (x == comm.size).all()
    work = group.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    assert (x == comm.size**2).all()
    group.close()


EXIT = """
import numpy as np
from collectives import Communicator
comm = Communicator()
x = np.ones(3_000_000)
for _ in range(10):
    comm.all_reduce(x, "max", async_op=True)
if comm.rank == 0:
    comm.send(x, 1, async_op=True)
else:
    comm.recv(x, 0)
"""


def test_what_is_queued_at_the_end_of_the_program_is_carried_out(mpirun: Callable, tmp_path: Path) -> None:
    """Rank 1 takes rank 0's part in all of it; nothing hangs, nothing is left out."""
    path = tmp_path / "program.py"
    path.write_text(EXIT)
    done = mpirun(2, path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


NOT_WAITED_FOR = """
import numpy as np
from collectives import Communicator, MismatchError, OperationError
comm = Communicator()
def compound():
    if comm.rank == 1:
        raise ValueError("deliberate")
def mismatch():
    comm.all_reduce(np.ones(4 + comm.rank), async_op=True)
def failure():
    comm.compound("step", compound, async_op=True)
def message():
    if comm.rank == 0:
        comm.send(np.ones(5), 1, async_op=True)
    else:
        received = comm.recv(np.ones(4), 0, async_op=True)
        while not received.is_completed():
            pass
"""
FAILURES = {
    "mismatch": "the ranks are in different operations: rank 0: operation 1, all_reduce sum of 4 float64",
    "failure": "step (operation 1 of this communicator, rank 1 of 2) failed: deliberate",
    "message": "x has 4 elements of float64, and a message of 5 of float64 came",
}


@pytest.mark.thorough("end-failure", "end-message", "close-failure", "close-mismatch", "close-message")
@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("end", ["", "comm.close()"], ids=["end", "close"])
def test_a_failure_that_nothing_waits_for_fails_the_job(mpirun: Callable, tmp_path: Path, what: str, end: str) -> None:
    """At the end of the program, or by an exception of `close`."""
    path = tmp_path / "program.py"
    path.write_text(f"{NOT_WAITED_FOR}\n{what}()\n{end}")
    done = mpirun(2, path, timeout=60, MPIDL_DEBUG="1")
    assert done.returncode == 1, done.stderr
    assert FAILURES[what] in done.stderr
    assert ("Traceback" if end else "rank 1 of 2 ends the job: ") in done.stderr


AFTER_MISMATCH = """
from collectives.draining import register_drain_hook
for group in (comm, other := comm.duplicate()):
    register_drain_hook(group, lambda group=group: print(group.barrier(), "is drained"))
try:
    comm.all_reduce(np.ones(4 + comm.rank), async_op=True).wait()
except MismatchError:
    pass
"""


def test_a_drain_hook_of_a_group_with_a_mismatch_stops_nothing_at_the_end(mpirun: Callable, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"{NOT_WAITED_FOR}\n{AFTER_MISMATCH}")
    done = mpirun(2, path, timeout=60, MPIDL_DEBUG="1")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout.count("is drained") == 2


@pytest.mark.mpi
def test_close_tells_of_one_failure_and_leaves_none_for_the_end(comm: Communicator) -> None:
    group = comm.duplicate()
    inner = group.duplicate()

    def fail(words: str) -> None:
        raise ValueError(words)

    works = [made.compound("step", partial(fail, words), async_op=True) for made, words in ((group, "a"), (inner, "b"))]
    for work in works:
        while not work.is_completed():
            pass
    with pytest.raises(OperationError, match=r"step .* failed: [ab]$"):
        group.close()
    assert not background_errors.find()


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["waited for", "refused", "closed", "closed in an exception"])
def test_a_failure_is_told_until_the_program_has_been_told(comm: Communicator, how: str) -> None:
    group = comm.duplicate()

    def fail() -> None:
        raise ValueError("deliberate")

    work = group.compound("step", fail, async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    if how == "waited for":
        with pytest.raises(OperationError, match="deliberate"):
            work.wait()
    elif how == "refused":
        with pytest.raises(OperationError, match="deliberate"):
            group.barrier()
    elif how == "closed in an exception":
        with contextlib.suppress(KeyError):
            try:
                raise KeyError
            finally:
                group.close()
        assert background_errors.find() == [work]
        background_errors.clear(work.source)
    else:
        with pytest.raises(OperationError, match=r"step .* failed: deliberate"):
            group.close()
    assert not background_errors.find()
    group.close()


@pytest.mark.mpi
@pytest.mark.parametrize("in_background", [False, True])
def test_a_compound_may_have_compounds_as_parts(comm: Communicator, in_background: bool) -> None:
    x = np.ones(4)

    def inner() -> None:
        comm.all_reduce(x)

    def outer() -> None:
        comm.compound("inner", inner)
        comm.all_reduce(x)

    work = comm.compound("outer", outer, async_op=in_background)
    if work is not None:
        work.wait(60)
    assert x.tolist() == [comm.size**2] * 4
