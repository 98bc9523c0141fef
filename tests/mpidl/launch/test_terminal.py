"""Jobs in the foreground of a terminal: Ctrl-C, once and twice, and the terminal closed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.memory.leftovers import mapped
from mpidl import STOPPED
from tests.harness import launch

# Trains, as it were, with state in symmetric memory and a file that is removed at the end, and saves when asked to.
JOB = """
import os, pathlib, sys, time, torch, mpidl
folder = pathlib.Path(sys.argv[1])
comm, stop = mpidl.init(), mpidl.StopSignal()
shared = comm.empty(1000, torch.float32)
(folder / f"rank-{comm.rank}.new").write_text(str(os.getpid()))
(folder / f"rank-{comm.rank}.new").rename(folder / f"rank-{comm.rank}")
while not stop.requested():
    comm.all_reduce(shared)
    print("a step", flush=True)
    time.sleep(0.02)
if comm.rank == 0:
    (folder / "saved").touch()
stop.exit()
"""


class Terminal:
    """A terminal with a job of 2 ranks in its foreground."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.said = b""
        self._folder = folder
        self._leader, follower = pty.openpty()
        (folder / "tmp").mkdir()
        changes = {"MPIDL_SHM_DIR": str(folder / "tmp"), "TMPDIR": str(folder / "tmp")}
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=launch.environment(PYTHONPATH=str(launch.ROOT), **changes),
            cwd=launch.ROOT,
            preexec_fn=self._open,
        )
        os.close(follower)

    @staticmethod
    def _open() -> None:
        """Makes it the terminal of a new session, and this process the one in its foreground."""
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGHUP):  # the process that has started the tests may ignore them
            signal.signal(number, signal.SIG_DFL)

    def read(self, seconds: float) -> None:
        """Reads what comes in these seconds."""
        end = time.monotonic() + seconds
        while self._leader >= 0 and (left := end - time.monotonic()) > 0:
            if select.select([self._leader], [], [], left)[0]:
                try:
                    self.said += os.read(self._leader, 1 << 16)
                except OSError:  # no process has it open
                    return

    def press(self, key: bytes) -> None:
        os.write(self._leader, key)

    def close(self) -> None:
        if self._leader >= 0:
            os.close(self._leader)
            self._leader = -1

    def ranks(self) -> list[int]:
        """Their process ids, once both have come through `init`."""
        while len(found := list(self._folder.glob("rank-?"))) < 2:
            self.read(0.05)
            assert self.process.poll() is None, self.said.decode()
        return [int(path.read_text()) for path in found]

    def status(self) -> int:
        while self.process.poll() is None:
            self.read(0.05)
            if self._leader < 0:
                time.sleep(0.05)
        self.read(0.2)
        return self.process.returncode


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    command = [launch.launcher(), "-n", "2", sys.executable, "-c", JOB, str(tmp_path)]
    if request.param == "mpidl.launch":
        command = [sys.executable, "-m", "mpidl.launch", "--", *command]
    made = Terminal(tmp_path, command)
    yield made
    made.process.send_signal(signal.SIGTERM)
    made.close()
    made.process.wait(30)


def runs(pid: int) -> bool:
    """False for a process that has ended and was not waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


ACTS = ["interrupt", "interrupt_twice", "interrupt_and_close", "interrupt_the_launcher", "close"]
THOROUGH = [*(f"mpirun-{act}" for act in ACTS), *(f"mpidl.launch-{act}" for act in (ACTS[0], *ACTS[2:]))]


def interrupt(terminal: Terminal) -> None:
    terminal.press(b"\x03")


def interrupt_twice(terminal: Terminal) -> None:
    terminal.press(b"\x03")
    terminal.read(0.05)
    terminal.press(b"\x03")


def interrupt_and_close(terminal: Terminal) -> None:
    terminal.press(b"\x03")
    terminal.read(0.05)
    terminal.close()


def interrupt_the_launcher(terminal: Terminal) -> None:
    """Alone, not what else is in the foreground."""
    terminal.process.send_signal(signal.SIGINT)


def close(terminal: Terminal) -> None:
    terminal.close()


@pytest.mark.thorough(*THOROUGH)
@pytest.mark.limit(90)
@pytest.mark.job
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("terminal", ["mpirun", "mpidl.launch"], indirect=True)
def test_nothing_is_left_of_a_job(terminal: Terminal, tmp_path: Path, act: str, request: pytest.FixtureRequest) -> None:
    ranks = terminal.ranks()
    segments = {path for pid in ranks for path in mapped(pid, open_mpi=True)}
    globals()[act](terminal)
    status, said = terminal.status(), terminal.said.decode()
    launched = "mpidl.launch" in request.node.callspec.id
    if launched:
        assert status == (STOPPED if act == "close" else 130), said
        if act == "close":
            assert (tmp_path / "saved").exists()
    elif act != "interrupt_twice":  # then MPICH's may fail in its own way, also with status 0
        assert status != 0, said
    assert "Traceback" not in said
    deadline = time.monotonic() + (0 if launched else 5)  # mpirun ends before its ranks
    while any(map(runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in ranks if runs(pid)] == []
    left = [*(path for path in segments if Path(path).exists()), *map(str, (tmp_path / "tmp").iterdir())]
    if act in ("interrupt_twice", "interrupt_and_close") and not launched:
        # Open MPI's own, of an mpirun that has given up; or an empty file of a rank that was killed as it made it.
        for path in left:
            empty = re.search(r"/mpidl-\w{16}$", path) and Path(path).stat().st_size == 0
            assert empty or re.search(r"/sm_segment\.|/ompi\.\d+$", path), left
            Path(path).unlink() if Path(path).is_file() else shutil.rmtree(path)
    else:
        assert left == []
