"""The table that `make test-gpu` ends with, and what it says where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collectives.devices import unusable_reason
from tests.gpus import ROOT, Run, check_ranks, follow, function, table
from tests.harness.launch import launcher

OUTPUT = """
tests/a/test_x.py::test_one[cuda-sum of two] PASSED                      [ 10%]
tests/a/test_x.py::test_one[cuda-max] FAILED                             [ 20%]
tests/a/test_x.py::test_two SKIPPED (no library (that knows)) [ 30%]
FAILED tests/a/test_x.py::test_one[cuda-max] - AssertionError
tests/a/test_y.py::test_three[4]
"""


def seen(title: str, output: str, status: int = 0) -> Run:
    run = Run(title, status)
    for line in output.splitlines():
        run.see(line)
    return run


def test_a_test_that_failed_or_did_not_end_is_named() -> None:
    runs = [seen("1 rank", OUTPUT, 1), seen("2 ranks", OUTPUT.replace("FAILED  ", "PASSED  ").split("FAILED")[0])]
    assert table(runs).splitlines() == [
        "                          1 rank    2 ranks",
        "test_x.py::test_one          1/2        2/2",
        "test_x.py::test_two      skipped    skipped",
        "test_y.py::test_three        0/1          -",
        "failed, 1 rank: tests/a/test_x.py::test_one[cuda-max]",
        "did not end, 1 rank: tests/a/test_y.py::test_three[4]",
        "skipped, 2 times: no library (that knows)",
    ]
    assert function("tests/a/test_x.py::test_one[a::b]") == "test_x.py::test_one"


def test_a_list_of_warnings_takes_no_verdict_away() -> None:
    run = seen("1 rank", OUTPUT + "\ntests/a/test_x.py::test_one[cuda-sum of two]\n  a warning\n")
    assert run.verdicts["tests/a/test_x.py::test_one[cuda-sum of two]"] == "PASSED"


def test_processes_that_are_no_job_are_told(tmp_path: Path) -> None:
    """It happens where mpi4py has loaded another MPI library than mpirun's."""
    alone = tmp_path / "mpirun"
    alone.write_text('#!/bin/sh\nshift 2\n"$@"\n"$@"\n')
    alone.chmod(0o755)
    assert "starts no job of 2 ranks" in check_ranks(str(alone))
    assert check_ranks(launcher()) == ""


def test_a_run_that_ends_without_a_word_failed() -> None:
    assert "failed, 4 ranks: the run ended with status 9" in table([seen("4 ranks", "", 9)])


def test_what_pytest_writes_is_understood(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_it(x):\n    assert x == 1\n"
        "def test_left():\n    pytest.skip('for a reason')\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    run = follow(Run("no MPI"), [*command, "-c", "/dev/null", "tests"], tmp_path)
    assert run.status == 1
    assert run.verdicts == {
        "tests/test_it.py::test_it[1]": "PASSED",
        "tests/test_it.py::test_it[2]": "FAILED",
        "tests/test_it.py::test_left": "SKIPPED",
    }
    assert run.reasons == {"tests/test_it.py::test_left": "for a reason"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    why = unusable_reason()
    for options, status, said in (([], 0, f"no GPU: not run ({why})\n"), (["--check"], 1, f"{why}\n")):
        command = [sys.executable, "tests/gpus.py", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout) == (status, said), done.stderr
