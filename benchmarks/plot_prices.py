"""Draws what an operation's algorithms should cost on a cluster, and how such predictions fit this machine.

    python benchmarks/plot_prices.py --output prices.png
    mpirun -n 4 python benchmarks/plot_prices.py --prediction prediction.png --json prices.json

--output: predicted time by bytes and algorithm, a panel for each number of ranks, on the cluster that the options
describe. --prediction: measured here and predicted for here, from three figures that are measured first, by all ranks
at once, as in a collective:

    alpha, beta   latency and seconds a byte of a message, from messages of two sizes that every rank passes to its
                  right neighbour while it receives from its left; run as a schedule, so that the interpreter's time for
                  a round is in alpha
    gamma         seconds to reduce a byte, in pieces of the size that the executor reduces at once

All ranks of the job are taken to be as near to each other as neighbours are on average, so the fit says most within
one node. What the model leaves out stands in `collectives.price`; for small messages it is above all the interpreter's
time for a call as a whole, for large ones that ranks share cores and memory. Measured times lie above predicted ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from collectives import ArgumentError, Communicator
from collectives.backends.executor import SEGMENT_BYTES, Execution, whole
from collectives.base import buffers
from collectives.base.reduction import Reduction
from collectives.base.scratch import Scratch
from collectives.bench.buffers import ArraySets
from collectives.bench.operations import OPERATIONS, Case
from collectives.bench.sides import own_call
from collectives.price import Cluster, Pricing
from collectives.schedules.algorithms import ALGORITHMS, schedule
from collectives.schedules.schedule import Role, Round, Schedule, chunk, recv, send
from collectives.timing import measure, repetitions
from mpidl.cli import ArgumentParser, at_least, bytes_text, check_writable, names
from mpidl.errors import UsageError
from mpidl.job.agreement import agree_or_exit

ALGORITHM_NAMES = tuple(sorted({name for family in ALGORITHMS.values() for name in family}))
SMALL, LARGE = 8, 16 << 20  # bytes of the two messages that give alpha and beta
IN_A_ROW = 10  # rounds that follow each other without a barrier, as in a collective


@dataclass(frozen=True)
class Row:
    """One point of a curve. measured_us: None on a modelled cluster."""

    op: str
    algorithm: str
    ranks: int
    bytes: int
    predicted_us: float
    measured_us: float | None = None


def sizes(low: int, high: int, factor: int) -> list[int]:
    """Lists low, low * factor, ... up to high."""
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return found


def prices(op: str, name: str, ranks: int, cluster: Cluster, nbytes: Sequence[int]) -> Iterator[Row]:
    """An algorithm's predicted times. Raises ArgumentError where it has more rounds than can be followed."""
    plans: dict[Schedule, Pricing] = {}  # mostly one schedule for all sizes
    for size in nbytes:
        made = schedule(op, name, ranks, nbytes=size)
        if made not in plans:
            plans[made] = Pricing(made, cluster)
        yield Row(op, name, ranks, size, plans[made].seconds(size) * 1e6)


def predict(comm: Communicator, options: argparse.Namespace, cluster: Cluster) -> list[Row]:
    """Every algorithm at every number of ranks and size; the ranks of the job share the work. Collective."""
    nbytes = sizes(options.min_bytes, options.max_bytes, options.factor)
    # The largest first, so that no rank is left alone with one of them.
    work = sorted(((ranks, name) for name in options.algorithms for ranks in options.ranks), key=lambda one: -one[0])
    rows: list[Row] = []
    for ranks, name in work[comm.rank :: comm.size]:
        start = time.perf_counter()
        try:
            found = list(prices(options.op, name, ranks, cluster, nbytes))
        except ArgumentError as error:
            print(f"# left out: {error}", flush=True)
            continue
        took = time.perf_counter() - start
        print(
            f"# {name} on {ranks} ranks: {found[0].predicted_us:.1f} us for {found[0].bytes} bytes, "
            f"{found[-1].predicted_us:.1f} us for {found[-1].bytes}; {len(found)} sizes, {took:.1f} s to predict",
            flush=True,
        )
        rows += found
    everyone: list[list[Row]] = comm.mpi.allgather(rows)

    def check() -> None:
        if not any(everyone):
            raise UsageError("--ranks, --algorithms: nothing that can be predicted; the lines above say why")

    agree_or_exit(comm, check)
    order = {name: number for number, name in enumerate(options.algorithms)}
    return sorted((row for part in everyone for row in part), key=lambda r: (r.ranks, order[r.algorithm], r.bytes))


def slowest(comm: Communicator, call: Callable[[], Any], count: int) -> float:
    """Median over repetitions of the slowest rank's seconds. Collective."""
    return measure(comm, {"": call}, count)[""]


def shifts(ranks: int) -> Schedule:
    """Makes a schedule in which every rank sends its data to its right neighbour, IN_A_ROW times."""

    def rounds(rank: int) -> list[Round]:
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        return [(send(chunk(Role.IN, 0), right), recv(chunk(Role.OUT, 0), left))] * IN_A_ROW

    return Schedule("shifts", "all_to_all", ranks, 1, rounds)


