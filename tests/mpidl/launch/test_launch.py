"""The restart wrapper, on commands that are plain processes; one real job stands in tests/mpidl/launch/test_kill.py."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collectives.diagnostics import Position
from mpidl.errors import UsageError
from mpidl.launch import supervise
from mpidl.launch.__main__ import main, parse
from mpidl.launch.command import ranks_of, with_ranks
from mpidl.launch.report import Report
from mpidl.launch.supervise import RestartPlan, Supervisor
from tests.harness import launch

# A "job" that notes its run in the file `count`, saves `step-<run>` where it is told to, and ends as told for this run.
JOB = """
import os, sys, time, signal, pathlib
folder, ends, saves = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
folder.mkdir(exist_ok=True)
count = folder / "count"
run = int(count.read_text()) if count.exists() else 0
count.write_text(str(run + 1))
if saves == "yes":
    (folder / "ckpt").mkdir(exist_ok=True)
    (folder / "ckpt" / f"step-{run:08d}").mkdir()
end = ends[min(run, len(ends) - 1)]
print("run", run, *sys.argv[4:], file=sys.stderr)
if end == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    (folder / "waits").touch()
    time.sleep(60)
if end == "deaf":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1))  # as Open MPI's mpirun ends
    (folder / "waits").touch()
    time.sleep(60)
if end == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(end))
"""


@pytest.fixture(autouse=True)
def newest_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories stand for checkpoints."""
    monkeypatch.setattr(
        supervise, "newest", lambda folder: (max(folder.glob("step-*"), default=None) if folder.exists() else None, [])
    )
    monkeypatch.setattr(supervise, "number_of", lambda path: path.stat().st_ino)  # other when it is made anew


@pytest.fixture(autouse=True)
def signals_have_their_meaning() -> Iterator[None]:
    """Gives signals that the tests' own caller ignores, as nohup does, their default meaning in a test."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def command(folder: Path, ends: str, saves: str = "no") -> list[str]:
    return [sys.executable, "-c", JOB, str(folder), ends, saves]


def started(tmp_path: Path) -> int:
    return int((tmp_path / "count").read_text())


@pytest.mark.parametrize("ends", ["0", "1,0", "kill,3,0"])
def test_a_job_is_started_again_until_it_is_done(tmp_path: Path, ends: str) -> None:
    supervisor = Supervisor(RestartPlan(command(tmp_path, ends), backoff=0))
    assert supervisor.run() == 0
    assert started(tmp_path) == len(ends.split(",")) == len(supervisor.runs)


@pytest.mark.parametrize(("ends", "status"), [("7", 7), ("kill", 137)])
def test_restarts_come_to_an_end_with_the_job_s_status(tmp_path: Path, ends: str, status: int) -> None:
    assert Supervisor(RestartPlan(command(tmp_path, ends), backoff=0, max_restarts=2)).run() == status
    assert started(tmp_path) == 3


def test_without_newer_checkpoints_it_gives_up_earlier(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = RestartPlan(command(tmp_path, "1"), tmp_path / "ckpt", backoff=0, max_restarts=9, patience=2)
    assert Supervisor(plan).run() == 1
    assert started(tmp_path) == 2
    assert "giving up: no newer checkpoint in 2 runs in a row" in capfd.readouterr().err


def test_progress_is_patience_s_measure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = RestartPlan(command(tmp_path, "1,1,1,0", "yes"), tmp_path / "ckpt", backoff=0, max_restarts=9, patience=1)
    supervisor = Supervisor(plan)
    assert supervisor.run() == 0
    assert [run.came_to and Path(run.came_to).name for run in supervisor.runs] == [f"step-{n:08d}" for n in range(4)]
    said = capfd.readouterr().err
    assert f"restart 3 of 9 from {tmp_path}/ckpt/step-00000002" in said
    assert "finished after 3 restarts" in said


def test_a_job_that_has_come_further_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not one that finds what was there before its first run."""
    say = 'import os, sys; print("came to", os.environ.get("MPIDL_CAME_TO"), file=sys.stderr);'
    for saves, told in (("no", "None"), ("yes", str(tmp_path / "yes/ckpt/step-00000000"))):
        folder = tmp_path / saves
        (folder / "ckpt" / "step--1").mkdir(parents=True)
        program = [sys.executable, "-c", say + JOB, str(folder), "1,0", saves]
        plan = RestartPlan(program, checkpoint=folder / "ckpt", max_restarts=3, patience=3, backoff=0.0)
        assert Supervisor(plan).run() == 0
        said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("came to")]
        assert said == ["came to None", f"came to {told}"]


