"""Measures which algorithm is fastest here, and writes the table that `algorithm="auto"` reads.

    mpirun -n 4 python -m collectives.tune

For every operation and size all algorithms take turns (`timing.measure`). The tables are of this MPI library, its major
version, and this layout, nodes x ranks a node, or the ranks of each node where these differ: run it once for each that
is used here. Others that the file holds already stay in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .backends.tables import NO_LIMIT, TUNING, Table, library, tuning_path, write_tables
from .calibration import calls_of, table_of
from .command_line import parse_together
from .communicator import Communicator
from .schedules.algorithms import ALGORITHMS
from .timing import measure, repetitions


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
        except OSError as error:
            parser.error(f"--output: {options.output} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            parser.error(f"--output: {options.output} holds something else; needs a new file, or one made by this")
    return options


def main() -> None:
    """Measures, prints the times and the tables, writes."""
    comm = Communicator()
    options = parse_together(comm, lambda: parse(sys.argv[1:]))
    say = print if comm.rank == 0 else lambda *_, **__: None
    say(f"# {library()}, nodes x ranks {comm.layout}; microseconds; * is the fastest")
    tables: dict[str, Table] = {}
    for operation in options.ops:
        measured = []
        nbytes = options.min_bytes
        while nbytes <= options.max_bytes:
            times = measure(comm, calls_of(comm, operation, nbytes), options.iters or repetitions(nbytes))
            measured.append((nbytes, times))
            best = min(times, key=lambda name: times[name])
            texts = [f"{name} {seconds * 1e6:.0f}{'*' * (name == best)}" for name, seconds in times.items()]
            say(f"{operation:>14} {nbytes:>10}  {'  '.join(texts)}", flush=True)
            nbytes *= options.factor
        tables[operation] = table_of(measured)
        say(f"{operation:>14} auto: {', '.join(_words(row) for row in tables[operation])}", flush=True)
    if comm.rank == 0:
        write_tables(options.output, library(), comm.layout, tables)
        say(f"# written to {options.output}")


def _words(row: tuple[float, str]) -> str:
    limit, name = row
    return name if limit == NO_LIMIT else f"{name} up to {limit:.0f}"


if __name__ == "__main__":
    main()
