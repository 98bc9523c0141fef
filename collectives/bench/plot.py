"""Plots time (above) and busbw (below): a column for each operation, a line for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measurement import Row
from .operations import OPERATIONS

# Fields of a row that may tell one line from another; the legend names those that differ.
_KEY = ("algorithm", "buffer", "cache", "dtype", "redop", "root")
Key = tuple[str | int, ...]


def rows_to_draw(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """The rows of one operation by `_KEY`, of each those in one form.

    That is the usual form of the operation; in place for an all_gather in the node's shared memory, where nothing is
    copied then; the other one if there is no such row.
    """
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    for key, same in found.items():
        operation = OPERATIONS[same[0].op]
        wanted = "in" if (operation.name, same[0].buffer) == ("all_gather", "symmetric") else operation.usual
        found[key] = [row for row in same if row.place == wanted] or same
    return found


def _key(row: Row) -> Key:
    return tuple(getattr(row, name) for name in _KEY)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws them, in the format that the path's end names."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row.op for row in rows))
    size = (4.5 * len(ops), 7.5)
    figure, axes = pyplot.subplots(2, len(ops), figsize=size, sharex=True, squeeze=False, layout="constrained")
    colours: dict[str, str] = {}
    shown: dict[str, Any] = {}  # by its label, a line for the legend
    for column, op in enumerate(ops):
        lines = rows_to_draw([row for row in rows if row.op == op])
        differing = [place for place, values in enumerate(zip(*lines, strict=True)) if len(set(values)) > 1] or [0]
        for key, points in lines.items():
            label = ", ".join(str(key[place]) for place in differing)
            style = {
                "color": colours.setdefault(label, f"C{len(colours) % 10}"),
                "linestyle": "--" if points[0].buffer == "symmetric" else "-",
                "marker": {"cold": "x", "fresh": "+"}.get(points[0].cache, "."),
            }
            for axis, attribute in ((axes[0][column], "time_us"), (axes[1][column], "busbw_gbs")):
                (line,) = axis.loglog([r.bytes for r in points], [getattr(r, attribute) for r in points], **style)
                shown.setdefault(label, line)
        axes[0][column].set_title(f"{op}, {rows[0].ranks} ranks, {', '.join(dict.fromkeys(r.dtype for r in rows))}")
        axes[1][column].set_xlabel("bytes")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time, us")
    axes[1][0].set_ylabel("busbw, GB/s")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
