"""Measures what offloaded optimizer state saves and costs: bytes in memory by category, and milliseconds a step.

    mpirun -n 2 python benchmarks/bench_offload.py --steps 5

GPT-2 with bf16 parameters, fp32 masters and AdamW, each way after the other on the same batches. The bytes are counted
between two steps, so with a delayed update while it is under way. A step takes as long as on its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import mpidl
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least, check_writable
from mpidl.memory import MIB, measure
from mpidl.models.gpt2 import GPT2, GPT2Config

WAYS = ("none", "disk", "cpu delayed", "disk delayed")


@dataclass
class Row:
    """Result of one way to offload: bytes of rank 0, and milliseconds. loss: the last one."""

    offload: str
    parameters: int
    gradients: int
    optimizer: int
    offloaded: int
    step_ms: float
    loss: float


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument("--steps", type=at_least(1), default=10, help="counted steps, after two that are not")
    parser.add_argument("--layers", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--embd", type=at_least(8), default=512, help="width of the model, a multiple of 8")
    parser.add_argument("--batch", type=at_least(1), default=1, help="sequences of 128 tokens a rank")
    parser.add_argument("--buffer-mb", type=at_least(0, float), default=12.0, help="of Offload")
    parser.add_argument("--path", help="a directory on the disk")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    return parser.parse_on_all_ranks(lambda options: check_writable(options.json if comm.rank == 0 else None))


def run(comm: Communicator, options: argparse.Namespace, way: str) -> Row:
    """Trains in one way."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(256, 128, options.layers, 8, options.embd))
    to, *delayed = way.split()
    offload = None
    if to != "none":
        path = options.path if to == "disk" else None
        offload = mpidl.Offload(to, path, options.buffer_mb, bool(delayed), delay_from=0)
    optimizer = mpidl.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        options.stage,
        precision=mpidl.Precision(torch.bfloat16, torch.float32),
        offload=offload,
        lr=1e-3,
        fused=True,
    )
    tokens = torch.randint(0, 256, (options.batch, 128), generator=torch.Generator().manual_seed(comm.rank))
    seconds = []
    for _ in range(options.steps + 2):
        comm.barrier()
        start = time.perf_counter()
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    held = measure(model, optimizer)
    slowest = np.array(seconds[2:])
    comm.all_reduce(slowest, "max")
    optimizer.flush()
    figures = (held.parameters, held.gradients, held.optimizer, held.offloaded)
    return Row(way, *figures, statistics.median(slowest.tolist()) * 1e3, loss.item())


def main() -> None:
    """Prints a table."""
    comm = mpidl.init()
    options = parse(comm)
    rows = [run(comm, options, way) for way in WAYS]
    if comm.rank:
        return
    print("| offload | parameters | gradients | optimizer | offloaded | ms a step |\n|---|---|---|---|---|---|")
    for row in rows:
        sizes = (row.parameters, row.gradients, row.optimizer, row.offloaded)
        print(f"| {row.offload} | {' | '.join(f'{nbytes / MIB:.1f}' for nbytes in sizes)} | {row.step_ms:.0f} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
