"""A rank that does not come is named, with what it is in, and the job ends."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.backends.tables import default_tables, library
from collectives.process import cores

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


def test_ranks_in_different_operations_are_named(job: Callable) -> None:
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
def test_ranks_in_operations_of_one_kind_that_do_not_fit_are_named(job: Callable) -> None:
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
def test_sizes_on_two_sides_of_a_limit_of_auto_are_named(job: Callable) -> None:
    tables = default_tables(library(), nodes=1, local_size=2, oversubscribed=False)
    if tables is None:
        pytest.skip("there is no compiler, and so no default")
    (limit, _), *_ = tables["broadcast"]
    size = int(limit) // 4
    status, text, _ = job(f"comm.broadcast(np.ones({size} + rank, np.float32))", 2, MPIDL_TIMEOUT="1.5")
    assert status != 0
    # The ranks meet in memory on both sides of it, so that each sees what the other is in.
    assert f"rank 0: broadcast of {size} float32 root 0; rank 1: broadcast of {size + 1} float32 root 0" in text, text


@pytest.mark.thorough
def test_algorithms_that_differ_are_named(job: Callable) -> None:
    program = "comm.broadcast(np.ones(100 + rank, np.float32), algorithm=('symmetric', 'mpi')[rank])"
    status, text, _ = job(program, 2, MPIDL_TIMEOUT="1.5")
    assert status != 0
    assert (
        "different operations: broadcast of 100 float32 root 0 by symmetric on rank 0, broadcast of 101 float32 root 0 "
        "by mpi on rank 1;" in text
    ), text


@pytest.mark.thorough
def test_reductions_of_other_parts_are_named(job: Callable) -> None:
    """DDP reduces so where the ranks fill the cores."""
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_different_operations_are_told_of_with_a_late_rank_and_not_of_one_at_its_end(job: Callable) -> None:
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


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "named"), [(2, "rank 2"), (None, "any rank")])
def test_a_message_that_no_rank_sends(job: Callable, source: int | None, named: str) -> None:
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("group", "number", "others"), [("comm", 2, f"time.sleep({LONG})"), ("comm.duplicate()", 1, "")]
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


def test_a_group_that_was_closed_can_end_the_job(job: Callable) -> None:
    status, text, seconds = job(
        f"""
        group = comm.split(0)
        group.close()
        if rank:
            time.sleep({LONG})
        group.abort(3)
        """,
        2,
    )
    assert status == 3, text
    assert "Traceback" not in text
    assert seconds < LONG / 2


@pytest.mark.thorough
def test_a_rank_that_has_left_is_noticed_long_before_the_limit(job: Callable) -> None:
    status, text, seconds = job("if rank == 2:\n    sys.exit()\ncomm.all_reduce(x)")
    assert status != 0
    assert seconds < LONG / 2
    assert "not arrived: rank 2, which is at the end of its program, after 1 operations" in text


@pytest.mark.thorough
def test_an_operation_is_watched_while_messages_go_on(job: Callable) -> None:
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


@pytest.mark.thorough
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
    """A scheduler may stop it; the others wait for rank 0 all the while."""
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
