"""The tables and the figure of `bench_parallelism.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from parallel_training import Shape

# Targets of tp with 2 ranks: its share of the time of two threads, and of torch's tensor parallelism.
TARGETS = {
    Shape(1, 32, 512, 8): (0.80, 0.60),
    Shape(4, 128, 512, 8): (0.98, 0.80),
    Shape(4, 128, 768, 4): (0.93, 0.85),
    Shape(1, 32, 2048, 2): (0.96, 0.93),
    Shape(4, 128, 2048, 2): (0.95, 0.96),
}
SUM_TARGET = 1.5  # an all-reduce as the layers make it, of the time of a bare one, at 2 ranks
Found = dict[str, dict[str, Any]]


def shape_rows(shape: Shape, found: Found, launches: int) -> list[dict[str, Any]]:
    """Prints the engines of one shape, and returns their rows."""
    rows = []
    print(f"# {shape}: batch x time x width x layers")
    heads = f"{'ms a step':>10} {'of threads':>22} {'of torch-tp':>22} {'tokens/s':>9} {'MiB':>6} {'loss':>8}"
    print(f"# {'engine':>9} {heads}")
    times = {name: np.array(one["seconds"]).reshape(launches, -1) for name, one in found.items()}
    for name, one in found.items():
        middle = float(np.median(times[name]))
        told = [_ratio(times[name], times.get(other)) for other in ("threads", "torch-tp")]
        tokens = shape.batch * shape.time / middle
        print(
            f"  {name:>9} {middle * 1e3:>10.1f} {told[0]:>22} {told[1]:>22} {tokens:>9.0f} {one['peak']:>6.0f} "
            f"{one['loss']:>8.4f}",
            flush=True,
        )
        rows.append({"shape": str(shape), "engine": name, **one, "seconds": times[name].tolist()})
    return rows


def table(found: dict[Shape, Found]) -> list[str]:
    """The table of all shapes: ms a step, and tp's share of the others' time, with the targets."""
    more = [name for name in ("megatron", "parts") if any(name in engines for engines in found.values())]
    peers = ("threads", "torch-tp", *more)
    heads = ["batch x time x width x layers", *(f"{name}, ms" for name in (*peers, "tp"))]
    heads += [f"of {name}" if name in more else f"of {name} (target)" for name in peers]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for shape, engines in found.items():
        times = {name: np.array(one["seconds"]) for name, one in engines.items()}
        cells = [f"{np.median(times[name]) * 1e3:.0f}" if name in times else "-" for name in (*peers, "tp")]
        targets = (*TARGETS.get(shape, (None, None)), *(None for _ in more))
        for other, target in zip(peers, targets, strict=True):
            both = "tp" in times and other in times
            ratio = f"{np.median(times['tp'] / times[other]):.2f}" if both else "-"
            cells.append(ratio if target is None else f"{ratio} ({target:.2f})")
        lines.append(f"| {' | '.join([str(shape), *cells])} |")
    return lines


def text_rows(model: tuple[int, int], tokens: int, found: Found, launches: int) -> list[dict[str, Any]]:
    """Prints the tokens a second of one model's `generate`, and returns its rows."""
    width, layers = model
    print(f"# generate, width {width}, {layers} layers, batch 1, {tokens} tokens")
    print(f"# {'engine':>9} {'tokens/s':>10} {'of threads':>22}  the same tokens")
    times = {name: np.array(one["seconds"]).reshape(launches, -1) for name, one in found.items()}
    first, rows = next(iter(found.values())), []
    for name, one in found.items():
        speed = tokens / times[name]
        ratio = _ratio(speed, tokens / times["threads"] if "threads" in times and name != "threads" else None)
        same = "yes" if one["text"] == first["text"] else "no"
        print(f"  {name:>9} {np.median(speed):>10.1f} {ratio:>22}  {same}", flush=True)
        rows.append({"width": width, "layers": layers, "engine": name, "tokens": tokens, **one})
    return rows


def sum_rows(shape: Shape, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints how long the ranks' sums of one tensor took, the slowest rank's, and returns the row."""
    seconds = {name: np.max([answer["seconds"][name] for answer in answers], axis=0) for name in ("bare", "layers")}
    ratio = float(np.median(seconds["layers"] / seconds["bare"]))
    sizes = f"{shape.batch}x{shape.time}x{shape.width}"
    bare, layers = (float(np.median(seconds[name])) * 1e6 for name in ("bare", "layers"))
    right = "" if all(answer["right"] for answer in answers) else "  WRONG SUM"
    nbytes = 4 * shape.batch * shape.time * shape.width
    print(
        f"  {sizes:>12} {nbytes / 1024:>8.0f} {bare:>9.1f} {layers:>9.1f} {ratio:>7.2f} ({SUM_TARGET}){right}",
        flush=True,
    )
    return [{"sizes": sizes, "bytes": nbytes, **{name: taken.tolist() for name, taken in seconds.items()}}]


def plot_batches(found: dict[Shape, Found], path: Path) -> None:
    """Draws throughput and peak memory against the batch, a line an engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for name in dict.fromkeys(name for engines in found.values() for name in engines):
        points = [(shape, engines[name]) for shape, engines in found.items() if name in engines]
        batches = [shape.batch for shape, _ in points]
        tokens = [shape.batch * shape.time / float(np.median(one["seconds"])) for shape, one in points]
        speed.plot(batches, tokens, "o-", label=name)
        memory.plot(batches, [one["peak"] for _, one in points], "o-", label=name)
    shape = next(iter(found))
    speed.set_ylabel("tokens a second")
    memory.set_ylabel("peak, MiB of all ranks")
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks([at.batch for at in found], [str(at.batch) for at in found])
        axes.set_xlabel(f"sequences a step, of {shape.time} tokens")
        axes.set_ylim(bottom=0)
    speed.legend(fontsize=8, frameon=False)
    figure.suptitle(f"width {shape.width}, {shape.layers} layers, fp32, AdamW", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _ratio(mine: Any, other: Any) -> str:
    """The median ratio within the turns, and those of the lowest and the highest launch."""
    if other is None or other is mine:
        return "-"
    each = np.median(mine / other, axis=1)
    return f"{np.median(mine / other):.3f} ({each.min():.3f} to {each.max():.3f})"
