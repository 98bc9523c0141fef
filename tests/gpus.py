"""Runs the tests that need a GPU, on 1, 2 and 4 ranks and without MPI, and shows in a table what passed.

    python tests/gpus.py                      what `make test-gpu` runs
    python tests/gpus.py -k matrix            with options of pytest
    python tests/gpus.py --check              only says why no GPU can be used here, with status 1

                                                    1 rank   2 ranks   4 ranks   no MPI
    test_gpu.py::test_256_mib_come_out_right           2/2       2/2       1/2        -
    test_gpu.py::test_a_kernel_gives_the_host_s_bits     -         -         -    72/72

The kernels run once more under compute-sanitizer, where the CUDA toolkit has installed that. The status is 1 if
something failed, or passed nowhere because it did not come to an end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = (1, 2, 4)
FOLDERS = ["tests/collectives", "tests/mpidl", "tests/examples"]
KERNELS = "tests/collectives/backends/cuda/test_gpu.py::test_a_kernel_gives_the_host_s_bits"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# As pytest -v writes them: "tests/a.py::test_b[c] PASSED   [ 10%]"; the verdict of a test that ends the run is missing.
_LINE = re.compile(r"^(tests/\S+?\.py::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?(?: +\[ *\d+%\])?)?\s*$")


@dataclass
class Run:
    """Result of a run. verdicts: by the whole name of a test; "" for one that did not come to an end."""

    title: str
    status: int = 0
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def see(self, line: str) -> None:
        """Notes a line of pytest's."""
        found = _LINE.match(line)
        if found:
            name, verdict, reason = found.groups()
            if verdict or name not in self.verdicts:  # the list of warnings names tests too
                self.verdicts[name] = verdict or ""
            if reason:
                self.reasons[name] = reason

    def cell(self, test: str) -> str:
        """Passed of those that ran, for all cases of a test."""
        verdicts = [verdict for name, verdict in self.verdicts.items() if function(name) == test]
        ran = [verdict for verdict in verdicts if verdict != "SKIPPED"]
        return f"{ran.count('PASSED')}/{len(ran)}" if ran else "skipped" if verdicts else "-"

    @property
    def wrong(self) -> list[str]:
        """The tests that did not pass."""
        return [name for name, verdict in self.verdicts.items() if verdict not in ("PASSED", "SKIPPED")]


def function(name: str) -> str:
    """A test's file and function, without its case."""
    path, _, test = name.partition("::")
    return f"{Path(path).name}::{test.partition('[')[0]}"


def table(runs: Sequence[Run]) -> str:
    """A line a test, a column a run; then what failed, and why something was skipped."""
    tests = list(dict.fromkeys(function(name) for run in runs for name in run.verdicts))
    width = max([len(test) for test in tests], default=0)
    widths = [max(len(run.title), 9) for run in runs]
    rows = [["", *(run.title for run in runs)], *([test, *(run.cell(test) for run in runs)] for test in tests)]
    lines = [
        f"{row[0]:<{width}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(row[1:], widths, strict=True))
        for row in rows
    ]
    for run in runs:
        for name in run.wrong:
            lines.append(f"{(run.verdicts[name] or 'did not end').lower()}, {run.title}: {name}")
        if run.status and not run.wrong:
            lines.append(f"failed, {run.title}: the run ended with status {run.status}")
    skipped: dict[str, list[str]] = {}
    for run in runs:
        for name, reason in run.reasons.items():
            skipped.setdefault(reason, []).append(name)
    return "\n".join([*lines, *(f"skipped, {len(names)} times: {reason}" for reason, names in skipped.items())])


def follow(run: Run, command: Sequence[str], cwd: Path = ROOT) -> Run:
    """Runs a command, shows its output as it comes and notes it."""
    print(f"== {run.title}: {' '.join(command)}", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            run.see(line)
    run.status = 0 if process.returncode == 5 else process.returncode  # no test was chosen
    return run


def check_ranks(mpirun: str) -> str:
    """Why processes of this mpirun are not the ranks of one job; empty if they are."""
    program = "from mpi4py import MPI; MPI.COMM_WORLD.rank or print(MPI.COMM_WORLD.size)"  # One writer: no lines mix.
    command = [mpirun, "-n", "2", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.stdout.split() == ["2"]:
        return ""
    said = " ".join((done.stdout + done.stderr).split())[-300:]
    return f"{mpirun} -n 2 starts no job of 2 ranks of mpi4py, which may have loaded another MPI library: {said}"


def tested(mpirun: str, options: Sequence[str]) -> list[Run]:
    """The tests on every number of ranks and without MPI."""
    folders = [] if any(option.startswith("tests/") for option in options) else FOLDERS
    pytest = [sys.executable, "-m", "pytest", "-v", "--color=no", "--gpu", *folders, *options]
    runs = [
        follow(Run(f"{ranks} rank{'s' * (ranks > 1)}"), [mpirun, "-n", str(ranks), *pytest, "--only-mpi"])
        for ranks in RANKS
    ]
    return [*runs, follow(Run("no MPI"), pytest)]


def sanitized() -> list[tuple[str, str]]:
    """The kernels under each of compute-sanitizer's tools: its name and what came of it."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"])
    program = shutil.which("compute-sanitizer", path=places)
    if program is None:
        return [
            (tool, "not run: compute-sanitizer is not installed (it is a part of the CUDA toolkit)") for tool in TOOLS
        ]
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that each array ends where its allocation does
    found = []
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "1", sys.executable, "-m", "pytest", "-v", "--color=no"]
        run = follow(Run(tool), [*command, "--gpu", KERNELS])
        passed = list(run.verdicts.values()).count("PASSED")
        clean = not run.status and not run.wrong and passed
        found.append((tool, f"clean, {passed} tests" if clean else f"FAILED, status {run.status}"))
    return found


def main(options: Iterable[str]) -> int:
    """Runs all and shows the table; the exit status."""
    from collectives.devices import unusable_reason

    why = unusable_reason()
    options = list(options)
    if options == ["--check"]:
        print(why)
        return int(bool(why))
    if why:
        print(f"no GPU: not run ({why})")
        return 0
    from tests.harness.launch import launcher

    wrong = check_ranks(launcher())
    if wrong:
        print(wrong)
        return 1
    runs, kernels = tested(launcher(), options), sanitized()
    print(f"\n{table(runs)}")
    for tool, what in kernels:
        print(f"compute-sanitizer, {tool}: {what}")
    return int(any(run.status or run.wrong for run in runs) or any("FAILED" in what for _, what in kernels))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
