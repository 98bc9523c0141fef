"""The table in the form of nccl-tests, with its last lines.

                                                                         out-of-place                  in-place
       size    count    type redop root algorithm   buffer cache   time algbw busbw  mpi #wrong   time algbw busbw ...
        (B) (elements)                                             (us) (GB/s)(GB/s) (ratio)

A line has one side on one kind of arrays with one state of the caches; a form that it does not have is "N/A".
"""

from __future__ import annotations

from collections.abc import Sequence

from .measurement import Row
from .operations import PLACES
from .options import BenchOptions

_TITLES = {"out": "out-of-place", "in": "in-place"}
_LEFT = (("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 9), ("redop", "", 6), ("root", "", 5))
_MIDDLE = (("algorithm", "", 18), ("buffer", "", 10), ("cache", "", 6))
_NONE = "N/A"
_HIGHER = ("p95", "p99", "max")


class Table:
    """Formats lines of rows. on_gpu: with the limit's share."""

    def __init__(self, options: BenchOptions, *, on_gpu: bool) -> None:
        self._compare, self._percentiles, self._on_gpu = options.compare, options.percentiles, on_gpu
        self._places = [place for place in PLACES if place in options.places]

    def head(self) -> list[str]:
        """The lines over a table."""
        left = [*_LEFT, *_MIDDLE]
        columns = self._columns()
        block = sum(width for _, _, width in columns) + 1
        over = "".join(_TITLES[place].center(block) for place in self._places)
        lines = [" " * sum(width for _, _, width in left) + over]
        for names in (0, 1):
            text = "".join(str(column[names]).rjust(column[2]) for column in left)
            blocks = " " + "".join(str(column[names]).rjust(column[2]) for column in columns)
            lines.append(text + blocks * len(self._places))
        return [f"#{line}".rstrip() for line in lines]

    def line(self, rows: Sequence[Row]) -> str:
        """The line of a side's rows in its forms; see `lines_of`."""
        row = rows[0]
        by_place = {each.place: each for each in rows}
        left = (row.bytes, row.count, row.dtype, row.redop, row.root, row.algorithm, row.buffer, row.cache)
        text = " " + "".join(str(v).rjust(w) for v, (_, _, w) in zip(left, (*_LEFT, *_MIDDLE), strict=True))
        columns = self._columns()
        for place in self._places:
            found = self._values(by_place[place]) if place in by_place else [_NONE] * len(columns)
            text += " " + "".join(value.rjust(width) for value, (_, _, width) in zip(found, columns, strict=True))
        return text

    def _columns(self) -> list[tuple[str, str, int]]:
        times = ["p50", *_HIGHER] if self._percentiles else ["time"]
        return [
            *((name, "(us)", 10) for name in times),
            *((name, "(GB/s)", 8) for name in ("algbw", "busbw")),
            *((name, "(ratio)", max(8, len(name) + 1)) for name in self._compare),
            *([("limit", "(ratio)", 8)] if self._on_gpu else []),
            ("#wrong", "", 7),
        ]

    def _values(self, row: Row) -> list[str]:
        times = [row.time_us, row.p95_us, row.p99_us, row.max_us] if self._percentiles else [row.time_us]
        return [
            *(_digits(time) for time in times),
            *(f"{bandwidth:.2f}" for bandwidth in (row.algbw_gbs, row.busbw_gbs)),
            *(f"{row.ratios[name]:.2f}" if name in row.ratios else "-" for name in self._compare),
            *([f"{row.limit_us / row.time_us:.2f}" if row.limit_us else "-"] if self._on_gpu else []),
            _NONE if row.wrong is None else str(row.wrong),
        ]


def _digits(microseconds: float) -> str:
    """Four digits at least, as nccl-tests has them."""
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:.1f}"


def lines_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Puts the rows of one case together whose figures stand in one line."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cache, row.buffer, row.algorithm), []).append(row)
    return list(found.values())


def summary(rows: Sequence[Row], operation: str) -> list[str]:
    """The last lines of an operation's table: wrong elements, and the mean of each side's bandwidths."""
    rows = [row for row in rows if row.op == operation]
    checked = [row.wrong for row in rows if row.wrong is not None]
    verdict = "not checked" if not checked else f"{sum(checked)} {'FAILED' if any(checked) else 'OK'}"
    lines = [f"# Out of bounds values : {verdict}"]
    for same in lines_of(rows):
        mean = sum(row.busbw_gbs for row in same) / len(same)
        named = f"{same[0].algorithm}, {same[0].buffer} arrays, {same[0].cache}".replace("- arrays", "its own arrays")
        lines.append(f"# Avg bus bandwidth    : {mean:<10.4g} ({named})")
    return [*lines, "#"]
