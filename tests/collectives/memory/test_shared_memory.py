"""Where the node's memory is too small there is a warning and another way, never a signal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator
from tests.harness import launch

PROGRAM = """
import sys, warnings
import numpy as np
from collectives import Communicator

warnings.simplefilter("always")
comm = Communicator()
for elements in map(int, sys.argv[1:]):
    arrays = [comm.empty(elements, np.float32) for _ in range(2)]
    for x in arrays:
        x[:] = comm.rank + 1  # touches every page
        comm.barrier()
        comm.all_reduce(x)
        assert (x == comm.size * (comm.size + 1) / 2).all()
        x[:] = comm.rank + 1
        comm.scan(x, algorithm="symmetric")
        assert (x == sum(range(comm.rank + 2))).all()
        comm.exscan(x, algorithm="symmetric")
        assert (x == (sum(sum(range(rank + 2)) for rank in range(comm.rank)) if comm.rank else 1)).all()
    out = comm.shared(elements * comm.size, np.float32)
    own = out[comm.rank * elements :][:elements]
    own[:] = comm.rank
    comm.all_gather(out, own)
    assert (out == np.repeat(np.arange(comm.size), elements)).all()
if comm.rank == 0:
    print("algorithms", *comm.algorithms("all_reduce"))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_memory_is_made_and_leaves_no_file(mpirun: Callable, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    done = mpirun(3, program, 10, 100_000, MPIDL_SHM_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    assert "symmetric" in done.stdout
    assert "Warning" not in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("unshare"), reason="the program unshare is missing")
def test_a_small_tmpfs_gives_way_to_a_file_with_a_warning(program: Path, tmp_path: Path) -> None:
    """One of 1 MiB, in a mount namespace of its own, where arrays of 4 MB are asked for."""
    folder = tmp_path / "small"
    folder.mkdir()
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f"mount -t tmpfs -o size=1m small {folder}"
    unshared = ["unshare", "--mount", *user, "sh", "-c"]
    if subprocess.run([*unshared, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs, not even in a namespace of its own")
    job = f"exec {launch.launcher()} -n 2 {sys.executable} {program} 10 1000000"
    done = launch.run([*unshared, f"{mount} && {job}"], 60, launch.ROOT, launch.environment(MPIDL_SHM_DIR=str(folder)))
    assert done.returncode == 0, done.stderr
    assert "symmetric" in done.stdout
    said = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert said, done.stderr
    assert all("which is slower" in line and "too small: enlarge it (docker run --shm-size" in line for line in said)


def test_no_room_anywhere_gives_way_to_messages_with_a_warning(mpirun: Callable, tmp_path: Path) -> None:
    """The process may write no file of more than 1 MiB."""
    path = tmp_path / "program.py"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    path.write_text(PROGRAM.replace("comm = Communicator()", textwrap.dedent(limit) + "comm = Communicator()"))
    done = mpirun(2, path, 10, 1_000_000)
    assert done.returncode == 0, done.stderr
    assert "ranks send messages instead" in done.stderr
    assert "MPIDL_SHM_DIR" in done.stderr


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_node
@pytest.mark.parametrize("kind", ["empty", "shared"])
def test_a_file_has_no_name_before_memory_is_reserved(
    comm: Communicator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing stays behind of a job that is killed as there is too little memory."""
    names: list[int] = []
    fill = os.posix_fallocate

    def look(file: int, start: int, nbytes: int) -> None:
        names.append(os.fstat(file).st_nlink)
        fill(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", look)
    getattr(comm, kind)(10_000, np.float32)
    assert names == ([] if kind == "shared" and comm.local_rank else [0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_node
def test_a_warning_that_is_an_error_is_one_on_all_ranks(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no rank waits for one that has left."""
    group = comm.duplicate()
    monkeypatch.setenv("MPIDL_SHM_DIR", str(tmp_path / "missing"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="which is slower"):
            group.empty(10, np.float32)
    group.close()


@pytest.mark.thorough
def test_a_warning_says_that_descriptors_have_run_out(mpirun: Callable, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import resource, os, numpy as np\n"
        "from collectives import Communicator\n"
        "comm = Communicator()\n"
        "if comm.rank:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), os.dup(0) + 1))\n"
        "x = comm.empty(10, np.float32)\n"
        "comm.all_reduce(x)\n"
    )
    done = mpirun(2, path)
    assert done.returncode == 0, done.stderr
    assert (
        "the node's ranks cannot share 8 KiB; ranks send messages instead: a rank of the node has as many"
        in done.stderr
    )
    assert "(ulimit -n)" in done.stderr


@pytest.mark.thorough
def test_a_job_that_is_killed_would_leave_no_file_of_the_mpi_library(mpirun) -> None:
    code = (
        "from collectives import Communicator\n"
        "from collectives.memory.leftovers import mapped\n"
        "Communicator().barrier()\n"
        "print(f'named: {any(mapped().values())}\\n', end='')"
    )
    done = mpirun(2, "-c", code)
    assert done.returncode == 0, done.stderr  # MPI_Finalize does not miss it
    assert done.stdout.count("named: False") == 2
