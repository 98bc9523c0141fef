"""Measures the memory of DDP and of ZeRO's stages by category, and draws it next to the estimate.

    mpirun -n 2 python benchmarks/plot_memory.py --json memory.json --plot memory.png
    python benchmarks/plot_memory.py --from memory.json --plot memory.png

A GPT-2 is trained by AdamW. Memory is measured within the second step, at the end of the forward pass of its second
micro-step: parameters, gradients, optimizer state, buckets and activations are all there. "grown" is by how much a
process's data (`mpidl.memory.data_mib`, mean over ranks) is more than before the model was made. A plain model of the
same sizes runs first, and with each engine a tiny one, so that code, kernels and the collectives' own memory are there
before; freed memory is given back at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least, check_writable, names
from mpidl.errors import UsageError
from mpidl.memory import MIB, Estimate, Measurement, activation_bytes, data_mib, estimate, measure, measure_activations
from mpidl.models.gpt2 import GPT2, GPT2Config, parameter_count

ENGINES = ("ddp", "zero1", "zero2", "zero3")
CATEGORIES = ("parameters", "gradients", "optimizer", "buckets", "activations")
COLOURS = ("#4292c6", "#fd8d3c", "#74c476", "#bdbdbd", "#9e9ac8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = GPT2Config(256, 8, 2, 2, 32)


@dataclass(frozen=True)
class Row:
    """One engine's result: bytes a rank, means over the ranks. estimated: the same categories by formula."""

    engine: str
    ranks: int
    nodes: int
    params: int
    dtype: str
    measured: dict[str, float]
    estimated: dict[str, float]
    grown: float


