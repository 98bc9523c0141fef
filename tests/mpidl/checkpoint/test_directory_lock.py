"""Two jobs that save to one directory: the second is told of the first, whatever becomes of that."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpidl
from mpidl.checkpoint import claim, directory_lock, folder, load, newest, save
from tests.harness import launch

HOLDER = """
import os, sys
from pathlib import Path
from mpidl.checkpoint import directory_lock, folder

where = Path(sys.argv[1])
directory_lock.hold(where)
(where / "step-00000009.tmp").mkdir()
print("holds", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(comm, shared: Path) -> Iterator[subprocess.Popen | None]:
    """On rank 0, another process that holds the directory and writes there, until it reads a line."""
    process = None
    if comm.rank == 0:
        environment = launch.environment(SLURM_JOB_ID="88", MPI4PY_RC_INITIALIZE="0")
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", HOLDER, str(shared)]
        process = subprocess.Popen(command, env=environment, cwd=launch.ROOT, **pipes)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
    comm.barrier()
    yield process
    if process is not None:
        process.kill()
        process.communicate()


@pytest.mark.mpi
def test_another_job_is_named_on_every_rank_and_what_it_writes_left_alone(
    comm, shared: Path, other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "LOCK_TIMEOUT", 0.1)
    model = torch.nn.Linear(3, 2)
    for attempt in (lambda: save(shared, model, step=1, process_group=comm), lambda: claim(shared, comm)):
        with pytest.raises(mpidl.CheckpointError) as raised:
            attempt()
        said = mpidl.broadcast_object(comm, f"{shared}: process {other.pid} on" if other else None)
        assert str(raised.value).startswith(said)
        assert "of job 88 saves its checkpoints there" in str(raised.value)
        assert "\n" not in str(raised.value)
    if comm.rank == 0:
        folder.clean(shared)
        assert sorted(path.name for path in shared.iterdir()) == [directory_lock.NAME, "step-00000009.tmp"]
    comm.barrier()
    if other:
        other.kill()
        other.wait()
    comm.barrier()
    save(shared, model, step=1, process_group=comm)  # the kernel has released the lock
    assert load(shared, model, process_group=comm).step == 1
    assert comm.rank or str(os.getpid()) in (shared / directory_lock.NAME).read_text()
    assert not (shared / "step-00000009.tmp").exists()


@pytest.mark.mpi
def test_one_that_is_ending_is_waited_for_and_leaves_no_file(
    comm, shared: Path, other, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def pause(_: float) -> None:
        seen.append((shared / directory_lock.NAME).exists())
        other.communicate("\n")
        seen.append((shared / directory_lock.NAME).exists())

    monkeypatch.setattr(directory_lock, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    save(shared, torch.nn.Linear(3, 2), step=1, process_group=comm)
    assert seen == ([True, False] if comm.rank == 0 else [])


@pytest.mark.mpi
def test_a_directory_that_was_removed_is_taken_anew(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for _ in range(2):
        save(shared / "kept", model, step=1, process_group=comm)
        assert (shared / "kept" / directory_lock.NAME).exists()
        comm.barrier()
        if comm.rank == 0:
            (shared / "kept").rename(shared / f"moved-{os.urandom(4).hex()}")
        comm.barrier()


def test_what_a_killed_job_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / directory_lock.NAME).write_text("process 1 on node7\n")
    folder.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Such as a worker that outlives the rank."""
    directory_lock.hold(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    directory_lock.release(tmp_path)
    directory_lock.hold(tmp_path)
    os.write(writing, b"x")
    os.waitpid(child, 0)


def test_a_file_system_without_locks_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="knows no locks .No locks available.: that no other job saves there"):
        save(tmp_path, torch.nn.Linear(3, 2), step=1)
    save(tmp_path, torch.nn.Linear(3, 2), step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.thorough("it ends")
@pytest.mark.parametrize("how", ["it ends", "it fails"])
def test_a_job_takes_its_lock_along(
    mpirun: Callable[..., subprocess.CompletedProcess], tmp_path: Path, how: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, mpidl, torch\n"
        "comm = mpidl.init()\n"
        "mpidl.checkpoint.claim(sys.argv[1])\n"
        "mpidl.checkpoint.save(sys.argv[1], torch.nn.Linear(1, 1), step=1, compare=False)\n"
        f"assert comm.rank == 0 or {how!r} == 'it ends'\n"
    )
    done = mpirun(2, program, tmp_path / "kept")
    assert done.returncode == (how != "it ends"), done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["latest", "step-00000001"]
    assert newest(tmp_path / "kept")[0] is not None
