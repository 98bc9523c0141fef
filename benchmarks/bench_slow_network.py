"""Times training steps over a slow network: engines that send everything, and ways that send less, in one job.

    sudo .venv/bin/python tests/hosts.py --hosts 2 --ranks-per-host 1 --rate 1gbit -- \\
        python benchmarks/bench_slow_network.py --rate 1gbit --batch 1 --block-size 32

The methods take turns, as often as --rounds says: each is built, warmed up and timed, on the model, weights and data of
`bench_training.py`. "single" is each rank alone. Besides METHODS, any name that DistributedDataParallel takes as
`compress=` is a method ("int8", "powersgd:4"), and with an engine before it that of this engine ("zero3+int8"). Names
with commas stand between semicolons: --methods "powersgd:4,fp16;ddp". The optimizer is AdamW, of "dgc" SGD.

A row, of the slowest rank or the host that sends most:

    ms       a step: the median over the steps of all rounds; and as a ratio of "ddp", the median over the rounds.
             "diloco" sends at every 50th step, so its steps are 50, and the time is their mean
    MB       that a host sends in a step, as its network interfaces count it, headers included; by the method's formula
             without them; and the ratio of the two
    wire     ms that the formula's bytes take at --rate, if nothing else is in the way
    goal     of "ddp": the wire's time and that of "single", one after the other, and a tenth more; compression is free
    compress ms in a step in which the thread that trains computes for compressed gradients: it adds remainders,
             compresses, starts messages, decompresses; of "onebit" with the steps of its states. "-": none is counted
    wait     ms in a step in which the thread that trains does not compute: it waits for messages or for a core
    cpu      ms of all threads beyond those of "single": sums, copies, compression, and the work for messages
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from bench_training import Stopwatch, Trial, tokens_of_the_standard_library
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least, check_writable
from mpidl.data import TokenBatches
from mpidl.errors import UsageError
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.zero.parameters.units import cut_into_units
from network_methods import ALONE, BASE, METHODS, Shape, method_of, names_of

MB = 1e6
_SETTLES = 0.1  # seconds without a byte after which nothing is in flight
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Round:
    """One round of a method, on the slowest rank, per step. ms: by counted period."""

    ms: list[float]
    sent_mb: float
    compress_ms: float
    wait_ms: float
    cpu_ms: float
    loss: float


@dataclass(frozen=True)
class Row:
    """All rounds of a method; see the head of this file. ratio, wire_ms, goal: None where unknown."""

    method: str
    ms: float
    ratio: float | None
    sent_mb: float
    formula_mb: float
    wire_ms: float | None
    goal: float | None
    compress_ms: float
    wait_ms: float
    cpu_ms: float
    loss: float


def interface_bytes() -> int:
    """Bytes that this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(each[9]) for each in fields if each[0] != "lo")


def settled_bytes(comm: Communicator) -> int:
    """Bytes that this host has sent, counted when no message of a step is in flight any more. Collective."""
    comm.barrier()
    before = -1
    while (now := interface_bytes()) != before:
        before = now
        time.sleep(_SETTLES)
    comm.barrier()
    return before


