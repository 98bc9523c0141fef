"""The restart wrapper on jobs of ranks."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import launch

KILLED = """
import os, signal, mpidl
comm = mpidl.init()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


def mpirun() -> str:
    """The one beside this interpreter, or on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found
    return found


@pytest.mark.limit(120)
@pytest.mark.job
def test_a_killed_rank_is_named() -> None:
    wrapper = [sys.executable, "-m", "mpidl.launch", "--max-restarts", "0", "--"]
    command = [*wrapper, mpirun(), "-n", "2", sys.executable, "-c", KILLED]
    done = launch.run(command, 110, launch.ROOT, launch.environment(PYTHONPATH=str(launch.ROOT)))
    assert done.returncode != 0
    said = rf"mpidl.launch: status {done.returncode}: rank 1 on \S+ was ended by SIGKILL; giving up after 0 restarts"
    assert re.search(said, done.stderr), done.stdout + done.stderr
    assert "left" not in done.stderr
