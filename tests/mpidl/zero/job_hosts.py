"""Trains a stack of layers with ZeRO-3 over hosts; one rank of each host prints what its interface has counted.

job_hosts.py STEPS [OPTIONS] [-- STEPS [OPTIONS]]...    one training after another, each with a report
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

import mpidl
from collectives import Communicator

WIDTH, BLOCKS = 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def counted() -> tuple[int, int]:
    """Bytes that this host has received and sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    others = [f for f in fields if f[0] != "lo"]
    return sum(int(f[1]) for f in others), sum(int(f[9]) for f in others)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_over(comm: Communicator, loss: torch.Tensor) -> torch.Tensor:
    """The ranks' mean loss. It is a few bytes on the link."""
    loss = loss.clone()
    comm.all_reduce(loss, "avg")
    return loss


def expected_losses(steps: int, ranks: int) -> list[float]:
    """Computes the losses of a single process on all ranks' batches."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(torch.cat([batch(step, rank) for rank in range(ranks)]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(number: int, arguments: list[str]) -> None:
    """Trains once. number: of the training, for its report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--shard-group", default="world")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--compress-parameters")
    parser.add_argument("--checkpoint", type=Path, help="save there in the middle, and go on from it in a new model")
    options = parser.parse_args(arguments)
    comm = mpidl.init()
    torch.manual_seed(0)
    model = Stack()
    group = None if options.shard_group == "world" else options.shard_group
    settings = {"stage": 3, "shard_group": group, "lr": 1e-3, "offload": "disk" if options.checkpoint else None}
    settings |= {"compress_parameters": options.compress_parameters}
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, **settings)
    losses: list[float] = []

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            loss = model(batch(step, comm.rank))
            losses.append(float(mean_over(comm, loss.detach())))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if not options.compare:
        train(0, 1)  # which learns the order of units
    comm.barrier()
    before, moved = counted(), optimizer.traffic().gathered_bytes
    comm.barrier()
    train(1 - options.compare, options.steps)
    if options.checkpoint:
        mpidl.checkpoint.save(options.checkpoint, model, optimizer, step=options.steps)
        model = mpidl.deferred_init(Stack)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, **settings)
        mpidl.checkpoint.load(options.checkpoint, model, optimizer)
        train(options.steps, options.steps)
    comm.barrier()
    after, moved = counted(), optimizer.traffic().gathered_bytes - moved
    comm.barrier()
    if comm.local_rank == 0:
        report = {
            "number": number,
            "received": after[0] - before[0],
            "sent": after[1] - before[1],
            "gathered_bytes": moved,
            "block_bytes": [4 * sum(p.numel() for p in block.parameters()) for block in model.blocks],
            "own_bytes": 4 * sum(p.numel() for p in model.head.parameters()),
            "losses": losses,
            "expected": expected_losses(len(losses), comm.size) if options.compare else [],
        }
        print(json.dumps(report), flush=True)


for number, (_, given) in enumerate(part for part in groupby(sys.argv[1:], "--".__eq__) if not part[0]):
    main(number, list(given))