def test_a_checkpoint_that_was_being_written_is_removed(tmp_path: Path) -> None:
    for name in ("step-00000007", "step-00000009.tmp", "step-00000008.gone", "other.tmp"):
        (tmp_path / "ckpt" / name).mkdir(parents=True)
    Supervisor(RestartPlan(command(tmp_path, "1"), tmp_path / "ckpt", backoff=0, max_restarts=0)).run()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["other.tmp", "step-00000007"]


@pytest.mark.parametrize("status", [75, 2])
def test_a_stopped_job_and_wrong_use_are_not_started_again(tmp_path: Path, status: int) -> None:
    assert Supervisor(RestartPlan(command(tmp_path, str(status)), backoff=0)).run() == status
    assert started(tmp_path) == 1


@pytest.mark.parametrize("job", ["wait", "deaf"])
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
    ids=lambda given: getattr(given, "name", None),
)
def test_signals_are_passed_on_and_the_job_is_not_started_again(
    tmp_path: Path, number: signal.Signals, status: int, job: str
) -> None:
    """The job heeds them, or is ended by them, as before it has made its StopSignal."""

    def send() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=send).start()
    assert Supervisor(RestartPlan(command(tmp_path, job), backoff=0)).run() == status
    assert started(tmp_path) == 1
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_that_comes_while_a_job_is_started_is_passed_on_once(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A second interrupt would end a launcher at once. It comes before or after the supervisor knows the job."""
    got: list[int] = []

    class StartingJob:
        report = Report()

        def __init__(self, *_: object) -> None:
            if when == "before":
                signal.raise_signal(signal.SIGINT)

        def signal(self, number: int) -> None:
            got.append(number)

        def poll(self) -> int:
            return 1

        def end(self) -> list[str]:
            return []

        def cause(self, status: int) -> str:
            return f"status {status}"

    class Interrupted(Supervisor):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_job" and value is not None and when == "after":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(supervise, "Job", StartingJob)
    assert Interrupted(RestartPlan(["a-job"], backoff=0)).run() == 130
    assert got == [signal.SIGINT]


def test_after_an_interrupt_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    def send() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=send).start()
    assert Supervisor(RestartPlan(command(tmp_path, "deaf"), backoff=0)).run() == 130


def test_under_nohup_neither_it_nor_its_job_heeds_a_closed_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    job = "import os, signal; print(signal.getsignal(signal.SIGHUP)); os.kill(os.getppid(), signal.SIGHUP)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert Supervisor(RestartPlan([sys.executable, "-c", job])).run() == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().out == f"{signal.SIG_IGN!s}\n"


def test_a_signal_while_the_job_is_being_started_is_not_lost(tmp_path: Path, monkeypatch) -> None:
    class Slow(supervise.Job):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            while not (tmp_path / "waits").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervise, "Job", Slow)
    assert Supervisor(RestartPlan(command(tmp_path, "wait"), backoff=0)).run() == 75


def test_a_signal_between_two_runs_ends_the_waiting(tmp_path: Path) -> None:
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert Supervisor(RestartPlan(command(tmp_path, "1"), backoff=60)).run() == 75
    assert started(tmp_path) == 1


def test_what_a_job_leaves_is_ended_and_removed_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    """A process in a session of its own, and files that the job's allocator and its launcher would have made."""
    monkeypatch.setenv("MPIDL_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mpidl-0123-4567").touch()
    (tmp_path / "ompi.1").mkdir()
    stranger = subprocess.Popen(["sleep", "60"], env={**os.environ, "MPIDL_JOB": "0123"}, start_new_session=True)
    script = (
        f'mkdir -p "{tmp_path}/ompi.$$/0"; setsid sleep 60 & echo $! >{tmp_path}/pid; '
        f'touch "{tmp_path}/mpidl-$MPIDL_JOB-89ab"; sleep 0.3; exit 1'
    )
    try:
        supervisor = Supervisor(RestartPlan(["sh", "-c", script], backoff=0, max_restarts=0))
        assert supervisor.run() == 1
        left = int((tmp_path / "pid").read_text())
        assert supervisor.runs[0].left_behind[0] == f"process {left}"
        with contextlib.suppress(OSError):  # it may be gone already
            assert not Path(f"/proc/{left}/environ").read_bytes()
        assert [path.name for path in tmp_path.glob("mpidl-*")] == ["mpidl-0123-4567"]
        assert [path.name for path in tmp_path.glob("ompi.*")] == ["ompi.1"]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


_STARTS_RANKS = (
    "import os, subprocess, time; "
    "ranks = [subprocess.Popen({program!r}, env={{**os.environ, 'PMI_RANK': str(rank)}}) for rank in range(2)]; "
    "time.sleep(0.5); {then}"
)


def test_a_job_ends_whose_launcher_takes_no_notice_of_a_killed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel MPI's launcher takes none of one that is killed before it has initialised MPI."""
    monkeypatch.setattr("mpidl.launch.report.UNHEEDED", 0.3)
    job = _STARTS_RANKS.format(program=["sleep", "60"], then="ranks[1].kill(); time.sleep(60)")
    supervisor = Supervisor(RestartPlan([sys.executable, "-c", job], backoff=0, max_restarts=0))
    assert supervisor.run() == 137
    assert supervisor.runs[0].seconds < 30
    assert supervisor.runs[0].cause == (
        "status 137: rank 1 was ended by SIGKILL before it had initialised MPI, and its launcher did not end the job"
    )


def test_processes_that_a_rank_kills_and_forgets_do_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as workers of a loader, which bear the variables of their rank."""
    monkeypatch.setattr("mpidl.launch.report.UNHEEDED", 0.3)
    rank = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); time.sleep(0.5); p.kill(); time.sleep(2)"
    job = _STARTS_RANKS.format(program=[sys.executable, "-c", rank], then="[rank.wait() for rank in ranks]")
    assert Supervisor(RestartPlan([sys.executable, "-c", job], backoff=0, max_restarts=0)).run() == 0


def test_a_signal_reaches_the_launcher_that_a_script_has_started(tmp_path: Path) -> None:
    """And not the shell, which would end by it and leave the launcher alone."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!{sys.executable}\n" + JOB)
    mpirun.chmod(0o755)
    script = f"{mpirun} {tmp_path} wait no; status=$?; echo $status >{tmp_path}/status; exit $status"

    def send() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert Supervisor(RestartPlan(["bash", "-c", script], backoff=0)).run() == 75
    assert (tmp_path / "status").read_text() == "75\n"


