"""The restart wrapper on jobs of ranks."""

from __future__ import annotations

import re
import sys

import pytest

from tests.harness import launch

KILLED = """
import os, signal, time, torch, mpidl
comm = mpidl.init()
comm.all_reduce(torch.ones(2))
if comm.rank == 1:
    while comm._dispatch.positions.all()[0].operation != "barrier":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


@pytest.mark.thorough
@pytest.mark.limit(120)
@pytest.mark.job
def test_a_killed_rank_is_named_with_the_operation_that_it_is_missing_from() -> None:
    wrapper = [sys.executable, "-m", "mpidl.launch", "--max-restarts", "0", "--"]
    command = [*wrapper, launch.launcher(), "-n", "2", sys.executable, "-c", KILLED]
    done = launch.run(command, 110, launch.ROOT, launch.environment(PYTHONPATH=str(launch.ROOT)))
    assert done.returncode != 0
    said = (
        rf"mpidl.launch: status {done.returncode}: rank 1 on \S+ was ended by SIGKILL: it was after all_reduce "
        r"\(operation \d+\), rank 0 was in barrier \(operation \d+\); giving up after 0 restarts"
    )
    assert re.search(said, done.stderr), done.stdout + done.stderr
    assert "left" not in done.stderr
