"""Starts programs under this environment's mpirun."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What a launcher, an initialised MPI or mpidl.init() leaves in the environment; no new job may inherit it.
_LEFT_BEHIND = ("PMI", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL", "OMPI_", "OPAL_", "PRTE_", "PALS_")
_LEFT_BEHIND_EXACTLY = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")  # the user's own
_OF_ONE_JOB = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "PRTE_MCA_ess")
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
_YIELDING = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}  # of MPICH: a rank that waits leaves its core to others at once
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_running: set[subprocess.Popen[str]] = set()


def environment(**changes: str | None) -> dict[str, str]:
    """The variables of a fresh job: no leftovers, one thread a rank.

    Output is not buffered, so that ranks which are killed have said what they printed.

    changes: variables to set, or to leave out where the value is None.
    """
    kept = {name: value for name, value in os.environ.items() if not _left_behind(name)}
    kept |= _OPEN_MPI | _YIELDING | (_AS_ROOT if os.geteuid() == 0 else {})
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


def _left_behind(name: str) -> bool:
    if name.startswith(_SETTINGS):
        return name.startswith(_OF_ONE_JOB)
    return name.startswith(_LEFT_BEHIND) or name in _LEFT_BEHIND_EXACTLY


def launcher() -> str:
    """The mpirun next to this interpreter, or on the PATH; not Intel MPI's, a script that passes on no signals."""
    programs = Path(sys.executable).parent
    found = next((str(programs / name) for name in ("mpiexec.hydra", "mpirun") if (programs / name).exists()), None)
    found = found or shutil.which("mpirun")
    assert found, "there is no mpirun in this environment"
    return found


def mpirun(
    ranks: int, *arguments: object, timeout: float = 60, cwd: Path = ROOT, **env: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` on `ranks` ranks; all of it is killed after `timeout` seconds.

    env: see `environment`.
    """
    command = [launcher(), "-n", str(ranks), sys.executable, *map(str, arguments)]
    return run(command, timeout, cwd, environment(**env))


def run(command: list[str], timeout: float, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, which is ended after `timeout` seconds."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    _running.add(process)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = _end(process)
        raise AssertionError(f"{command} did not end within {timeout} s\n{out}\n{err}") from None
    except BaseException:
        _end(process)
        raise
    finally:
        _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a launcher and, through it, its ranks, which are not of its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        try:
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    return "", "(its output is still open)"


def end_all() -> None:
    """Ends all that `run` has under way; for a process that is about to die."""
    for number, pause in ((signal.SIGTERM, 2), (signal.SIGKILL, 0)):
        for process in list(_running):
            _signal(process, number)
        for process in list(_running):
            try:
                process.wait(pause)
            except subprocess.TimeoutExpired:
                continue


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, number)
