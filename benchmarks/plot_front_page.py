"""Draws the picture of README: a step's time, a node's memory, and all-reduce, with those of the peers.

    python benchmarks/plot_front_page.py training.json collectives.json --out docs/front_page.svg

training.json      of bench_training.py --json: step_ms and node_mib of each engine
collectives.json   of `python -m collectives.bench all_reduce --json`: time_us of each size, in place

`docs/benchmarks.md` has the commands that measure. It imports nothing of this project's, and needs no MPI.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ENGINES = {
    "single": "each rank alone",
    "ddp": "mpidl DDP",
    "zero1": "mpidl ZeRO-1",
    "zero2": "mpidl ZeRO-2",
    "zero3": "mpidl ZeRO-3",
    "torch-ddp": "torch DDP, gloo",
    "fsdp2": "torch FSDP2, gloo",
    "deepspeed1": "DeepSpeed ZeRO-1",
    "deepspeed2": "DeepSpeed ZeRO-2",
    "deepspeed3": "DeepSpeed ZeRO-3",
}
# (algorithm, buffer) of collectives.bench: the label at the line's end, and its colour.
LINES = {
    ("gloo", "user"): ("gloo", "#999999"),
    ("mpi", "user"): ("MPI's own", "#d94801"),
    ("auto", "user"): ("mpidl, any array", "#6baed6"),
    ("auto", "symmetric"): ("mpidl, symmetric memory", "#08519c"),
}
BASE, OURS, PEER = "#555555", "#4292c6", "#bbbbbb"
_KEY = ("op", "place", "cache", "algorithm", "buffer")
_GAP = 0.07  # between two labels at least, of the axis' height
Rows = list[dict[str, Any]]


def engines_of(rows: Rows) -> Rows:
    """The rows of training that are drawn, in the order of ENGINES. Raises ValueError where there are none."""
    found = {row["engine"]: row for row in rows}
    drawn = [found[name] for name in ENGINES if name in found]
    if not drawn or any(row["node_mib"] is None for row in drawn):
        raise ValueError("has no engine whose memory was measured")
    return drawn


def lines_of(rows: Rows) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(bytes, microseconds) of all_reduce in place for each of LINES. Raises ValueError where there are none."""
    found = {
        key: sorted(
            (row["bytes"], row["time_us"])
            for row in rows
            if tuple(row[name] for name in _KEY) == ("all_reduce", "in", "warm", *key)
        )
        for key in LINES
    }
    drawn = {key: points for key, points in found.items() if points}
    if not drawn:
        raise ValueError("has no all_reduce by any of " + ", ".join(sorted({name for name, _ in LINES})))
    return drawn


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Moves places until any two differ by at least gap; they keep their order and their mean."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    shift = (sum(moved) - sum(places)) / len(places)
    return [place - shift for place in moved]


def bars(panel: Any, rows: Rows, key: str, title: str, shape: str) -> None:
    """A bar an engine with its value at the end. shape: of the value."""
    colours = [BASE if r["engine"] == "single" else OURS if r["engine"] in list(ENGINES)[:5] else PEER for r in rows]
    drawn = panel.barh([ENGINES[row["engine"]] for row in rows], [row[key] for row in rows], color=colours)
    panel.bar_label(drawn, labels=[shape.format(row[key]) for row in rows], padding=3, fontsize=9)
    panel.set_title(title, fontsize=10)
    panel.margins(x=0.18)
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)


def curves(panel: Any, lines: dict[tuple[str, str], list[tuple[float, float]]], ranks: int) -> None:
    """Time against bytes, each line with its name at its end."""
    for key, points in lines.items():
        panel.loglog(*zip(*points, strict=True), color=LINES[key][1], marker=".", linewidth=1.8)
    panel.set_title(f"all-reduce, {ranks} ranks: microseconds", fontsize=10)
    panel.set_xlabel("bytes", fontsize=9)
    panel.set_xscale("log", base=2)
    last = max(points[-1][0] for points in lines.values())
    sizes = [1 << k for k in range(10, 40, 4) if min(p[0][0] for p in lines.values()) <= 1 << k <= last]
    panel.set_xticks(sizes, [f"{s >> 20} Mi" if s >> 20 else f"{s >> 10} Ki" for s in sizes])
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    low, high = (math.log10(limit) for limit in panel.get_ylim())
    ends = [(math.log10(points[-1][1]) - low) / (high - low) for points in lines.values()]
    for key, place in zip(lines, spread(ends, _GAP), strict=True):
        label, colour = LINES[key]
        panel.annotate(
            label, (1.02, place), xycoords="axes fraction", color=colour, va="center", fontsize=9, annotation_clip=False
        )


def draw(training: Rows, collectives: Rows, path: Path) -> None:
    """The picture, in the format that the path's end names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "front page"  # the same file from the same figures
    rows, lines = engines_of(training), lines_of(collectives)
    first = rows[0]
    figure, (times, memory, panel) = pyplot.subplots(
        1, 3, figsize=(13, 1.1 + 0.3 * len(rows)), layout="constrained", width_ratios=(1, 1, 1.1)
    )
    about = f"GPT-2, {first['params'] / 1e6:.0f} M parameters, {first['ranks']} ranks"
    bars(times, rows, "step_ms", f"{about}: ms a step", "{:.0f}")
    bars(memory, [{**row, "gib": row["node_mib"] / 1024} for row in rows], "gib", "peak memory, node: GiB", "{:.1f}")
    times.invert_yaxis()
    memory.invert_yaxis()
    memory.set_yticks([])
    curves(panel, lines, next(row["ranks"] for row in collectives))
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str]) -> int:
    """Reads, draws; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("training", type=Path, help="what bench_training.py --json wrote")
    parser.add_argument("collectives", type=Path, help="what collectives.bench --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the picture: .svg, .png")
    options = parser.parse_args(arguments)
    found: list[Rows] = []
    for path, take in ((options.training, engines_of), (options.collectives, lines_of)):
        try:
            found.append(json.loads(path.read_text()))
            take(found[-1])
        except OSError as error:
            print(f"error: {path}: cannot be read: {error.strerror}", file=sys.stderr)
            return 2
        except (ValueError, KeyError, TypeError) as error:
            print(f"error: {path}: {error}; needs the rows of the benchmark", file=sys.stderr)
            return 2
    draw(found[0], found[1], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