class NetworkTrial(Trial):
    """Trial of a method: counts bytes and time in its counted steps, which are whole periods."""

    def __init__(self, name: str, comm: Communicator, options: argparse.Namespace, *others: Any) -> None:
        method = method_of(name)
        self._period = method.period
        counted = -(-options.steps // self._period) * self._period
        steps = {"steps": counted, "warmup": max(options.warmup, method.warmup)}
        super().__init__(name, comm, argparse.Namespace(**vars(options) | steps), *others)

    def _prepare(self, name: str, model: GPT2) -> None:
        self._engine = method_of(name).make(model, self._comm)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Makes one step; the first counted one starts the counters."""
        if self._done == self._options.warmup:
            self._sent, self._cpu, self._idle = settled_bytes(self._comm), time.process_time(), 0.0
            self._compressing = self._engine.compressing()
        wall, busy = time.perf_counter(), time.thread_time()
        super().step()
        if self._done > self._options.warmup:
            self._idle += time.perf_counter() - wall - (time.thread_time() - busy)

    @property
    def is_done(self) -> bool:
        """Returns whether all its steps were made."""
        return self._done == self._options.warmup + self._options.steps

    def round(self) -> Round:
        """Ends the trial and returns its Round. Collective."""
        cpu = time.process_time() - self._cpu
        sent = settled_bytes(self._comm) - self._sent
        compressing = self._engine.compressing() - self._compressing
        found = np.array([sent, compressing, self._idle, cpu]) / self._options.steps
        self._comm.all_reduce(found, "max")
        run = self.end()
        ms = run.seconds.sum(1).reshape(-1, self._period).mean(1) * 1e3
        compress_ms, wait_ms, cpu_ms = (found[1:] * 1e3).tolist()
        return Round(ms.tolist(), found[0] / MB, compress_ms, wait_ms, cpu_ms, run.loss)


def measure(
    options: argparse.Namespace, make: Callable[[str], NetworkTrial], say: Callable[..., None]
) -> dict[str, list[Round]]:
    """All rounds of all methods, which take turns."""
    found: dict[str, list[Round]] = {name: [] for name in options.methods}
    for _ in range(options.rounds):
        for name in options.methods:
            trial = make(name)
            while not trial.is_done:
                trial.step()
            found[name].append(trial.round())
            del trial
            say(f"# {name}: {statistics.median(found[name][-1].ms):.1f} ms", flush=True)
    return found


def rows_of(found: dict[str, list[Round]], shape: Shape, rate: float | None) -> list[Row]:
    """Makes a row for each method, of the medians and means over its rounds. rate: bits a second."""

    def mean(name: str, of: str) -> float:
        return statistics.fmean(getattr(each, of) for each in found[name])

    def step(name: str) -> float:
        return statistics.median(ms for each in found[name] for ms in each.ms)

    rows = []
    for name, rounds in found.items():
        pairs = zip(rounds, found.get(BASE, []), strict=False)
        ratios = [statistics.median(each.ms) / statistics.median(base.ms) for each, base in pairs]
        formula = method_of(name).sends(shape)
        wire = None if rate is None else formula * 8e3 / rate
        goal = None
        if wire is not None and {ALONE, BASE} <= set(found):
            goal = 1.1 * (wire + step(ALONE)) / step(BASE)
        rows.append(
            Row(
                name,
                step(name),
                statistics.median(ratios) if ratios else None,
                mean(name, "sent_mb"),
                formula / MB,
                wire,
                goal,
                mean(name, "compress_ms"),
                mean(name, "wait_ms"),
                mean(name, "cpu_ms") - (mean(ALONE, "cpu_ms") if ALONE in found else 0),
                rounds[-1].loss,
            )
        )
    return rows


def print_table(rows: Sequence[Row], say: Callable[..., None]) -> None:
    """One line a method."""
    heads = ["ms", f"of {BASE}", "MB sent", "formula", "ratio", "wire ms", "goal"]
    heads += ["compress", "wait ms", "cpu ms", "loss"]
    say(f"# {'method':>16} " + " ".join(f"{head:>9}" for head in heads))
    for row in rows:
        over = row.sent_mb / row.formula_mb if row.formula_mb else None
        cells = (
            *(f"{row.ms:.1f}", _number(row.ratio, 3), f"{row.sent_mb:.2f}", f"{row.formula_mb:.2f}", _number(over, 3)),
            *(_number(row.wire_ms, 0), _number(row.goal, 3), _number(row.compress_ms or None, 0)),
            *(f"{row.wait_ms:.0f}", f"{row.cpu_ms:.0f}"),
            f"{row.loss:.4f}",
        )
        say(f"  {row.method:>16} " + " ".join(f"{cell:>9}" for cell in cells))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Bars: computing alone, compression, of the wire's time what these leave of a step, and what else it takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = list(rows)[::-1]
    alone = next((row.ms for row in rows if row.method == ALONE), 0.0)
    names, left = [row.method for row in shown], np.zeros(len(shown))
    step = np.array([row.ms for row in shown])
    computing = np.minimum(alone, step)
    compressing = np.minimum([row.compress_ms for row in shown], step - computing)
    wire = np.clip([row.wire_ms or 0.0 for row in shown], 0, step - computing - compressing)
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.36 * len(shown)))
    parts = {"without communication": computing, "compression": compressing, "the wire": wire}
    parts["all else"] = step - computing - compressing - wire
    for (label, width), colour in zip(parts.items(), ("#4292c6", "#74c476", "#9ecae1", "#d94801"), strict=True):
        bars = axes.barh(names, width, left=left, label=label, color=colour)
        left = left + width
    axes.bar_label(bars, labels=[f"{row.ms:.0f}  ({_number(row.ratio, 2)})" for row in shown], padding=3)
    axes.margins(x=0.15)
    axes.set_title(title)
    axes.set_xlabel("ms a step, and as a ratio of DDP's in full precision")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def rate(text: str) -> float:
    """An argparse type: bits a second, as `tests/hosts.py --rate` takes them."""
    found = re.fullmatch(r"([1-9]\d*)([kmg]?)bit", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs bits a second, such as 1gbit or 100mbit")
    return float(found[1]) * _BITS[found[2]]


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="which, in this order (all of the table)")
    parser.add_argument("--rate", type=rate, help="of the links, for the wire's time: 1gbit, 100mbit")
    parser.add_argument("--batch", type=at_least(1), default=1, help="sequences a rank (1)")
    parser.add_argument("--block-size", type=at_least(1), default=32, help="tokens a sequence (32)")
    parser.add_argument("--steps", type=at_least(1), default=5, help="counted steps a round (5)")
    parser.add_argument("--warmup", type=at_least(3), default=3, help="steps before them (3)")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="times that each method is built and run (1)")
    parser.add_argument("--layers", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--heads", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--embd", type=at_least(1), default=512, help="width of the model")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them there (PNG)")
    parser.set_defaults(device="cpu", dtype="float32", grad_accum=1)  # as Trial reads them

    def check(options: argparse.Namespace) -> None:
        options.methods = names_of(options.methods)
        if not options.methods:
            raise UsageError("--methods: got none; needs one or more")
        for name in options.methods:
            method_of(name)
        if comm.rank == 0:
            check_writable(options.json)
            check_writable(options.plot)

    return parser.parse_on_all_ranks(check)


def main() -> None:
    """Measures, prints, writes, draws."""
    comm = mpidl.init()
    options = parse(comm)
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.set_num_threads(1)
    peers = any(method_of(name).is_peer for name in options.methods)
    if peers:
        from collectives.bench.peers import start_gloo

        start_gloo(comm)
    config = GPT2Config(256, options.block_size, options.layers, options.heads, options.embd)
    batches = TokenBatches(tokens_of_the_standard_library(comm), comm, options.block_size, options.batch, 1)
    with torch.device("meta"):
        model = GPT2(config)
    blocks = [4.0 * sum(p.numel() for p in unit.parameters) for unit in cut_into_units(model)[:-1]]
    sizes = [p.shape for p in model.parameters()]
    shape = Shape(4.0 * sum(size.numel() for size in sizes), blocks, sizes, comm.nodes, comm.size)
    title = (
        f"GPT-2 of {shape.total / 4e6:.2f} M parameters, {comm.nodes} hosts of {comm.local_size} rank(s), "
        f"{options.batch} x {options.block_size} tokens a rank"
    )
    say(f"# {title}")
    watch = Stopwatch()

    def make(name: str) -> NetworkTrial:
        return NetworkTrial(name, comm, options, config, batches, watch)

    rows = rows_of(measure(options, make, say), shape, options.rate)
    print_table(rows, say)
    if comm.rank == 0:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot:
            plot(rows, options.plot, title)
    if peers:
        from collectives.bench.peers import stop_gloo

        stop_gloo()


if __name__ == "__main__":
    main()
