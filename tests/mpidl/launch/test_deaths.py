"""The order in which processes end."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mpidl.launch import report
from mpidl.launch.job import Job
from mpidl.launch.report import Report

from .test_terminal import runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs descriptors of processes")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three that wait."""
    made = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Returns once it has ended; it may remain another process's child."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_their_order_is_known_though_nobody_looked_meanwhile(processes: list[subprocess.Popen[bytes]]) -> None:
    watched = Report()
    for process in processes:
        watched.watch(process.pid)
    watched.look()
    for number in (1, 0, 2):
        kill(processes[number])
    watched.look()
    watched.close()
    ids = [process.pid for process in processes]
    assert [watched.first(pid, ids) for pid in ids] == [ids[1]] * 3
    assert watched.first(ids[2], {ids[0], ids[2]}) == ids[0]  # the other one is no rank


def test_one_that_ended_long_before_has_nothing_to_do_with_it(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "TOGETHER", 0.0)
    watched = Report()
    for process in processes:
        watched.watch(process.pid)
    for number in (2, 1):
        kill(processes[number])
        watched.look()
    ids = [process.pid for process in processes]
    assert watched.first(ids[1], ids) == ids[1]
    assert watched.first(ids[0], ids) == ids[0]  # it runs
    watched.close()


def test_it_keeps_no_descriptors(processes: list[subprocess.Popen[bytes]]) -> None:
    before = os.listdir("/proc/self/fd")
    watched = Report()
    for process in processes:
        watched.watch(process.pid)
    watched.watch(processes[0].pid)
    kill(processes[0])
    watched.look()
    watched.close()
    watched.look()
    assert os.listdir("/proc/self/fd") == before


def test_the_rank_that_ended_first_is_the_one_where_the_launcher_names_another() -> None:
    """Processes with the variables that MPICH's gives to ranks; they end without anybody looking."""
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
    assert [job.report.rank(ranks[rank], platform.node()) for rank in (0, 1, 2)] == [1, 1, 1]


def test_a_rank_that_missed_another_s_memory_is_not_the_cause(processes: list[subprocess.Popen[bytes]]) -> None:
    watched = Report()
    watched.ranks = {process.pid: rank for rank, process in enumerate(processes)}
    for process in processes:
        watched.watch(process.pid)
    killed = processes[1].pid
    missed = (
        "mpidl: rank 2 of 3, in all_reduce (operation 7), ends the job: "
        f"OperationError: the memory of local rank 1 (process {killed}) is out of reach: No such process"
    )
    assert watched.cause(1, [missed]).startswith("status 1: rank 2, in all_reduce"), "it runs"
    for number in (1, 2, 0):
        kill(processes[number])
    watched.look()
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
