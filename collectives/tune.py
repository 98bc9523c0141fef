"""Measures which algorithm is fastest here, and writes the table that `algorithm="auto"` reads.

    mpirun -n 4 python -m collectives.tune

For every operation and size all algorithms take turns (`timing.measure`). The table is of this layout, nodes x ranks a
node: run it once for each number of ranks that is used here. Others that the file holds already stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from .backends.selection import TUNING, tuning_path
from .command_line import parse_together
from .communicator import Communicator
from .schedules.algorithms import ALGORITHMS
from .timing import measure, repetitions

_CLEARLY = 0.97  # a table changes to another algorithm only where that takes no more than this share of the time


def calls(comm: Communicator, operation: str, nbytes: int) -> dict[str, Callable[[], Any]]:
    """A call by each algorithm on fp32 arrays, the larger one of about nbytes."""
    each = max(1, nbytes // 4 // comm.size)
    large, other, small = (np.zeros(n, np.float32) for n in (each * comm.size, each * comm.size, each))
    root = comm.rank == 0
    method = getattr(comm, operation)
    arrays: tuple[Any, ...] = {
        "all_reduce": (large,),
        "broadcast": (large,),
        "reduce": (large,),
        "scan": (large,),
        "exscan": (large,),
        "reduce_scatter": (small, large),
        "all_gather": (large, small),
        "all_to_all": (other, large),
        "gather": (large if root else None, small),
        "scatter": (small, large if root else None),
    }[operation]
    names = [name for name in comm.algorithms(operation) if name != "auto"]
    return {name: lambda name=name: method(*arrays, algorithm=name) for name in names}  # type: ignore[misc]


def table(measured: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[int | None, str]]:
    """Converts (bytes, seconds by algorithm), ascending, to (bytes up to which, algorithm); the last has no limit.

    One algorithm gives way to another half-way between two sizes, on a logarithmic scale.
    """
    rows: list[tuple[int | None, str]] = []
    before, current = 0, ""
    for nbytes, times in measured:
        best = min(times, key=lambda name: times[name])
        if not current:
            current = best
        elif times[best] < _CLEARLY * times[current]:
            rows.append((int((before * nbytes) ** 0.5), current))
            current = best
        before = nbytes
    return [*rows, (None, current)]


def write(path: Path, layout: str, tables: dict[str, list[tuple[int | None, str]]], library: str) -> None:
    """Puts the layout's tables into the file, which is replaced as a whole."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    content.setdefault("tables", {}).setdefault(layout, {}).update(tables)
    content.setdefault("measured_with", {})[layout] = library
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m collectives.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", default=",".join(ALGORITHMS), help="which operations, with commas between")
    parser.add_argument("--min-bytes", type=int, default=1 << 10, help="smallest size (1024)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size (64 MiB)")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (4)")
    parser.add_argument("--iters", type=int, help="repetitions; by default fewer for larger sizes")
    parser.add_argument("--output", type=Path, help=f"file to write; by default what auto reads ({TUNING} names it)")
    options = parser.parse_args(arguments)
    options.ops = options.ops.split(",")
    unknown = [op for op in options.ops if op not in ALGORITHMS]
    if unknown:
        parser.error(f"--ops: got {unknown[0]!r}; needs any of {','.join(ALGORITHMS)}")
    if not 0 < options.min_bytes <= options.max_bytes or options.factor < 2 or (options.iters or 1) < 1:
        parser.error("needs 0 < --min-bytes <= --max-bytes, --factor 2 or more, --iters 1 or more")
    options.output = options.output or tuning_path()
    if options.output.is_file():
        try:
            json.loads(options.output.read_text())["tables"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            parser.error(f"--output: {options.output} holds something else; needs a new file, or one made by this")
    return options


def main() -> None:
    """Measures, prints the times and the tables, writes."""
    comm = Communicator()
    options = parse_together(comm, lambda: parse(sys.argv[1:]))
    say = print if comm.rank == 0 else lambda *_, **__: None
    layout = f"{comm.nodes}x{comm.local_size}"
    say(f"# {comm.nodes} node(s) of {comm.local_size} ranks; microseconds; * is the fastest")
    tables: dict[str, list[tuple[int | None, str]]] = {}
    for operation in options.ops:
        measured = []
        nbytes = options.min_bytes
        while nbytes <= options.max_bytes:
            times = measure(comm, calls(comm, operation, nbytes), options.iters or repetitions(nbytes))
            measured.append((nbytes, times))
            best = min(times, key=lambda name: times[name])
            texts = [f"{name} {seconds * 1e6:.0f}{'*' * (name == best)}" for name, seconds in times.items()]
            say(f"{operation:>14} {nbytes:>10}  {'  '.join(texts)}", flush=True)
            nbytes *= options.factor
        tables[operation] = table(measured)
        say(f"{operation:>14} auto: {', '.join(_words(row) for row in tables[operation])}", flush=True)
    if comm.rank == 0:
        write(options.output, layout, tables, MPI.Get_library_version().splitlines()[0])
        say(f"# written to {options.output}")


def _words(row: tuple[int | None, str]) -> str:
    limit, name = row
    return name if limit is None else f"{name} up to {limit}"


if __name__ == "__main__":
    main()
