"""Worker processes that load data for a rank of an MPI job, and are no ranks themselves.

A process that is forked after MPI_Init shares the rank's connections: whatever it then does may hang or damage the
job. One that is started afresh inherits the environment, in which the launcher says "you are rank 3": it must not act
on that, also where it imports mpi4py, as the import of a training script does. So workers are started afresh, without
those variables and with an mpi4py that leaves MPI uninitialised. In each the thread `mpidl-parent` waits for the end of
the rank, and ends the worker then.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..job.runtime import WORKER

# By which the launchers of MPICH, Open MPI, Slurm and Cray tell a process its place in a job.
_OF_A_RANK = ("PMI", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL", "OMPI_", "OPAL_", "PRTE_", "PALS_")
_OF_A_WORKER = {"MPI4PY_RC_INITIALIZE": "0", WORKER: "1"}


def worker_context(given: str | BaseContext | None) -> BaseContext:
    """The context in which workers start. given: "forkserver", "spawn", or such a context; None: what is best here.

    That is "forkserver", as its second worker costs little more than a fork, or "spawn" where there is none or where
    one runs already that was started with the environment of a rank.
    """
    if given is None:
        found = "forkserver" in multiprocessing.get_all_start_methods() and not _inherited_server()
        given = "forkserver" if found else "spawn"
    method = given.get_start_method() if isinstance(given, BaseContext) else given
    if method not in ("forkserver", "spawn"):
        raise ConfigurationError(
            f"multiprocessing_context: got {method!r}; needs 'forkserver' or 'spawn', as a process that is forked "
            "after MPI was initialised shares the rank's connections and may hang the job"
        )
    made = multiprocessing.get_context(given) if isinstance(given, str) else given
    if method == "forkserver":
        # A server that has imported torch makes workers in milliseconds; "__main__" is Python's own default.
        made.set_forkserver_preload(["__main__", "torch", __name__])
    return made


def start_detached_tracker() -> None:
    """Lets Python's resource tracker, which removes the names of semaphores in the end, survive the rank.

    Where a launcher kills a rank it kills all of its process group, and the tracker with it, if that was not started in
    a session of its own. Python has no public way to start it so; one that runs already is left alone.
    """
    tracker: Any = resource_tracker._resource_tracker
    if getattr(tracker, "_fd", 0) is not None:
        return
    reading, writing = os.pipe()
    program = f"from multiprocessing.resource_tracker import main; main({reading})"
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[reading],
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    os.close(reading)
    started.returncode = 0  # it ends after this process: nothing to wait for
    tracker._fd, tracker._pid = writing, started.pid


@contextmanager
def environment_without_rank() -> Iterator[None]:
    """Context in which new processes get a worker's environment."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_OF_A_RANK) or name in _OF_A_WORKER}
    for name in kept:
        del os.environ[name]
    os.environ.update(_OF_A_WORKER)
    try:
        yield
    finally:
        for name in _OF_A_WORKER:
            os.environ.pop(name, None)
        os.environ.update(kept)


@dataclass(frozen=True)
class WorkerStart:
    """The first call in a worker: makes it end with its rank, then calls the user's function."""

    worker_init_fn: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        """Runs in the worker, as torch's worker_init_fn."""
        threading.Thread(target=_end_with_parent, name="mpidl-parent", daemon=True).start()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def _end_with_parent() -> None:
    """Ends the worker when its rank ends; torch watches the fork server instead, which waits for its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _inherited_server() -> bool:
    """Returns whether a fork server was started with an environment that is not known to be a worker's."""
    server: Any = forkserver
    pid = getattr(server._forkserver, "_forkserver_pid", None)  # Python has no public way to ask
    if pid is None:
        return False
    try:
        return f"{WORKER}=1".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
