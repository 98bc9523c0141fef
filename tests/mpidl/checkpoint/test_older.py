"""A checkpoint of November 2026, before the packages were arranged as they are, is loaded by every engine.

`older/` was written by two ranks with stage 2 of ZeRO, after three steps of `Training`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import checkpoint
from tests.mpidl.zero.ways import ENGINES, STAGES

pytestmark = pytest.mark.mpi
SAVED, TRAINED, ROWS = 3, 5, 24  # steps; 24 are divided by 1, 2, 3 and 4 ranks
OLDER = Path(__file__).with_name("older")


class Training:
    """A small training in which nothing is random."""

    def __init__(self, engine: str, comm: Communicator) -> None:
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.model.register_buffer("offset", torch.tensor([0.25, -0.5]))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
        self.call: Any = self.model
        if engine in STAGES:
            settings: dict[str, Any] = {"stage": int(engine[-1]), "process_group": comm, "lr": 0.1}
            self.optimizer: Any = mpidl.ZeroOptimizer(self.model, torch.optim.AdamW, **settings)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if engine == "ddp":
            self.call = mpidl.DistributedDataParallel(self.model, process_group=comm)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def steps(self, first: int, last: int, ranks: int) -> None:
        for step in range(first, last):
            x = torch.linspace(-1, 1 + step, 3 * ROWS).view(ROWS, 3)
            part = x.chunk(ranks)[self.comm.rank if ranks > 1 else 0]
            (self.call(part) + self.model.offset).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def weights(self) -> dict[str, torch.Tensor]:
        whole = getattr(self.optimizer, "model_state_dict", self.model.state_dict)()
        return {name: tensor.clone() for name, tensor in whole.items()} if self.comm.rank == 0 else {}


@pytest.mark.parametrize("engine", ENGINES)
def test_it_goes_on_as_one_process_that_was_not_interrupted(comm: Communicator, engine: str, shared: Path) -> None:
    if comm.rank == 0:
        shutil.copytree(OLDER, shared / "older")  # a load may leave a lock
    comm.barrier()
    alone = Training("plain", comm)
    alone.steps(0, TRAINED, 1)
    expected = alone.weights()
    training = Training(engine, comm)
    loaded = checkpoint.load(shared / "older", training.model, training.optimizer, training.scheduler)
    assert (loaded.step, loaded.ranks, loaded.extra) == (SAVED, 2, {"seen": 24})
    training.steps(SAVED, TRAINED, comm.size)
    found = training.weights()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
