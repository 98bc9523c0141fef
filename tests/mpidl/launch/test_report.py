"""Which rank ended first, its last operation, and the ranks that waited for it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from collectives.diagnostics import JOB
from collectives.runtime.positions import Position
from mpidl.launch import report
from mpidl.launch.job import Job
from mpidl.launch.report import Report

from .test_terminal import runs

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs descriptors of processes")

RANKS = dict(enumerate([("node7.cluster", 10), ("node7.cluster", 11), ("node8.cluster", 11), ("node8.cluster", 12)]))

IN_REDUCE = Position(4, "all_reduce", inside=True)
AFTER_REDUCE = Position(4, "all_reduce", inside=False)
AFTER_GATHER = Position(3, "all_gather", inside=False)
NOTHING = Position(0, "nothing", inside=False)
FROM_1 = Position(4, "all_reduce", inside=False, waits=1, message="recv", peer=1)


def rank_of(process: int, node: str, processes: dict[int, tuple[str, int]]) -> int | None:
    made = Report()
    made.processes = processes
    return made.rank_of_first(process, node)


def test_ranks_are_found_by_process_and_node() -> None:
    assert [rank_of(process, "node7", RANKS) for process in (10, 11, 13)] == [0, 1, None]
    assert rank_of(11, "node8.cluster", RANKS) == 2


def test_a_node_of_another_name_is_enough_where_the_number_is_one_process_s_alone() -> None:
    assert (rank_of(12, "10.0.0.8", RANKS), rank_of(11, "10.0.0.8", RANKS)) == (3, None)


def test_no_rank_is_known_of_a_job_that_came_to_nothing() -> None:
    assert rank_of(10, "node7", {}) is None


def last_seen(rank: int, groups: list[dict[int, Position]]) -> str:
    made = Report()
    made.groups = groups
    return made.last_seen(rank)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            [{0: IN_REDUCE, 1: AFTER_GATHER, 2: IN_REDUCE}],
            "it was after all_gather (operation 3), ranks 0, 2 were in all_reduce (operation 4)",
        ),
        (
            [{0: IN_REDUCE, 1: IN_REDUCE, 2: AFTER_REDUCE}],
            "it was in all_reduce (operation 4), rank 0 was in all_reduce (operation 4)",
        ),
        ([{0: AFTER_REDUCE, 1: AFTER_REDUCE}], "it was after all_reduce (operation 4)"),
        ([{0: AFTER_GATHER, 1: IN_REDUCE}], "it was in all_reduce (operation 4)"),
        (
            [{0: FROM_1, 1: AFTER_REDUCE, 2: IN_REDUCE}],
            "it was after all_reduce (operation 4), rank 0 was in recv from rank 1, "
            "rank 2 was in all_reduce (operation 4)",
        ),
        ([{0: IN_REDUCE, 1: NOTHING}], "it was before its first operation, rank 0 was in all_reduce (operation 4)"),
        ([{0: IN_REDUCE, 2: AFTER_GATHER}], "rank 0 was in all_reduce (operation 4)"),  # it was on another node
        ([{0: NOTHING, 1: NOTHING}], ""),
        ([], ""),
    ],
)
def test_a_rank_was_last_seen_in_the_operations_of_its_group(groups: list[dict[int, Position]], told: str) -> None:
    assert last_seen(1, groups) == told


def test_the_group_in_which_ranks_waited_tells_of_several() -> None:
    world = {0: AFTER_GATHER, 1: AFTER_GATHER}
    part = {0: Position(1, "barrier", inside=True), 1: Position(0, "nothing", inside=False)}
    of_others = {0: IN_REDUCE, 2: IN_REDUCE}
    assert last_seen(1, [world, part]) == "it was before its first operation, rank 0 was in barrier (operation 1)"
    assert last_seen(1, [world, {0: NOTHING, 1: NOTHING}]) == "it was after all_gather (operation 3)"
    assert last_seen(1, [of_others, world]).startswith("it was after all_gather")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that wait."""
    made = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def watching(processes: list[subprocess.Popen[bytes]]) -> Report:
    watched = Report()
    for process in processes:
        watched.watch(process.pid)
    return watched


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and returns once it has ended; it may remain another process's child."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@on_linux
def test_the_order_of_ends_is_known_without_a_look_in_between(processes: list[subprocess.Popen[bytes]]) -> None:
    watched = watching(processes)
    watched.refresh()
    for number in (1, 0, 2):
        kill(processes[number])
    watched.refresh()
    watched.close()
    ids = [process.pid for process in processes]
    assert [watched.first_to_end(pid, ids) for pid in ids] == [ids[1]] * 3
    assert watched.first_to_end(ids[2], {ids[0], ids[2]}) == ids[0]  # the other one is no rank


