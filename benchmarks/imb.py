"""Compares Intel's MPI benchmarks (IMB-MPI1) with collectives.bench: the same calls, and the times of both.

IMB-MPI1 times each call by itself, with a barrier between two, and tells the mean of all ranks and calls. Of Bcast and
Allreduce its size is that of the array, of the others that of a rank's part: a reduce-scatter of n bytes in all is one
of n / ranks there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from libraries_report import bytes_name

# By operation: IMB's name, and whether its size is a rank's part.
CALLS = {
    "all_reduce": ("allreduce", False),
    "broadcast": ("bcast", False),
    "all_gather": ("allgather", True),
    "reduce_scatter": ("reduce_scatter_block", True),
    "all_to_all": ("alltoall", True),
}
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)\s*$", re.MULTILINE)


def arguments(operation: str, ranks: int, sizes: Sequence[int]) -> list[str]:
    """IMB's arguments for an operation on whole arrays of so many bytes."""
    name, is_part = CALLS[operation]
    lengths = ",".join(str(size // ranks if is_part else size) for size in sizes)
    return [name, "-npmin", str(ranks), "-iter", "200", "-sync", "on", "-msgsize", lengths]


def parse(text: str, operation: str, ranks: int) -> list[tuple[int, float]]:
    """(bytes of the whole array, microseconds) of what IMB has printed; the mean of all ranks."""
    scale = ranks if CALLS[operation][1] else 1
    return [(int(size) * scale, float(mean)) for size, mean in _ROW.findall(text)]


def table(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the comparison; none without parts.

    parts: of one operation and number of ranks, with lists of (bytes, microseconds), one for each start, of "bench" and
    "imb".
    """
    if not parts:
        return []
    lines = [
        "## collectives.bench by IMB-MPI1",
        "",
        "The same call of Intel MPI by both, microseconds: the median of the starts, with the least and the largest.",
        "",
        "| operation | ranks | bytes | collectives.bench | IMB-MPI1 | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for part in parts:
        ours, theirs = (_by_size(part[name]) for name in ("bench", "imb"))
        lines += [
            f"| {part['operation']} | {part['ranks']} | {bytes_name(size)} | {_spread(ours[size])} | "
            f"{_spread(theirs[size])} | {median(ours[size]) / median(theirs[size]):.2f} |"
            for size in ours
            if size in theirs
        ]
    return [*lines, ""]


def _by_size(starts: Sequence[Sequence[tuple[int, float]]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for start in starts:
        for size, time in start:
            found.setdefault(size, []).append(time)
    return found


def _spread(times: Sequence[float]) -> str:
    return f"{median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
