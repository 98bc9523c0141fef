"""A rank that does not come is named, with what it is in, and the job ends."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import ArgumentError, Communicator
from collectives.base.buffers import inspect
from collectives.group.details import of_arrays, of_list
from collectives.process import cores
from collectives.runtime import watchdog
from collectives.runtime.positions import ANY, END, Position, Positions, words
from collectives.runtime.watchdog import TAGS, Guard, limit_of, report

HEAD = """
import os, signal, sys, time
import numpy as np
from collectives import Communicator
comm = Communicator()
rank, x = comm.rank, np.ones(1000)
comm.barrier()
"""
LONG = 100  # seconds that a late rank sleeps; every job here ends far sooner


@pytest.fixture
def job(mpirun: Callable, tmp_path: Path) -> Callable[..., tuple[int, str, float]]:
    """`job(body, ranks)` runs a program: its exit status, its output and its seconds."""

    def run(body: str, ranks: int = 3, **env: str) -> tuple[int, str, float]:
        path = tmp_path / "program.py"
        path.write_text(HEAD + textwrap.dedent(body))
        start = time.monotonic()
        done = mpirun(ranks, path, **env)
        return done.returncode, done.stdout + done.stderr, time.monotonic() - start

    return run


@pytest.mark.thorough("comm.all_reduce(x)")
@pytest.mark.parametrize("call", ["comm.all_reduce(x)", "comm.all_reduce(x, async_op=True).wait()"])
def test_a_late_rank_is_named_with_the_operation_and_where_it_is(job: Callable, call: str) -> None:
    status, text, seconds = job(f"if rank == 1:\n    time.sleep({LONG})  # so late\n{call}", MPIDL_TIMEOUT="1.5")
    assert status != 0
    assert seconds < LONG / 2
    assert text.count("has waited") == 1, text
    assert "rank 0 of 3 has waited" in text
    assert "in all_reduce (operation 2 of this communicator)" in text
    assert "arrived: ranks 0, 2\n" in text
    assert "not arrived: rank 1, which is after barrier (operation 1)\n" in text
    assert "rank 1 is late for all_reduce (operation 2); it is at" in text
    assert "# so late" in text


def test_ranks_in_different_operations_are_told_apart(job: Callable) -> None:
    status, text, _ = job(
        """
        if rank == 1:
            comm.all_reduce(x, algorithm="mpi")
        else:
            comm.reduce_scatter(np.ones(1), np.ones(comm.size), algorithm="mpi")
        """,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    assert text.count("has waited") == 1, text
    assert "arrived: ranks 0, 1, 2\n" in text
    assert (
        "the ranks are in different operations: reduce_scatter sum of 3 float64 by mpi on ranks 0, 2, all_reduce sum "
        "of 1000 float64 by mpi on rank 1; MPIDL_DEBUG=1" in text
    )
    assert "one of them hangs" not in text


@pytest.mark.thorough
def test_ranks_in_operations_of_one_kind_that_do_not_fit_are_told_apart(job: Callable) -> None:
    status, text, _ = job(
        """
        if rank:
            comm.all_reduce(np.ones(15_912, np.float32), "avg", algorithm="symmetric")
        else:
            comm.all_reduce(np.ones(2, np.int64), "max", algorithm="mpi")
        """,
        2,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    assert (
        "different operations: all_reduce max of 2 int64 by mpi on rank 0, all_reduce avg of 15912 float32 by "
        "symmetric on rank 1;" in text
    ), text


@pytest.mark.thorough
def test_sizes_on_two_sides_of_a_limit_of_auto_are_told_apart(job: Callable) -> None:
    status, text, _ = job("comm.reduce(np.ones(16_384 + rank, np.float32))", 2, MPIDL_TIMEOUT="1.5")
    assert status != 0
    assert (
        "different operations: reduce sum of 16384 float32 root 0 by mpi on rank 0, reduce sum of 16385 float32 root 0 "
        "by symmetric on rank 1;" in text
    ), text


@pytest.mark.parametrize(
    ("counts", "words"), [([2, 2, 1], ""), ([4, 0, 1], " in parts of 4, 0, 1"), ([100_001, 0, 100_000], " in parts #")]
)
def test_words_have_counts_that_are_not_the_default(counts: list[int], words: str) -> None:
    x = inspect(np.ones(sum(counts)), "x", writable=False)
    found = of_arrays("ring", [x, counts]).decode().rstrip("\0")
    assert re.fullmatch(rf"of {sum(counts)} float64 by ring{words}[0-9a-f]*", found)
    assert found != of_arrays("ring", [x, counts[::-1]]).decode().rstrip("\0") or counts == counts[::-1]


@pytest.mark.thorough
def test_reductions_of_parts_are_told_apart(job: Callable) -> None:
    """As those of DDP where the ranks fill the cores."""
    status, text, _ = job(
        """
        parts = [comm.empty(100, np.float32) for _ in range(3)]
        mean = comm.partitioned_all_reduce(parts, "avg")
        if rank == 0:
            for part in parts[:2]:
                mean.hand_in(part)
            mean.wait()
        comm.all_reduce(np.ones(3), algorithm="mpi")
        """,
        2,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    if len(cores.usable()) > 2:
        return  # each part is an operation of its own
    assert "all_reduce avg of 2 parts of 200 float32 on rank 0, all_reduce sum of 3 float64 by mpi on rank 1;" in text


def test_a_rank_that_has_left_an_operation_by_an_exception_is_told_at_its_end(job: Callable) -> None:
    """Long before the limit, and not as one that has come like the others."""
    status, text, seconds = job(
        """
        def task():
            if rank == 1:
                raise ValueError("the reason")
            comm.barrier()
        comm.compound("step", task)
        """
    )
    assert status != 0
    assert seconds < LONG / 2
    assert "ValueError: the reason" in text
    assert "rank 0 of 3 has waited" in text
    assert "arrived: ranks 0, 2\n" in text
    assert "not arrived: rank 1, which is at the end of its program, after an exception in operation 2\n" in text


@pytest.mark.thorough
def test_a_rank_that_closes_after_an_exception_does_not_wait_for_the_others(job: Callable) -> None:
    """Long before the limit its exception is shown, and the others are told that it has ended."""
    status, text, seconds = job(
        """
        group = comm.duplicate()
        try:
            if rank == 1:
                raise ValueError("the reason")
            comm.barrier()
        finally:
            comm.close()
        """
    )
    assert status != 0
    assert seconds < LONG / 2
    assert "ValueError: the reason" in text
    assert "not arrived: rank 1, which is at the end of its program" in text


IN_FOURTH = Position(4, "all_reduce", inside=True, detail="sum of 5 float32 by ring")


def test_a_report_names_what_differs_between_operations_of_one_kind() -> None:
    known = {0: IN_FOURTH, 1: replace(IN_FOURTH, detail="sum of 6 float32 by mpi"), 2: replace(IN_FOURTH, inside=False)}
    text = report(0, [0, 1, 2], 3, IN_FOURTH, 9, known, {})
    assert (
        "in different operations: all_reduce sum of 5 float32 by ring on ranks 0, 2, all_reduce sum of 6 float32 by "
        "mpi on rank 1;" in text
    )


def test_the_words_for_a_list_name_its_dtypes() -> None:
    arrays = [
        inspect(np.ones(n, dtype), "x", writable=False)
        for n, dtype in [(5, np.float32), (6, np.float64), (7, np.float32)]
    ]
    assert of_list("sum", arrays, 0, False, ["ring", "mpi", "ring"]) == words(
        "sum of 3 arrays of 18 by ring, mpi: float32, float64"
    )
    assert of_list(None, arrays[:1], 2, True, ["tree"]) == words("of 1 arrays of 5 root 2 by tree: float32")


def test_a_report_says_which_rank_has_completed_another_operation_in_its_place() -> None:
    for there in (replace(IN_FOURTH, inside=False), Position(6, "the end of its program", inside=False)):
        text = report(1, [0, 1], 2, IN_FOURTH, 9, {0: there, 1: IN_FOURTH}, {})
        assert f"has left it: rank 0, which {there}; its operation may have been another one" in text
        assert "one of them hangs" not in text
        assert "not arrived" not in text
    text = report(1, [0, 1], 2, IN_FOURTH, 9, {0: replace(there, number=4), 1: IN_FOURTH}, {})
    assert "not arrived: rank 0, which is at the end of its program" in text


def test_a_report_says_which_rank_has_left_by_an_exception() -> None:
    known = {0: IN_FOURTH, 1: replace(IN_FOURTH, inside=False, failed=True)}
    text = report(0, [0, 1], 2, IN_FOURTH, 9, known, {})
    assert "not arrived: rank 1, which is out of all_reduce (operation 4), by an exception\n" in text
    assert "one of them hangs" not in text


def test_a_report_of_a_group_has_the_world_s_ranks() -> None:
    known = {6: IN_FOURTH, 2: replace(IN_FOURTH, number=3, inside=False)}
    text = report(6, [6, 2], 8, IN_FOURTH, 9, known, {})
    assert "rank 6 of 8 has waited 9 s in all_reduce (operation 4 of the communicator of ranks 2, 6)\n" in text
    assert "not arrived: rank 2, which is after all_reduce (operation 3)\n" in text


def test_a_report_has_the_name_of_the_group() -> None:
    text = report(0, [0, 1], 4, IN_FOURTH, 9, {0: IN_FOURTH}, {}, "dp")
    assert "rank 0 of 4 has waited 9 s in all_reduce (operation 4 of communicator 'dp' of ranks 0, 1)\n" in text
    receiving = Position(3, "barrier", inside=False, message="recv", peer=ANY)
    text = report(0, [0, 1, 2], 3, receiving, 9, {0: receiving, 1: IN_FOURTH}, {}, "dp")
    assert "rank 0 of 3 has waited 9 s in recv from any rank (communicator 'dp')\n" in text
    assert "not arrived: rank 1, which is in all_reduce (operation 4)\n" in text
    assert "not arrived: rank 2, which has not answered\n" in text


def test_a_report_has_what_programs_do_and_the_coordinates_of_ranks() -> None:
    def at(rank: int, **changed: Any) -> Position:
        return replace(IN_FOURTH, place=f"dp=1, tp={rank}", phase="in the backward pass of step 7", **changed)

    late = {rank: at(rank, number=3, inside=False) for rank in (1, 2)}
    text = report(0, [0, 1, 2, 3], 4, at(0), 9, {0: at(0), **late, 3: replace(late[1], operation=END)}, {})
    assert (
        "rank 0 of 4 (dp=1, tp=0) has waited 9 s in all_reduce (operation 4 of this communicator), in the back" in text
    )
    assert (
        "not arrived: ranks 1, 2 (dp=1, tp=1; dp=1, tp=2), which is after all_reduce (operation 3), in the backward "
        "pass of step 7\n"
    ) in text
    assert "which is at the end of its program, after 2 operations\n" in text


def test_what_a_program_does_is_on_its_page() -> None:
    page = Positions(bytearray(Positions.nbytes(2)), 1, 2)
    page.enter(3, "barrier")
    page.beat("dp=1, tp=0", "in step 4")
    own = Positions.decode(page.snapshot())[1]
    assert (own.number, own.detail, own.place, own.phase, own.beat) == (3, "", "dp=1, tp=0", "in step 4", 1)
    page.beat("", "x" * 1000)
    assert page.own().phase.startswith("xxx")
    assert page.all()[0].phase == ""


@pytest.mark.thorough
def test_different_operations_are_told_of_beside_a_late_rank_and_not_of_one_at_its_end(job: Callable) -> None:
    status, text, _ = job(
        f"""
        if rank == 2:
            time.sleep({LONG})
        comm.all_reduce(x, algorithm="mpi") if rank else comm.barrier()
        """,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    assert "not arrived: rank 2, which is after barrier (operation 1)\n" in text
    assert "in different operations: barrier on rank 0, all_reduce sum of 1000 float64 by mpi on rank 1; " in text
    status, text, _ = job("if rank:\n    comm.all_reduce(x)", 2)
    assert status != 0
    assert "not arrived: rank 0, which is at the end of its program" in text
    assert "different operations" not in text


@pytest.mark.thorough
def test_the_limit_can_be_an_argument_and_goes_on_to_groups(job: Callable) -> None:
    status, text, _ = job(
        f"""
        group = Communicator(timeout=1).split(0, -rank)
        group.barrier()
        if rank == 2:
            time.sleep({LONG})
        group.barrier()
        """
    )
    assert status != 0
    assert "rank 1 of 3 has waited" in text
    assert "in barrier (operation 2 of the communicator of ranks 0, 1, 2)" in text
    assert "not arrived: rank 2, which is after barrier (operation 1)" in text


@pytest.mark.thorough("None-any rank")
@pytest.mark.parametrize(("source", "named"), [(2, "rank 2"), (None, "any rank")])
def test_a_message_that_nobody_sends(job: Callable, source: int | None, named: str) -> None:
    status, text, _ = job(
        f"""
        if rank == 1:
            comm.recv(x, {source})
        comm.barrier() if rank == 0 else time.sleep({LONG})
        """,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    assert "rank 1 of 3 has waited" in text
    assert f"in recv from {named}" in text
    assert "not arrived: rank 2, which is after barrier (operation 1)" in text


@pytest.mark.parametrize(
    ("group", "number", "others"),
    [("comm", 2, f"time.sleep({LONG})"), pytest.param("comm.duplicate()", 1, "", marks=pytest.mark.thorough)],
)
def test_a_program_that_ends_while_an_operation_that_timed_out_is_under_way_ends_the_job(
    job: Callable, group: str, number: int, others: str
) -> None:
    """Also where it closes the group, or the one that this is a duplicate of."""
    status, text, seconds = job(
        f"""
        group = {group}
        if rank:
            {others or "pass"}
        else:
            try:
                group.all_reduce(x, timeout=0.3)
            except TimeoutError:
                pass
        comm.close()
        """
    )
    assert status != 0
    assert seconds < LONG / 2
    what = f"all_reduce (operation {number} of this communicator, rank 0 of 3)"
    if others:
        assert f"rank 0 of 3 ends the job: {what} has timed out" in text
    else:  # the others wait in `close`
        assert "not arrived: rank 0, which is at the end of its program, after an exception in operation 1" in text


def test_a_rank_that_has_left_is_noticed_long_before_the_limit(job: Callable) -> None:
    status, text, seconds = job("if rank == 2:\n    sys.exit()\ncomm.all_reduce(x)")
    assert status != 0
    assert seconds < LONG / 2
    assert "not arrived: rank 2, which is at the end of its program, after 1 operations" in text


@pytest.mark.thorough
def test_an_operation_is_watched_while_messages_go_on_beside_it(job: Callable) -> None:
    status, text, _ = job(
        f"""
        if rank == 2:
            time.sleep({LONG})
        work = comm.all_reduce(x, async_op=True)
        while True:
            (comm.send if rank else comm.recv)(np.ones(1), 1 - rank)
            time.sleep(0.1)
        """,
        MPIDL_TIMEOUT="2",
    )
    assert status != 0
    assert "in all_reduce (operation 2 of this communicator)" in text
    assert "not arrived: rank 2" in text


@pytest.mark.thorough
def test_a_wrong_limit_on_one_rank_is_an_error_on_all(job: Callable) -> None:
    status, text, _ = job(
        """
        try:
            Communicator(timeout="soon" if rank == 1 else 3)
        except ValueError as error:
            print("refused:", error)
        """
    )
    assert status == 0, text
    assert text.count("got 'soon'; needs a number of seconds") == 3


@pytest.mark.thorough
def test_a_killed_rank_ends_the_job_with_a_message(job: Callable) -> None:
    status, text, seconds = job("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ncomm.all_reduce(x)")
    assert status != 0
    assert seconds < LONG / 2
    assert "KILLED" in text.upper() or "signal 9" in text


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_stopped_rank_is_named_at_any_number_of_ranks(job: Callable, ranks: int) -> None:
    status, text, seconds = job(
        "if rank == comm.size - 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "comm.reduce_scatter(np.ones(1), np.ones(comm.size))",
        ranks,
        MPIDL_TIMEOUT="1.5",
    )
    assert status != 0
    assert seconds < LONG / 2
    assert text.count("has waited") == 1, text
    assert "in reduce_scatter (operation 2 of this communicator)" in text
    assert f"not arrived: rank {ranks - 2}, which is after barrier (operation 1)\n" in text


@pytest.mark.thorough("4", "8")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_is_stopped_inside_an_operation_is_named(job: Callable, ranks: int) -> None:
    """By the others, to whom it has come like all; also where it is the one that would report."""
    late = ranks // 2 - 1
    status, text, seconds = job(
        f"""
        import threading
        if rank == {late}:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        x = np.ones(2_000_000, np.float32)
        while True:
            comm.all_reduce(x, "max", algorithm="ring")
        """,
        ranks,
        MPIDL_TIMEOUT="3",
    )
    assert status != 0
    assert seconds < LONG / 2
    assert text.count("has waited") == 1, text
    assert "in all_reduce (operation " in text
    assert f"s, as if stopped or gone: rank {late}\n" in text, text
    assert "one of them hangs" not in text


@pytest.mark.thorough
def test_a_job_that_is_stopped_as_a_whole_and_goes_on_is_left_alone(job: Callable, tmp_path: Path) -> None:
    """As a scheduler does with it; the others wait for rank 0 all the while."""
    status, text, _ = job(
        f"""
        import pathlib, subprocess
        here = pathlib.Path({str(tmp_path)!r})
        (here / f"{{os.getpid()}}.pid").touch()
        comm.barrier()
        if rank == 0:
            pids = " ".join(path.stem for path in here.glob("*.pid"))
            both = f"sleep 0.5; kill -STOP {{pids}}; sleep 5; kill -CONT {{pids}}"
            subprocess.Popen(["sh", "-c", both], start_new_session=True)
            time.sleep(1.5)
        comm.barrier()
        print("well")
        """,
        MPIDL_TIMEOUT="2.5",
    )
    assert status == 0, text
    assert text.count("well") == 3


@pytest.mark.thorough
def test_where_ranks_share_no_memory_each_tells_the_others_where_it_is(job: Callable) -> None:
    status, text, _ = job(
        f"""
        import collectives.memory.shared_memory as memory
        memory.directories = lambda: ["/of/nothing"]
        comm = Communicator(timeout=2)
        for _ in range(3):
            time.sleep(1)
            comm.barrier()
        if rank == 1:
            time.sleep({LONG})
        comm.all_reduce(x)
        """
    )
    assert status != 0
    assert text.count("has waited") == 1, text
    assert "rank 0 of 3 has waited" in text
    assert "not arrived: rank 1, which is after barrier (operation 3)\n" in text
    assert "Traceback" not in text


@pytest.mark.thorough
def test_a_rank_in_an_endless_loop_is_named_with_the_loop(job: Callable) -> None:
    status, text, _ = job("if rank == 1:\n    while True: pass  # for ever\ncomm.all_reduce(x)", 2, MPIDL_TIMEOUT="1.5")
    assert status != 0
    assert "in all_reduce (operation 2 of this communicator)" in text
    assert "not arrived: rank 1, which is after barrier (operation 1)\n" in text
    assert "# for ever" in text


@pytest.mark.thorough
def test_no_limit_and_long_operations_that_move_on_are_left_alone(job: Callable) -> None:
    """Three seconds in all, in waits that are shorter than the limit."""
    status, text, _ = job(
        """
        for _ in range(6):
            time.sleep(0.5 * (rank == 1))
            comm.all_reduce(x, "max")
        print("well")
        """,
        MPIDL_TIMEOUT="2",
    )
    assert status == 0, text
    assert text.count("well") == 3


def test_limits_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_of(None) == 600
    assert limit_of(0) == float("inf")
    monkeypatch.setenv("MPIDL_TIMEOUT", "20")
    assert limit_of(None) == 20
    assert limit_of(3) == 3
    monkeypatch.setenv("MPIDL_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="MPIDL_TIMEOUT: got 'soon'; needs a number of seconds"):
        limit_of(None)
    with pytest.raises(ArgumentError, match="timeout: got -1"):
        limit_of(-1)


def over_nodes(comm: Communicator, ranks: int) -> Guard:
    """The guard of a group of which every rank here is the first of another node's so many, and the others idle."""
    here = [comm.rank, *(comm.size + comm.rank * ranks + number for number in range(ranks - 1))]
    positions = Positions(bytearray(Positions.nbytes(ranks)), 0, ranks)
    return Guard(comm.mpi.Dup(), positions, here, list(range(comm.size * (ranks + 1))), 4.0)


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_answers_to_other_nodes_last_until_they_are_taken(comm: Communicator) -> None:
    """With 64 ranks on a node MPI reads an answer from its memory later; the program allocates and frees meanwhile."""
    guard, known = over_nodes(comm, 64), set()
    enough, both = time.monotonic() + 0.3, None
    while both is None or not both.Test():  # the other rank may still ask
        known |= set(guard.positions_of_all())
        if both is None and len(known) == 2 * 64 and time.monotonic() > enough:
            both = guard.messages.Ibarrier()
        junk = [bytes([0xEE]) * size for size in range(7000, 30000, 61)]
        time.sleep(0.005)
    assert len(known) == 2 * 64
    assert junk


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_late_messages_of_a_group_that_is_gone_are_forgotten(comm: Communicator) -> None:
    """MPI gives its place to another group, which may have fewer ranks."""
    guard = over_nodes(comm, 3)
    old = Guard(guard.messages, Positions(bytearray(Positions.nbytes(1)), 0, 1), [7], list(range(8)), 4.0, group=(0, 5))
    other = 1 - comm.rank
    old.positions.enter(3, "barrier")
    answer = old.group, old.ranks, old.positions.snapshot(), [0.0]
    sent = [guard.messages.Isend(np.array(old.group), other, TAGS[0]), guard.messages.isend(answer, other, TAGS[1])]
    enough, known = time.monotonic() + 1.0, set[int]()
    both = None
    while both is None or not both.Test():
        known |= set(guard.positions_of_all())
        if both is None and time.monotonic() > enough:
            both = guard.messages.Ibarrier()
        time.sleep(0.01)
    MPI.Request.Waitall(sent)
    assert len(known) == 6
    assert 7 not in known


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_without_threads_in_mpi_other_nodes_are_not_asked(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = over_nodes(comm, 2)
    guard.messages = SimpleNamespace(size=4)  # type: ignore[assignment]  # which can send nothing
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    for now in (0.0, 1.0, 2.0):
        assert set(guard.positions_of_all()) == set(guard.ranks)
        guard.look(now, "", "")


def test_a_watchdog_that_could_not_be_started_is_started_with_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    group: Any = SimpleNamespace()
    begun: list[Any] = []
    monkeypatch.setattr(watchdog, "_guards", {})
    monkeypatch.setattr(watchdog, "_thread", [])
    monkeypatch.setattr(watchdog.threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        watchdog.watch(group)
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda thread: begun.append(thread))
    for _ in range(2):
        watchdog.watch(group)
    assert len(begun) == 1
