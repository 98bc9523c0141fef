"""Trains with ZeRO-3 over hosts, and prints how far memory has grown: each rank's own, and what its host shares."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.memory import MIB

WIDTH, BLOCKS = 1536, 5


class Stack(nn.Module):
    """Blocks and a head of the model's own, one weight each, all of one size: every unit is the largest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Memory:
    """MiB by which this rank's own memory and the host's shared memory have grown, at most, since they were `new`."""

    def __init__(self) -> None:
        gc.collect()
        self._before = self._now()
        self.begin()

    def begin(self) -> None:
        self.own = self.shared = 0.0

    def look(self, *_: Any) -> None:
        own, shared = self._now()
        self.own = max(self.own, own - self._before[0])
        self.shared = max(self.shared, shared - self._before[1])

    def peaks(self) -> dict[str, float]:
        return {"own": self.own, "shared": self.shared}

    @staticmethod
    def _now() -> tuple[float, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        own = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024
        files = os.statvfs("/dev/shm")
        return own, (files.f_blocks - files.f_bfree) * files.f_frsize / MIB


def grown(comm: Communicator, width: int, **settings: Any) -> dict[str, dict[str, float]]:
    """Peaks since before the model was built: when it is, in the first evaluation, and in training steps."""
    comm.barrier()
    memory, peaks = Memory(), {}
    comm.barrier()
    model = mpidl.deferred_init(Stack, width)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, process_group=comm, **settings)
    memory.look()
    peaks["built"] = memory.peaks()
    for part in (*model.blocks, model.head):
        part.register_forward_pre_hook(memory.look)
        part.register_forward_hook(memory.look)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(memory.look)
    x = torch.randn(2, width, requires_grad=True)
    memory.begin()
    for _ in range(2):
        with torch.no_grad():
            model(x)
    peaks["evaluation"] = memory.peaks()
    memory.begin()
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks["training"] = memory.peaks()
    return peaks


def main() -> None:
    comm = mpidl.init()
    grown(comm, 16)  # loads what is loaded once
    report = {"unit": WIDTH**2 * 4 / MIB, "units": BLOCKS + 1}
    for name, reshards in (("reshards", True), ("keeps", False)):
        report[name] = grown(comm, WIDTH, reshard_after_forward=reshards)
        gc.collect()
    print(json.dumps(report), flush=True)


main()
