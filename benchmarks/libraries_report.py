"""Report of `bench_libraries.py`: tables of ratios to each MPI library's own, the slow cases, and the picture.

It imports nothing of this project's packages, so that a program that starts MPI jobs can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OWN = "mpi"  # the side of the library's own calls
_KINDS = {"user": "any", "symmetric": "symmetric"}
_COLUMNS = 5  # of panels
_LISTED = 30  # slow cases
# Limits of "auto": a factor of the fastest side's time, and microseconds; with a core for each rank, and with fewer.
_LIMIT, _CROWDED_LIMIT = (1.05, 1.0), (1.1, 3.0)


@dataclass(frozen=True)
class Cell:
    """A case of "auto" against the library's own. Times in microseconds.

    library, version: its name, and what it calls itself.
    cores: for the ranks.
    kind: of arrays, "any" or "symmetric".
    ratio: to the library's own, the median of those within each repetition.
    best: the fastest of all sides.
    """

    library: str
    version: str
    ranks: int
    cores: int
    operation: str
    kind: str
    cache: str
    bytes: int
    ratio: float
    time: float
    best: str
    best_time: float

    @property
    def is_slow(self) -> bool:
        """Returns whether it takes longer than it may."""
        factor, more = _LIMIT if self.ranks <= self.cores else _CROWDED_LIMIT
        return self.time > factor * self.best_time + more


def cells_of(parts: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The cases of all parts, each of which has the rows of one library, number of ranks and operation.

    The library's own has any arrays alone, and is compared with symmetric ones too.
    """
    found = []
    for part in parts:
        for row in part["rows"]:
            if row["algorithm"] != "auto" or _OWN not in row["ratios"]:
                continue
            sides = [
                side
                for side in part["rows"]
                if (side["bytes"], side["cache"], side["place"]) == (row["bytes"], row["cache"], row["place"])
                and (side["buffer"] == row["buffer"] or side["algorithm"] == _OWN)
            ]
            best = min(sides, key=lambda side: side["time_us"])
            cell = Cell(
                library=part["library"],
                version=part["version"],
                ranks=part["ranks"],
                cores=part["cores"],
                operation=part["operation"],
                kind=_KINDS[row["buffer"]],
                cache=row["cache"],
                bytes=row["bytes"],
                ratio=row["ratios"][_OWN],
                time=row["time_us"],
                best=best["algorithm"],
                best_time=best["time_us"],
            )
            found.append(cell)
    return found


def bytes_name(size: int) -> str:
    """A size as a column's head: 1 KiB, 4 MiB, 1000."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return str(size)


def tables(cells: Sequence[Cell]) -> list[str]:
    """The lines of a table for each number of ranks and library, and of the cases that are slow."""
    lines: list[str] = []
    for group in _grouped(cells, lambda cell: (cell.ranks, cell.library)):
        first = group[0]
        sizes = sorted({cell.bytes for cell in group})
        lines += [
            f"## {first.ranks} ranks on {first.cores} cores, {first.library} ({first.version})",
            "",
            "auto's time by the library's own; bold: slower than allowed.",
            "",
            f"| operation | arrays | caches | {' | '.join(map(bytes_name, sizes))} |",
            "|---" * (3 + len(sizes)) + "|",
        ]
        for row in _grouped(group, lambda cell: (cell.operation, cell.kind, cell.cache)):
            by_size = {cell.bytes: cell for cell in row}
            told = [_ratio(by_size[size]) if size in by_size else "-" for size in sizes]
            lines.append(f"| {row[0].operation} | {row[0].kind} | {row[0].cache} | {' | '.join(told)} |")
        lines.append("")
    return [*lines, *_slow_cases(cells)] if cells else []


def _slow_cases(cells: Sequence[Cell]) -> list[str]:
    """The lines on the cases in which auto takes longer than it may: how many of each size, and the worst ones."""
    slow = sorted((cell for cell in cells if cell.is_slow), key=lambda cell: -cell.time / cell.best_time)
    (factor, more), (crowded_factor, crowded_more) = _LIMIT, _CROWDED_LIMIT
    lines = [
        "## Slower than allowed",
        "",
        f"{len(slow)} of {len(cells)} cases: above {factor} x the fastest side + {more:g} us; with fewer cores than "
        f"ranks, {crowded_factor} x + {crowded_more:g} us.",
        "",
    ]
    if not slow:
        return lines
    sizes = sorted({cell.bytes for cell in cells})
    lines += [f"| library | ranks | {' | '.join(map(bytes_name, sizes))} |", "|---" * (2 + len(sizes)) + "|"]
    for group in _grouped(cells, lambda cell: (cell.ranks, cell.library)):
        counts = [[cell.is_slow for cell in group if cell.bytes == size] for size in sizes]
        told = [f"{sum(some)} of {len(some)}" if some else "-" for some in counts]
        lines.append(f"| {group[0].library} | {group[0].ranks} | {' | '.join(told)} |")
    lines += [
        "",
        f"The worst {min(len(slow), _LISTED)}:",
        "",
        "| library | ranks | operation | arrays | caches | bytes | auto, us | fastest, us | by | times |",
        "|---" * 10 + "|",
    ]
    lines += [
        f"| {c.library} | {c.ranks} | {c.operation} | {c.kind} | {c.cache} | {bytes_name(c.bytes)} | {c.time:.1f} | "
        f"{c.best_time:.1f} | {c.best} | {c.time / c.best_time:.2f} |"
        for c in slow[:_LISTED]
    ]
    return [*lines, ""]


def _ratio(cell: Cell) -> str:
    return f"**{cell.ratio:.2f}**" if cell.is_slow else f"{cell.ratio:.2f}"


def _grouped(cells: Sequence[Cell], key: Callable[[Cell], Any]) -> list[list[Cell]]:
    """Puts cells with the same key together, in the order in which keys come first."""
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return list(found.values())


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draws ratio against bytes, a panel an operation and number of ranks; the format is by the path's end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = _grouped(cells, lambda cell: (cell.ranks, cell.operation))
    libraries = list(dict.fromkeys(cell.library for cell in cells))
    columns = min(_COLUMNS, len({cell.operation for cell in cells}))
    rows = -(-len(panels) // columns)
    size = (3.6 * columns, 2.8 * rows + 0.6)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    shown: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.axhline(1, color="#555555", linewidth=0.8)
        for line in _grouped(panel, lambda cell: (cell.library, cell.kind, cell.cache)):
            first = line[0]
            label = f"{first.library}, {first.kind} arrays, {first.cache}"
            points = sorted((cell.bytes, cell.ratio) for cell in line)
            (shown[label],) = axis.loglog(
                *zip(*points, strict=True),
                color=f"C{libraries.index(first.library)}",
                linestyle="--" if first.kind == "symmetric" else "-",
                marker="o" if first.cache == "warm" else "x",
                markersize=3,
                linewidth=1,
                alpha=1.0 if first.cache == "warm" else 0.6,
            )
        axis.set_title(f"{panel[0].operation}, {panel[0].ranks} ranks", fontsize=10)
        axis.set_xlabel("bytes", fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.supylabel("time / the library's own")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=max(1, len(libraries)), fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