def test_a_job_is_asked_to_end_if_what_has_started_it_is_killed(tmp_path: Path) -> None:
    job = (
        "import os, pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'asked').touch(), os._exit(0)))\n"
        "(folder / 'waits').touch()\n"
        "time.sleep(60)\n"
    )
    wrapper = [sys.executable, "-m", "mpidl.launch", "--", sys.executable, "-c", job, str(tmp_path)]
    environment = launch.environment(MPIDL_SHM_DIR=str(tmp_path))
    process = subprocess.Popen(wrapper, env=environment, cwd=launch.ROOT)
    while not (tmp_path / "waits").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    while not (tmp_path / "asked").exists():  # within the test's limit
        time.sleep(0.05)
    assert list(tmp_path.glob("mpidl-*")) == []


def test_fewer_ranks(tmp_path: Path) -> None:
    """A shell script that stands for mpirun: its number of ranks is an argument of the job."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nshift; ranks=$1; shift\nexec "$@" $ranks\n')
    mpirun.chmod(0o755)

    def ranks(**how: object) -> list[int | None]:
        folder = tmp_path / str(how).replace(" ", "")
        job = [str(mpirun), "-n", "4", *command(folder, "1,1,1,0")]
        supervisor = Supervisor(RestartPlan(job, folder / "ckpt", backoff=0, max_restarts=9, patience=9, **how))  # type: ignore[arg-type]
        assert supervisor.run() == 0
        return [run.ranks for run in supervisor.runs]

    assert ranks() == [4, 4, 4, 4]
    assert ranks(ranks_on_restart=[3, 1]) == [4, 3, 1, 1]
    assert ranks(min_ranks=2) == [4, 3, 2, 2]
    assert ranks(min_ranks=5) == [4, 4, 4, 4]
    assert ranks(min_ranks=1, ranks_divide=12) == [4, 3, 2, 1]
    assert ranks(min_ranks=1, ranks_divide=4) == [4, 2, 1, 1]
    assert ranks(min_ranks=3, ranks_divide=4) == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("given", "ranks", "for_two"),
    [
        ("mpirun -n 4 python -n 7", 4, "mpirun -n 2 python -n 7"),
        ("/a/b/mpiexec.hydra -np 16 x", 16, "/a/b/mpiexec.hydra -np 2 x"),
        ("srun --ntasks=8 --mpi=pmix a", 8, "srun --ntasks=2 --mpi=pmix a"),
        ("srun -n8 a", 8, "srun -n2 a"),
        ("/usr/bin/srun -c 4 -n 8 python", 8, "/usr/bin/srun -c 4 -n 2 python"),
        ("mpirun -c 4 python", 4, "mpirun -c 2 python"),
        ("mpirun -ppn 3 -n 6 python", 6, "mpirun -ppn 3 -n 2 python"),
        ("mpirun python x.py -n 3", None, None),
        ("python x.py -n 3", None, None),
    ],
)
def test_the_number_of_ranks_in_a_command(given: str, ranks: int | None, for_two: str | None) -> None:
    assert ranks_of(given.split()) == ranks
    if for_two is None:
        with pytest.raises(UsageError, match="needs -n"):
            with_ranks(given.split(), 2)
    else:
        assert with_ranks(given.split(), 2) == for_two.split()


HYDRA = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 3478 RUNNING AT vm
=   EXIT CODE: 9
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
INTEL = "=   RANK {} PID {} RUNNING AT vm\n=   KILLED BY SIGNAL: {} (...)\n=====\n\n"
OPEN_MPI = "prterun noticed that process rank 1 with PID 6646 on node vm exited on\nsignal 9 (Killed).\n"
SRUN = "srun: error: node7: {}\nsrun: error: node8: task 0: Killed\n"
RAISED = """mpidl: rank 1 of 3 ends the job: Traceback (most recent call last):
  File "x.py", line 13, in <module>
    raise KeyError("why")