@on_linux
def test_a_process_that_ended_long_before_is_not_the_cause(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "TOGETHER", 0.0)
    watched = watching(processes)
    for number in (2, 1):
        kill(processes[number])
        watched.refresh()
    ids = [process.pid for process in processes]
    assert watched.first_to_end(ids[1], ids) == ids[1]
    assert watched.first_to_end(ids[0], ids) == ids[0]  # it runs
    watched.close()


@on_linux
def test_a_report_keeps_no_descriptors(processes: list[subprocess.Popen[bytes]]) -> None:
    before = os.listdir("/proc/self/fd")
    watched = watching(processes)
    watched.watch(processes[0].pid)
    kill(processes[0])
    watched.refresh()
    watched.close()
    watched.refresh()
    assert os.listdir("/proc/self/fd") == before


@on_linux
def test_the_rank_that_ended_first_is_the_one_where_the_launcher_names_another() -> None:
    """Processes with the variables that MPICH's gives to ranks; they end without a look in between."""
    job = Job(["sh", "-c", "for rank in 0 1 2; do PMI_RANK=$rank sleep 60 & done; wait"])
    try:
        while len(ranks := {rank: pid for pid, rank in job.report.ranks.items()}) < 3:
            assert job.poll() is None
            time.sleep(0.01)
        for rank in (1, 0, 2):
            os.kill(ranks[rank], signal.SIGKILL)
            while runs(ranks[rank]):
                time.sleep(0.001)
    finally:
        job.end()
    assert [job.report.rank_of_first(ranks[rank], platform.node()) for rank in (0, 1, 2)] == [1, 1, 1]


@on_linux
def test_a_process_that_becomes_a_rank_after_it_was_seen() -> None:
    """A daemon starts the ranks where Slurm does: until they call exec they have its environment, not the job's."""
    job = Job(["sleep", "60"])
    variables = {JOB: job.token, "SLURM_PROCID": "3"}
    script = f"import os; input(); os.execve('/bin/sleep', ['sleep', '60'], {variables})"
    started = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True)
    try:
        assert job.poll() is None
        assert not job.report.ranks
        assert started.stdin is not None
        started.stdin.write("\n")
        started.stdin.close()
        while not job.report.ranks:
            assert job.poll() is None
            assert started.poll() is None
            time.sleep(0.01)
    finally:
        job.end()
        started.kill()
        started.wait()
    assert job.report.ranks == {started.pid: 3}


@on_linux
def test_a_rank_that_missed_another_s_memory_is_not_the_cause(processes: list[subprocess.Popen[bytes]]) -> None:
    watched = watching(processes)
    watched.ranks = {process.pid: rank for rank, process in enumerate(processes)}
    killed = processes[1].pid
    missed = (
        "mpidl: rank 2 of 3, in all_reduce (operation 7), ends the job: "
        f"OperationError: the memory of local rank 1 (process {killed}) is out of reach: No such process"
    )
    assert watched.cause(1, [missed]).startswith("status 1: rank 2, in all_reduce"), "it runs"
    for number in (1, 2, 0):
        kill(processes[number])
    watched.refresh()
    assert watched.cause(1, [missed]) == "status 1: rank 1 ended before the others"
    node = platform.node()
    launcher = [
        f"=   PID {killed} RUNNING AT {node}",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
    ]
    assert watched.cause(9, [missed, *launcher]) == f"status 9: rank 1 on {node} was ended by SIGKILL"
    own = "mpidl: rank 0 of 3 ends the job: ValueError: before"
    assert watched.cause(1, [own, missed]) == "status 1: rank 0: ValueError: before"
    watched.close()