def run(name: str, comm: Communicator, config: GPT2Config, options: argparse.Namespace) -> tuple[Measurement, float]:
    """Trains a step and a half; what is then held, and the bytes by which the process has grown."""
    gc.collect()
    before = data_mib()
    torch.manual_seed(0)
    model = GPT2(config).to(DTYPES[options.dtype])
    call: Any = model
    if name == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=comm)
        optimizer: Any = torch.optim.AdamW(model.parameters())
    else:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=int(name[-1]), process_group=comm)
    tokens = torch.randint(0, config.vocab_size, (options.batch, config.block_size))
    call(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    call(tokens, tokens).backward()
    with measure_activations(model) as saved:
        loss = call(tokens, tokens)
    gc.collect()
    comm.barrier()
    found, grown = measure(call, optimizer, saved), (data_mib() - before) * MIB
    comm.barrier()
    loss.backward()
    return found, grown


def predict(name: str, comm: Communicator, config: GPT2Config, options: argparse.Namespace) -> Estimate:
    """Estimates the memory by formula; the project's attention keeps no scores."""
    with torch.device("meta"):
        model = GPT2(config)
    sizes: dict[str, Any] = {"hidden": config.embd, "heads": config.heads, "layers": config.layers}
    kept = activation_bytes(options.batch, config.block_size, **sizes, dtype=options.dtype, recompute="selective")
    stage = 0 if name == "ddp" else int(name[-1])
    masters = name != "ddp"
    return estimate(model, comm.size, comm.nodes, stage, options.dtype, activations=kept, masters=masters)


def measure_all(comm: Communicator, options: argparse.Namespace) -> list[Row]:
    """A row for each engine; also printed. Collective."""
    config = GPT2Config(options.vocab_size, options.block_size, options.layers, options.heads, options.embd)
    give_memory_back_at_once()
    model = GPT2(config).to(DTYPES[options.dtype])
    model(*[torch.zeros(options.batch, config.block_size, dtype=torch.int64)] * 2).backward()
    del model
    rows = []
    say = print if comm.rank == 0 else lambda *_, **__: None
    say(f"# {'MiB a rank':>10}", *(f"{category:>11}" for category in CATEGORIES), *(("      total", "      grown")))
    for name in options.engines:
        run(name, comm, TINY, options)
        found, grown = run(name, comm, config, options)
        figures = np.array([*(getattr(found, category) for category in CATEGORIES), grown], np.float64)
        comm.all_reduce(figures, "avg")
        predicted = predict(name, comm, config, options)
        estimated = {category: float(getattr(predicted, category)) for category in CATEGORIES}
        with torch.device("meta"):
            count = parameter_count(GPT2(config))
        measured = dict(zip(CATEGORIES, figures.tolist(), strict=False))
        rows.append(Row(name, comm.size, comm.nodes, count, options.dtype, measured, estimated, float(figures[-1])))
        told = [*figures[:-1], sum(figures[:-1]), figures[-1]]
        say(f"{name:>12}", *(f"{value / MIB:11.1f}" for value in told), flush=True)
        told = [*estimated.values(), sum(estimated.values())]
        say(f"{'estimate':>12}", *(f"{value / MIB:11.1f}" for value in told), flush=True)
    return rows


def give_memory_back_at_once() -> None:
    """Large blocks of the C library get mappings of their own: what is freed is gone, and what is held is in use."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        threshold = -3  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(threshold, 1 << 16)


def plot(rows: list[Row], path: Path) -> None:
    """Two stacked bars an engine, measured and estimated, and a mark where the process is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    places = np.arange(len(rows))
    for offset, label, hatch in ((-0.2, "measured", ""), (0.2, "estimated", "//")):
        bottom = np.zeros(len(rows))
        for category, colour in zip(CATEGORIES, COLOURS, strict=True):
            heights = np.array([getattr(row, label)[category] for row in rows]) / 1e6
            named = category if label == "measured" else None
            axes.bar(
                places + offset,
                heights,
                0.36,
                bottom,
                color=colour,
                label=named,
                hatch=hatch,
                edgecolor="white",
                lw=0.3,
            )
            bottom += heights
        for place, height in zip(places + offset, bottom, strict=True):
            axes.annotate(f"{height:.0f}", (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.plot(
        places - 0.2, [row.grown / 1e6 for row in rows], "k_", markersize=26, label="the process's data has grown by"
    )
    axes.set_xticks(places, [row.engine for row in rows])
    axes.set_ylabel("MB a rank")
    first = rows[0]
    axes.set_title(
        f"GPT-2 of {first.params / 1e6:.1f} M parameters, {first.dtype}, {first.ranks} ranks; left measured, "
        "right (hatched) estimated",
        fontsize=10,
    )
    axes.margins(y=0.1)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=names(ENGINES), default=",".join(ENGINES), help="which, with commas between")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="of the parameters")
    parser.add_argument("--batch", type=at_least(1), default=4, help="sequences a rank a micro-step")
    parser.add_argument("--block-size", type=at_least(1), default=128, help="tokens a sequence")
    parser.add_argument("--layers", type=at_least(1), default=6, help="of the model")
    parser.add_argument("--heads", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--embd", type=at_least(1), default=384, help="width of the model")
    parser.add_argument("--vocab-size", type=at_least(1), default=256, help="tokens that it knows")
    parser.add_argument("--from", dest="given", type=Path, metavar="PATH", help="draw what --json has written there")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw there (PNG)")

    def check(options: argparse.Namespace) -> None:
        GPT2Config(options.vocab_size, options.block_size, options.layers, options.heads, options.embd)
        if options.given is not None:
            try:
                options.rows = [Row(**row) for row in json.loads(options.given.read_text())]
            except (OSError, ValueError, TypeError) as error:
                raise UsageError(f"--from: {options.given} holds no rows of this program ({error})") from None
        if comm.rank == 0:
            check_writable(options.json)
            check_writable(options.plot)

    return parser.parse_on_all_ranks(check)


def main() -> None:
    """Measures or reads, writes, draws."""
    comm = mpidl.init()
    options = parse(comm)
    rows = options.rows if options.given else measure_all(comm, options)
    if comm.rank == 0:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot:
            plot(rows, options.plot)


if __name__ == "__main__":
    main()
