"""`make test` goes on where a phase has no test, and fails where one has a failure or none has any test."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# In place of the environment's python, and of mpirun: notes its phase, and ends as the test wants it to; of the
# processes that share tests, the one of number WHICH, or each if that is empty. With FIRST, of three that share tests,
# the one whose output comes as it runs ends when the other two have said something; these never do by themselves.
PYTHON = """#!/bin/sh
case "$*" in
    *--only-mpi*) echo mpi >>"$PHASES"; exit $STATUS_mpi ;;
    *--share*) echo shared >>"$PHASES" ;;
esac
if [ -n "$FIRST" ] && [ ! -p /dev/stdout ]; then
    echo "a test of another process" && : >"$PHASES-$$" && exec sleep 600
fi
while [ -n "$FIRST" ] && [ $(ls "$PHASES"-* 2>/dev/null | wc -l) -lt 2 ]; do sleep 0.1; done
for number in 1 2 3 4 5; do mkdir "$PHASES.$number" 2>/dev/null && break; done
[ "${WHICH:-$number}" = $number ] && exit $STATUS_shared
exit 0
"""
MPIRUN = """#!/bin/sh
shift 2
exec "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the Makefile, and an environment that it takes for finished."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", PYTHON), ("mpirun", MPIRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    for name in (".made", ".run", ".test"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def make_test(
    folder: Path, mpi: int, shared: int, ranks: str = "1 2", which: str = "", more: str = "PROCESSES=3", first: str = ""
) -> tuple[int, list[str], str]:
    """Runs `make test` with these statuses of pytest. Returns make's, the phases that ran, and what it wrote."""
    (folder / "phases").unlink(missing_ok=True)
    for taken in folder.glob("phases.*"):
        taken.rmdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PMI", "ARGS"))}
    env |= {"STATUS_mpi": str(mpi), "STATUS_shared": str(shared), "WHICH": which, "PHASES": str(folder / "phases")}
    env["FIRST"] = first
    command = ["make", "test", "MPI=mpich", f"NPROCS={ranks}", "ARGS=-m mpi", "FULL=", more]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, (folder / "phases").read_text().split(), done.stdout + done.stderr


ALL = ["mpi", "mpi", "shared", "shared", "shared"]


@pytest.mark.parametrize("statuses", [(0, 0), (0, 5), (5, 0)], ids=lambda each: "-".join(map(str, each)))
def test_a_phase_without_tests_is_no_error(folder: Path, statuses: tuple[int, int]) -> None:
    status, phases, written = make_test(folder, *statuses)
    assert status == 0, written
    assert sorted(phases) == ALL


def test_no_tests_in_any_phase_is_an_error(folder: Path) -> None:
    status, phases, written = make_test(folder, 5, 5)
    assert status != 0
    assert sorted(phases) == ALL
    assert "no test fits -m mpi" in written


@pytest.mark.parametrize(
    "statuses", [(1, 0), (0, 1), (5, 1), (0, 2), (139, 0)], ids=lambda each: "-".join(map(str, each))
)
def test_a_phase_that_fails_is_an_error(folder: Path, statuses: tuple[int, int]) -> None:
    status, phases, written = make_test(folder, *statuses)
    assert status != 0, written
    if statuses[0] not in (0, 5):
        assert phases == ["mpi"]  # and the others are not begun


@pytest.mark.parametrize("which", ["1", "2", "3"])
def test_a_failure_of_any_of_the_processes_that_share_tests_is_an_error(folder: Path, which: str) -> None:
    status, _, written = make_test(folder, 0, 1, which=which)
    assert status != 0, written


def test_when_the_first_process_fails_the_others_are_ended_and_heard(folder: Path) -> None:
    status, _, written = make_test(folder, 0, 1, ranks="2", first="yes")
    assert status != 0, written
    assert written.count("a test of another process") == 2


def test_tests_on_one_rank_run_with_the_others_and_are_heard_at_the_end(folder: Path) -> None:
    status, phases, written = make_test(folder, 0, 0, "1")
    assert status == 0, written
    assert sorted(phases) == ["mpi", "shared", "shared", "shared"]
    assert written.index("without MPI") < written.index("on 1 ranks") < written.rindex("without MPI")
    status, phases, written = make_test(folder, 3, 0, "1")
    assert status != 0, written
    assert "mpi" in phases


@pytest.mark.parametrize(("more", "processes"), [("PROCESSES=1", 1), ("PROCESSES=5", 5), ("MPI=impi", 1)])
def test_the_number_of_processes_may_be_given(folder: Path, more: str, processes: int) -> None:
    (folder / ".venv-impi").symlink_to(".venv")
    (folder / ".venv" / "bin" / "mpiexec.hydra").symlink_to("mpirun")
    status, phases, written = make_test(folder, 0, 0, "1", more=more)
    assert status == 0, written
    assert sorted(phases) == ["mpi", *["shared"] * processes]
