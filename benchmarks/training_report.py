"""Report of `bench_training.py` and `bench_in_turn.py`: tables, pictures and comparisons.

It imports nothing of this project's, so that a program that starts MPI jobs can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OURS = ("single", "ddp", "zero1", "zero2", "zero3")
BARE = "all-reduce"
PARTS = ("forward", "backward", "step")
PEERS = ("torch-ddp", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")
ENGINES = (*OURS, *PEERS, BARE)
Seconds = np.ndarray[Any, Any]
# On GPUs: a step of an engine takes at most so many times that without communication.
BOUNDS = {"zero3": 1.1}


@dataclass(frozen=True)
class Row:
    """One engine's result."""

    engine: str
    ranks: int
    params: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    tokens_per_s: float
    peak_mib: float | None
    node_mib: float | None
    loss_last: float | None


@dataclass
class Run:
    """Result of one round of an engine.

    seconds: [counted steps, parts], on the slowest rank.
    peak, node_peak: MiB of the largest rank, of a node's ranks together; NaN where they are unknown.
    """

    seconds: Seconds
    peak: float
    node_peak: float
    loss: float


def rows_of(
    found: Mapping[str, Sequence[Run]], ranks: int, params: int, tokens: int, say: Callable[..., None]
) -> list[Row]:
    """The table, printed.

    found: the runs of each engine.
    tokens: of all ranks in a step.
    """
    heads = " ".join(f"{part:>9}" for part in PARTS)
    heads += f" {'tokens/s':>9} {'peak MiB':>9} {'node MiB':>9} {'last loss':>10}"
    say(f"# {'engine':>12} {'ms a step':>10} {heads}", flush=True)
    rows = []
    for name, runs in found.items():
        seconds = np.concatenate([each.seconds for each in runs])
        step = float(np.median(seconds.sum(1)))
        forward, backward, optimizer = parts = (np.median(seconds, axis=0) * 1e3).tolist()
        peak, node_peak = max(each.peak for each in runs), max(each.node_peak for each in runs)
        loss = runs[-1].loss
        rows.append(
            Row(
                name,
                ranks,
                params,
                step * 1e3,
                forward,
                backward,
                optimizer,
                tokens / step,
                None if np.isnan(peak) else peak,
                None if np.isnan(node_peak) else node_peak,
                None if np.isnan(loss) else loss,
            ),
        )
        told = " ".join(f"{part:>9.1f}" for part in parts)
        told += f" {rows[-1].tokens_per_s:>9.0f} {peak:>9.0f} {node_peak:>9.0f} {loss:>10.4f}"
        say(f"  {name:>12} {step * 1e3:>10.1f} {told}")
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Two panels of bars: the parts of a step and peak memory, by engine.

    What backward takes longer than that of "single" is communication that nothing hides.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [row for row in rows if row.engine != BARE][::-1]
    alone = next((row.backward_ms for row in drawn if row.engine == "single"), None)
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 1.4 + 0.42 * len(drawn)), sharey=True)
    engines = [row.engine for row in drawn]
    left = np.zeros(len(drawn))
    exposed = np.array([0.0 if alone is None else max(0.0, row.backward_ms - alone) for row in drawn])
    backward = np.array([row.backward_ms for row in drawn]) - exposed
    parts = {
        "forward": np.array([row.forward_ms for row in drawn]),
        "backward": backward,
        "exposed communication": exposed,
        "optimizer": np.array([row.optimizer_ms for row in drawn]),
    }
    for (label, width), colour in zip(parts.items(), ("#9ecae1", "#4292c6", "#d94801", "#74c476"), strict=True):
        bars = times.barh(engines, width, left=left, label=label, color=colour)
        left += width
    times.bar_label(bars, labels=[f"{row.step_ms:.0f}" for row in drawn], padding=3)
    times.set_title(f"ms a step, {rows[0].ranks} ranks, {rows[0].params / 1e6:.1f} M parameters")
    times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False, fontsize="small")
    colours = ["#4292c6" if engine in OURS else "#aaaaaa" for engine in engines]
    memory.bar_label(memory.barh(engines, [row.peak_mib or 0 for row in drawn], color=colours), fmt="%.0f", padding=3)
    memory.set_title("peak MiB a rank")
    for panel in (times, memory):
        panel.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def compare(times: Mapping[str, Seconds], say: Callable[..., None], bounded: bool = False) -> None:
    """Prints each of this project's engines as a ratio to the peers, and DDP to what it cannot be faster than.

    times: of each engine, a step's in each turn or round; or [launches, turns], and then the lowest and the highest
        launch's ratio stand next to the median.
    bounded: whether BOUNDS hold here.
    """

    def ratios(ours: str, *others: str) -> Seconds:
        found: Seconds = times[ours] / sum(times[other] for other in others)
        return found

    def told(ours: str, *others: str) -> str:
        found = ratios(ours, *others)
        middle = f"{np.median(found):.3f}"
        if found.ndim > 1 and len(found) > 1:
            each = np.median(found, axis=1)
            middle += f" ({each.min():.3f} to {each.max():.3f})"
        return f"{middle} of {' + '.join(others)}"

    for ours in OURS:
        rivals = ("single", "ddp", *PEERS) if ours in ("zero1", "zero2") else ("single", *PEERS)
        against = [told(ours, other) for other in rivals if other in times and other != ours and ours in times]
        if against:
            say(f"# {ours}: {', '.join(against)}")
    for ours, most in BOUNDS.items() if bounded else ():
        if {ours, "single"} <= times.keys():
            verdict = "kept" if np.median(ratios(ours, "single")) <= most else "MISSED"
            say(f"# {ours}: {told(ours, 'single')} (at most {most:g}: {verdict})")
    if {"single", "ddp", BARE} <= times.keys():
        say(f"# ddp: {told('ddp', 'single', BARE)}")