def calibrate(comm: Communicator, iters: int | None) -> Cluster:
    """Measures this machine as a cluster of one node. Collective."""
    times, made, scratch = {}, shifts(comm.size), Scratch()
    for nbytes in (SMALL, LARGE):
        leaving, arriving = (
            whole(buffers.inspect(np.zeros(nbytes, np.uint8), "x", writable=True), [nbytes]) for _ in range(2)
        )
        execution = Execution(comm.mpi, made, {Role.IN: leaving, Role.OUT: arriving}, [nbytes], scratch)
        times[nbytes] = slowest(comm, execution.run, iters or repetitions(nbytes)) / IN_A_ROW
    beta = max(1e-15, (times[LARGE] - times[SMALL]) / (LARGE - SMALL))

    size = SEGMENT_BYTES // 4
    ours, theirs, op = np.zeros(LARGE // 4, np.float32), np.zeros(size, np.float32), Reduction("sum")

    def reduce() -> None:
        for start in range(0, ours.size, size):
            op.combine_two(ours[start : start + size], theirs, ours[start : start + size])

    gamma = slowest(comm, reduce, iters or repetitions(LARGE)) / LARGE
    return Cluster(comm.size, times[SMALL], 1 / beta, times[SMALL], 1 / beta, gamma)


def compare(comm: Communicator, options: argparse.Namespace, machine: Cluster) -> list[Row]:
    """Measured and predicted at this job's number of ranks. Collective."""
    rows: list[Row] = []
    if comm.rank == 0:
        print(f"# {'bytes':>10} {'algorithm':>18} {'predicted us':>13} {'measured us':>12} {'ratio':>6}")
    for nbytes in sizes(options.min_bytes, options.measured_max_bytes, options.factor):
        operation = OPERATIONS[options.op]
        op, root = "sum" if operation.reduces else "none", 0 if operation.rooted else -1
        case = Case(operation, "float32", op, root, nbytes)
        arena = ArraySets(comm, case, "user", 1, "cpu", has_second=True)
        arrays, size = arena.arrays(0, operation.usual), arena.nbytes
        served = [name for name in options.algorithms if name in comm.algorithms(options.op)]
        calls = {name: own_call(comm, case, operation.usual, arrays, algorithm=name) for name in served}
        measured = measure(comm, calls, options.iters or repetitions(size))
        for name, seconds in measured.items():
            (predicted,) = prices(options.op, name, comm.size, machine, [size])
            rows.append(replace(predicted, measured_us=seconds * 1e6))
            if comm.rank == 0:
                print(
                    f"  {size:>10} {name:>18} {predicted.predicted_us:>13.1f} {seconds * 1e6:>12.1f} "
                    f"{seconds * 1e6 / predicted.predicted_us:>6.2f}",
                    flush=True,
                )
    return sorted(rows, key=lambda row: (options.algorithms.index(row.algorithm), row.bytes))


def plot_prices(rows: Sequence[Row], cluster: Cluster, path: Path) -> None:
    """A panel for each number of ranks, a line for each algorithm."""
    pyplot = _pyplot()
    counts = sorted({row.ranks for row in rows})
    columns = min(2, len(counts))
    lines = -(-len(counts) // columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.4 * lines), squeeze=False, sharex=True)
    for panel in panels.flat[len(counts) :]:
        panel.set_visible(False)
    for panel, ranks in zip(panels.flat, counts, strict=False):
        for name, colour in _colours(rows).items():
            points = [row for row in rows if row.algorithm == name and row.ranks == ranks]
            panel.loglog([p.bytes for p in points], [p.predicted_us for p in points], color=colour, label=name)
        nodes = -(-ranks // cluster.ranks_per_node)
        panel.set(title=f"{ranks} ranks, {nodes} node{'s' * (nodes > 1)}", ylabel="predicted (us)", xlabel="bytes")
        panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    c = cluster
    figure.suptitle(
        f"{rows[0].op}: {c.ranks_per_node} ranks and {c.ports} port{'s' * (c.ports > 1)} a node; "
        f"inside {c.intra_latency * 1e6:g} us, {c.intra_bandwidth / 1e9:g} GB/s; "
        f"between {c.inter_latency * 1e6:g} us, {c.inter_bandwidth / 1e9:g} GB/s; "
        f"reducing at {1e-9 / c.gamma if c.gamma else float('inf'):g} GB/s",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def plot_prediction(rows: Sequence[Row], machine: Cluster, path: Path) -> None:
    """Left: times, measured as points and predicted as lines. Right: how many times the prediction is measured."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, colour in _colours(rows).items():
        points = [row for row in rows if row.algorithm == name]
        x = [p.bytes for p in points]
        left.loglog(x, [p.predicted_us for p in points], color=colour, label=name)
        left.loglog(x, [p.measured_us for p in points], "o", markersize=4, color=colour)
        ratio = [(p.measured_us or 0) / p.predicted_us for p in points]
        right.semilogx(x, ratio, "o-", markersize=4, color=colour, label=name)
    left.set(
        xlabel="bytes", ylabel="us", title=f"{rows[0].op}, {rows[0].ranks} ranks: measured (points), predicted (lines)"
    )
    left.title.set_fontsize(9)
    left.legend(fontsize=8)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(
        xlabel="bytes",
        title=f"measured / predicted\nalpha {machine.intra_latency * 1e6:.2g} us, "
        f"1/beta {machine.intra_bandwidth / 1e9:.2g} GB/s, 1/gamma {1e-9 / machine.gamma:.2g} GB/s",
    )
    right.title.set_fontsize(9)
    right.set_ylim(bottom=0)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    return {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row.algorithm for row in rows))}


def rank_counts(text: str) -> list[int]:
    """An argparse type: numbers of ranks with commas between."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs numbers from 1, with commas between")
    return sorted({int(part) for part in parts})


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="PATH", help="draw predicted times there (PNG)")
    parser.add_argument("--prediction", type=Path, metavar="PATH", help="draw predicted and measured times there (PNG)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--op", choices=tuple(ALGORITHMS), default="all_reduce", help="which operation")
    parser.add_argument("--algorithms", type=names(ALGORITHM_NAMES), help="which; by default all that it has")
    parser.add_argument("--min-bytes", type=bytes_text, default="1K", help="smallest size")
    parser.add_argument("--max-bytes", type=bytes_text, default="1G", help="largest size that is predicted alone")
    parser.add_argument("--measured-max-bytes", type=bytes_text, default="64M", help="largest size that is measured")
    parser.add_argument("--factor", type=at_least(2), default=4, help="from one size to the next")
    parser.add_argument("--iters", type=at_least(1), help="repetitions; by default fewer for larger sizes")
    model = parser.add_argument_group("the cluster of --output")
    model.add_argument("--ranks", type=rank_counts, default="8,64,512,4096", help="numbers of ranks, a panel each")
    model.add_argument("--ranks-per-node", type=at_least(1), default=8, help="ranks of a node")
    model.add_argument("--ports", type=at_least(1), default=1, help="network ports of a node")
    model.add_argument("--intra-latency", type=at_least(0, float), default=1e-6, help="inside a node, seconds")
    model.add_argument("--intra-bandwidth", type=at_least(1, float), default=20e9, help="of a rank, bytes a second")
    model.add_argument("--inter-latency", type=at_least(0, float), default=5e-6, help="between nodes, seconds")
    model.add_argument("--inter-bandwidth", type=at_least(1, float), default=12.5e9, help="of a port, bytes a second")
    model.add_argument("--gamma", type=at_least(0, float), default=5e-11, help="seconds to reduce a byte")

    def check(options: argparse.Namespace) -> None:
        options.algorithms = options.algorithms or list(ALGORITHMS[options.op])
        for name in options.algorithms:
            if name not in ALGORITHMS[options.op]:
                raise UsageError(f"--algorithms: {options.op} has {','.join(ALGORITHMS[options.op])}; got {name!r}")
        if not (options.output or options.prediction):
            raise UsageError("needs --output, --prediction, or both")
        if options.prediction and comm.size == 1:
            raise UsageError("--prediction: measures messages; needs at least 2 ranks (mpirun -n 2 ...)")
        largest = max(
            [options.max_bytes] * bool(options.output) + [options.measured_max_bytes] * bool(options.prediction)
        )
        if options.min_bytes > largest:
            raise UsageError(f"--min-bytes {options.min_bytes} is more than the largest size, {largest}")
        if comm.rank == 0:
            if find_spec("matplotlib") is None:
                raise UsageError("drawing needs matplotlib (pip install matplotlib)")
            for path in (options.output, options.prediction, options.json):
                check_writable(path)

    return parser.parse_on_all_ranks(check)


def main() -> None:
    """Measures, predicts, draws, writes."""
    comm = mpidl.init()
    options = parse(comm)
    torch.set_num_threads(1)
    written: dict[str, Any] = {}
    if options.prediction:
        machine = calibrate(comm, options.iters)
        if comm.rank == 0:
            print(
                f"# {comm.size} ranks on {comm.nodes} node(s): alpha {machine.intra_latency * 1e6:.1f} us, "
                f"1/beta {machine.intra_bandwidth / 1e9:.2f} GB/s, 1/gamma {1e-9 / machine.gamma:.2f} GB/s",
                flush=True,
            )
        measured = compare(comm, options, machine)
        written |= {"machine": asdict(machine), "measured": [asdict(row) for row in measured]}
        if comm.rank == 0:
            plot_prediction(measured, machine, options.prediction)
    if options.output:
        cluster = Cluster(
            options.ranks_per_node,
            options.intra_latency,
            options.intra_bandwidth,
            options.inter_latency,
            options.inter_bandwidth,
            options.gamma,
            ports=options.ports,
        )
        predicted = predict(comm, options, cluster)
        written |= {"cluster": asdict(cluster), "predicted": [asdict(row) for row in predicted]}
        if comm.rank == 0:
            plot_prices(predicted, cluster, options.output)
    if comm.rank == 0 and options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
