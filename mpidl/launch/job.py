"""A single run of a command: its process group, its output, and the removal of all processes and files that it left.

Ranks are not children of this process, nor of one process group: launchers give each a session of its own. They are
known by a token in their environment, `MPIDL_JOB`, which this machine's launchers hand on, and files of shared memory
carry it in their names: so what is ended and removed is the job's own, and nothing else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pty
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from collectives.diagnostics import JOB, Witness, directories, mapped

from ..job.control_group import killed_for_memory
from ..resuming import NEWEST_CHECKPOINT
from .command import is_launcher
from .report import Report
from .streams import OutputStream

_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_TERM_GRACE_S = 5.0  # seconds between asking processes to end and ending them
# Seconds in which a process may still become a rank: its environment is the parent's until it calls exec.
_MAY_BECOME_RANK_S = 10.0


class Job:
    """A running command. Its standard input is empty, and its output passes through this process.

    newest_checkpoint: the newest checkpoint of earlier runs; the command finds it in `MPIDL_CAME_TO`.
    """

    def __init__(self, command: Sequence[str], newest_checkpoint: str | None = None) -> None:
        self.token = secrets.token_hex(8)
        # Processes that are no rank so far, and until when each is looked at; those older than the job never are.
        self._non_ranks = dict.fromkeys(_processes(), -math.inf)
        self._ranks_without_memory: set[int] = set()  # ranks of which no memory of the MPI library has been seen yet
        self._segments: set[str] = set()  # files that ranks have mapped, and so the job's own
        self._killed_before = killed_for_memory()
        # This process is not part of MPI, and said so to mpi4py by a variable that ranks must not see.
        environment = {name: value for name, value in os.environ.items() if name != "MPI4PY_RC_INITIALIZE"}
        if newest_checkpoint is not None:
            environment[NEWEST_CHECKPOINT] = newest_checkpoint
        self.report = Report(Witness(self.token))
        # MPICH tells on standard output which process was killed.
        self._streams = [OutputStream(pty.STDERR_FILENO), OutputStream(pty.STDOUT_FILENO)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=self._streams[0].write_end,
                stdout=self._streams[1].write_end,
                env={**environment, JOB: self.token},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError:
            self.report.close()
            for stream in self._streams:
                stream.close()
            raise
        for stream in self._streams:
            stream.begin()

    @property
    def lines(self) -> list[str]:
        """Last lines of standard error, then of standard output."""
        return [line for stream in self._streams for line in stream.lines]

    def cause(self, status: int) -> str:
        """Explains why the command ended with this status. To be called after `end`."""
        return self.report.cause(status, self.lines, killed_for_memory() > self._killed_before)

    def poll(self) -> int | None:
        """Returns the command's status, None while it runs, and takes note of its ranks."""
        self.report.refresh()
        now = time.monotonic()
        known, self._non_ranks = self._non_ranks, {}
        for pid in _processes():
            if pid in self.report.ranks:
                continue
            until = known.get(pid, now + _MAY_BECOME_RANK_S)
            if now < until and self._is_of_this_job(variables := _environment(pid)):
                rank = next((variables[name] for name in _RANK if name in variables), "")
                if rank.isdigit():
                    self.report.ranks[pid] = int(rank)
                    self.report.watch(pid)
                    self._ranks_without_memory.add(pid)
                    continue
                until = now + _MAY_BECOME_RANK_S  # a launcher: it may start ranks at any time
            self._non_ranks[pid] = until
        for pid in list(self._ranks_without_memory):
            if files := mapped(pid, open_mpi=True):
                self._ranks_without_memory.discard(pid)
                self._segments.update(path for path, named in files.items() if named)
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher, which passes it on to the ranks.

        The launcher is the command itself, or a process that it has started: a shell would end without passing it on.
        """
        launchers = {pid: parent for pid, parent in self._parents().items() if _starts_ranks(pid)}
        first = [pid for pid, parent in launchers.items() if parent not in launchers]
        if not first or self._process.pid in first:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            return
        for pid in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _parents(self) -> dict[int, int]:
        """Returns the parent of each process of the job, the command itself among them."""
        found = {}
        for pid in self._processes():
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = int(after_name[1])
        return found

    def end(self) -> list[str]:
        """Ends the job's processes and removes its files on this machine; returns a description of each it found."""
        found: list[str] = []
        if self._process.poll() is None:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_GRACE_S)
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        deadline = time.monotonic() + 1  # the launcher's helpers take a moment
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                found.append(f"process {pid}")
        deadline = time.monotonic() + _TERM_GRACE_S
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.report.close()
        for directory in directories():
            self._segments.update(map(str, Path(directory).glob(f"mpidl-{self.token}-*")))
        for path in sorted(self._segments):
            with contextlib.suppress(OSError):
                os.unlink(path)
                found.append(path)
        # Open MPI's launcher keeps a directory for each job, and one that gives up or is killed leaves it.
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self._process.pid}", ignore_errors=True)
        for stream in self._streams:
            stream.join(_TERM_GRACE_S)
        return found

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _processes(self) -> list[int]:
        """Lists the job's running processes; one that has ended but was not waited for has no environment."""
        return [pid for pid in _processes() if self._is_of_this_job(_environment(pid))]

    def _is_of_this_job(self, variables: dict[str, str]) -> bool:
        return variables.get(JOB) == self.token


def _processes() -> Iterator[int]:
    """Yields all other processes of the machine, where the system shows them as files."""
    own = os.getpid()
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own)


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # ended, or another user's
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _starts_ranks(pid: int) -> bool:
    """Recognises a launcher, or an interpreter that runs one."""
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return any(is_launcher([argument]) for argument in arguments[:2])
    return False


def _end_with_parent() -> None:
    """Makes the kernel send SIGTERM to a new process when its parent dies, as nothing would end the job then."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