KeyError: 'why'
Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1
"""
LATE = """mpidl: rank 0 of 3 has waited 2 s in barrier (operation 3 of this communicator)
  arrived: ranks 0, 2
  not arrived: rank 1, which is after all_reduce (operation 2)
"""


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (9, HYDRA, "status 9: rank 1 on vm was ended by SIGKILL"),
        (9, HYDRA.replace("3478", "12"), "status 9: process 12 on vm was ended by SIGKILL"),
        (137, OPEN_MPI, "status 137: rank 1 on vm was ended by SIGKILL"),
        (1, RAISED, "status 1: rank 1: KeyError: 'why'"),
        (1, RAISED.replace(" ends", ", in feeder ends"), "status 1: rank 1, in feeder: KeyError: 'why'"),
        (
            1,
            LATE,
            "status 1: waited without end in barrier (operation 3 of this communicator) for rank 1, which is after "
            "all_reduce (operation 2)",
        ),
        (
            1,
            LATE + LATE.replace("rank 0 of", "rank 2 of"),
            "status 1: waited without end in barrier (operation 3 of this communicator) for rank 1, which is after "
            "all_reduce (operation 2)",
        ),
        (
            1,
            LATE.splitlines()[0] + "\n  arrived: ranks 0, 1, 2\n  silent for 2 s, as if stopped or gone: rank 1",
            "status 1: waited without end in barrier (operation 3 of this communicator) for rank 1, silent for 2 s, as "
            "if stopped or gone",
        ),
        (
            1,
            LATE.splitlines()[0]
            + "\n  the ranks are in different operations: barrier on rank 0, split on rank 1; MPIDL_DEBUG=1",
            "status 1: waited without end in barrier (operation 3 of this communicator) for ranks in other operations: "
            "barrier on rank 0, split on rank 1",
        ),
        (9, HYDRA.replace("PID", "RANK 5 PID"), "status 9: rank 5 on vm was ended by SIGKILL"),
        (9, "took signal 3\n" + HYDRA + "signal 11", "status 9: rank 1 on vm was ended by SIGKILL"),
        (
            10,
            HYDRA.replace("Killed (signal 9", "User defined signal 1 (signal 10"),
            "status 10: rank 1 on vm was ended by SIGUSR1",
        ),
        (255, INTEL.format(2, 12, 9), "status 255: rank 2 on vm was ended by SIGKILL"),
        (255, INTEL.format(0, 12, 9) + INTEL.format(1, 3478, 11), "status 255: rank 1 on vm was ended by SIGSEGV"),
        (255, INTEL.format(0, 12, 9) + INTEL.format(1, 13, 9), "status 255: ranks on vm were ended by SIGKILL"),
        (137, SRUN.format("task 1: Killed"), "status 137: rank 1 on node7: ended by SIGKILL"),
        (139, SRUN.format("task 1: Segmentation fault (core dumped)"), "status 139: rank 1 on node7: ended by SIGSEGV"),
        (1, SRUN.format("tasks 2,4-5: Out Of Memory"), "status 1: ranks 2,4-5 on node7: Out Of Memory"),
        (5, SRUN.format("task 1: Exited with exit code 5"), "status 5"),
        (130, "mpidl: rank 2 of 3 ends the job: interrupted", "status 130: rank 2: interrupted"),
        (1, "error: /a/b: No space left on device", "status 1: /a/b: No space left on device"),
        (2, "error: /a: no such file\nmore", "status 2: the command was used wrongly: /a: no such file"),
        (75, "", "status 75: was asked to stop, and can go on"),
        (143, "", "status 143: ended by SIGTERM"),
        (5, "no idea", "status 5"),
    ],
)
def test_causes(status: int, said: str, expected: str) -> None:
    report = Report()
    report.processes = {1: ("vm", 3478)}
    assert report.cause(status, said.splitlines()) == expected


def test_of_ranks_that_intel_mpi_has_killed_the_one_that_ended_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    report.processes = {0: (platform.node(), 11), 1: (platform.node(), 12), 2: (platform.node(), 13)}
    killed = [INTEL.replace("vm", platform.node()).format(rank, 11 + rank, 9) for rank in range(3)]
    monkeypatch.setattr(report, "_end_times", {12: 1.0, 11: 1.1, 13: 1.1})
    told = report.cause(255, "".join(killed).splitlines())
    assert told == f"status 255: rank 1 on {platform.node()} was ended by SIGKILL"
    told = report.cause(255, (killed[0] + killed[2]).splitlines())  # it has ended with a status
    assert told == "status 255: rank 1 ended before the others"


@pytest.mark.parametrize(
    "said",
    [HYDRA, OPEN_MPI, SRUN.format("task 1: Killed"), INTEL.format(1, 3478, 9)],
    ids=["hydra", "open mpi", "srun", "intel"],
)
def test_what_a_rank_that_was_ended_was_in_is_told(said: str) -> None:
    report = Report()
    report.processes = {1: ("vm", 3478)}
    report.groups = [{1: Position(4, "all_reduce", inside=True)}]
    told = report.cause(9, said.splitlines())
    assert told.endswith("ended by SIGKILL: it was in all_reduce (operation 4)")


def test_memory_that_ran_out_is_named() -> None:
    told = Report().cause(9, [], killed_for_memory=True)
    assert told.endswith("because memory ran out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no command"),
        (["--max-restarts", "-1", "--", "x"], "needs at least 0"),
        (["--ranks-on-restart", "3,0", "--", "x"], "needs at least 1"),
        (["--min-ranks", "2", "--ranks-on-restart", "3", "--", "x"], "give one of them"),
        (["--min-ranks", "2", "--", "x"], "needs -n"),
        (["--ranks-divide", "4", "--", "x"], "needs --min-ranks"),
        (["--json", "/no/such/file", "--", "true"], "/no/such/file: cannot be written: No such file or directory"),
        (["--", "/no/such/program"], "/no/such/program: cannot be started"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_options_of_the_command_are_its_own() -> None:
    options = parse(["--max-restarts", "5", "--", "mpirun", "-n", "2", "--", "x", "--json", "y"])
    assert options.command == ["mpirun", "-n", "2", "--", "x", "--json", "y"]
    assert (options.max_restarts, options.json) == (5, None)


def test_as_a_command_it_initialises_no_mpi_and_does_not_keep_the_job_from_it(tmp_path: Path) -> None:
    look = "import os, sys; sys.exit(4 if 'MPI4PY_RC_INITIALIZE' in os.environ else 0)"
    done = launch.run(
        [sys.executable, "-m", "mpidl.launch", "--json", str(tmp_path / "x"), "--", sys.executable, "-c", look],
        60,
        launch.ROOT,
        launch.environment(),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "x").read_text())[0]["status"] == 0
