"""Measures in two seconds which algorithm is fastest, for an MPI library and a layout that no table covers.

It is done when the first Communicator of that kind is made, and kept in a file of the user's cache folder, so that
later jobs on machines with such processors read it. MPIDL_CALIBRATE=0 turns it off.

Sizes go up for all operations together. The measurement of an operation ends where its next size might take more than
the time that is left. For larger sizes, and for operations with one algorithm only, the group's other tables are used.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from .backends.tables import NO_LIMIT, Table, Tables, library, read_tables, user_folder, write_tables
from .errors import ArgumentError
from .native import VERSION, is_compiled
from .timing import TimedGroup, measure

CALIBRATE = "MPIDL_CALIBRATE"
_BUDGET_S = 2.0
SIZES = {4 << 10: 20, 32 << 10: 15, 256 << 10: 8, 2 << 20: 4, 16 << 20: 2}  # bytes, and repetitions of each
_CLEARLY = 0.97  # a table changes to another algorithm only where that takes no more than this share of the time


class Measured(TimedGroup, Protocol):
    """Part of a Communicator that a calibration uses."""

    @property
    def tables(self) -> Tables:
        """Tables of "auto" by operation."""

    def algorithms(self, operation: str) -> list[str]:
        """Lists the values of `algorithm=` for an operation."""

    def close(self) -> None:
        """Frees the duplicated communicators. Collective."""


known_tables: dict[tuple[str, str], Tables] = {}  # by machine and layout, of this process


def is_on() -> bool:
    """Returns whether groups may calibrate."""
    return os.environ.get(CALIBRATE, "1") != "0"


def cache_path() -> Path:
    """The path of the file with what was calibrated."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "mpidl" / "algorithms.json"


@cache
def machine() -> str:
    """The MPI library, cores, processor and version of the part in C, by which calibrations are kept, and layout."""
    in_c = f"C {VERSION}" if is_compiled() else "Python"
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return f"{library()}, {os.cpu_count()} x {found[1]}, {in_c}"
    return f"{library()}, {os.cpu_count()} x {platform.machine()}, {in_c}"


def known(layout: str) -> Tables | None:
    """Returns the tables that this process or an earlier job has calibrated for the layout; None if none has."""
    key = machine(), layout
    if key not in known_tables:
        with contextlib.suppress(ArgumentError, OSError):  # a file of something else is written anew
            tables = read_tables(cache_path(), *key)
            if tables:
                known_tables[key] = tables
    return known_tables.get(key)


def calibrate(make: Callable[[MPI.Intracomm], Any], mpi: MPI.Intracomm, layout: str) -> Tables:
    """Measures the algorithms of a group, and keeps the tables. Collective.

    make: makes the Communicator that is measured, which is closed afterwards. Where the file cannot be written, the
    tables hold for this process.
    """
    key = machine(), layout
    known_tables[key] = {}  # the group that is measured does not calibrate itself
    comm: Measured = make(mpi)
    try:
        tables = _measured(comm)
    finally:
        comm.close()
    known_tables[key] = tables
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            path = cache_path()
            try:
                write_tables(path, *key, tables)
            except (ValueError, AttributeError, RecursionError):  # a file of something else
                path.unlink()
                write_tables(path, *key, tables)
    return tables


def _measured(comm: Measured) -> Tables:
    begin = time.perf_counter()
    candidates = {name: table for name, table in comm.tables.items() if len(_names(table)) > 1}
    seconds: dict[str, list[tuple[int, dict[str, float]]]] = {operation: [] for operation in candidates}
    for number, (nbytes, count) in enumerate(SIZES.items()):
        for operation, table in candidates.items():
            rows = seconds[operation]
            expected = sum(rows[-1][1].values()) * nbytes / rows[-1][0] * (count + 1) if rows else 0.0
            is_next = len(rows) == number
            if not comm.mpi.bcast(is_next and time.perf_counter() - begin + expected < _BUDGET_S):  # rank 0's clock
                continue
            calls = calls_of(comm, operation, nbytes)
            taken = measure(comm, {name: calls[name] for name in _names(table) if name in calls}, count, warmup=1)
            rows.append((nbytes, taken))
    return {o: (*table_of(rows, _valid_up_to(rows)), *candidates[o]) for o, rows in seconds.items() if rows}


def _valid_up_to(rows: Sequence[tuple[int, Any]]) -> float:
    """The bytes up to which a measurement holds: half a step beyond the largest size, or for all with all sizes."""
    return NO_LIMIT if len(rows) == len(SIZES) else int(rows[-1][0] * 8**0.5)


def _names(table: Table) -> list[str]:
    return list(dict.fromkeys(name for _, name in table))


def calls_of(comm: Measured, operation: str, nbytes: int) -> dict[str, Callable[[], Any]]:
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


def table_of(measured: Sequence[tuple[int, Mapping[str, float]]], limit: float = NO_LIMIT) -> Table:
    """Converts (bytes, seconds by algorithm), ascending, to a table of up to so many bytes.

    Between two sizes the times of both algorithms are taken for straight lines in logarithms, and one gives way to the
    other where they meet.
    """
    rows: list[tuple[float, str]] = []
    before: tuple[int, Mapping[str, float]] | None = None
    current = ""
    for nbytes, times in measured:
        best = min(times, key=lambda name: times[name])
        if before is None:
            current = best
        elif times[best] < _CLEARLY * times[current]:
            rows.append((_crossover(before, (nbytes, times), current, best), current))
            current = best
        before = nbytes, times
    return (*rows, (limit, current))


def _crossover(
    lower: tuple[int, Mapping[str, float]], upper: tuple[int, Mapping[str, float]], below: str, above: str
) -> int:
    """The bytes at which two algorithms take equally long. below, above: the faster one on each side."""
    gap_below = math.log(lower[1][above] / lower[1][below])  # more than 0 where `above` is slower
    gap_above = math.log(upper[1][below] / upper[1][above])
    share = min(1.0, max(0.0, gap_below / (gap_below + gap_above))) if gap_below + gap_above > 0 else 0.5
    return int(lower[0] ** (1 - share) * upper[0] ** share)
