"""Resuming within an epoch with a DataLoader and dropout: the same samples and, to the bit, the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mpidl
from mpidl.data import DataLoader
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = pytest.mark.mpi

SAMPLES, BATCH = 48, 2
LOADERS: dict[str, dict[str, Any]] = {
    "thread": {},
    "none": {"prefetch_factor": 0},
    "workers": {"num_workers": 1, "persistent_workers": True},
}


class Training:
    """Two epochs of a model with dropout, on a loader that shuffles."""

    def __init__(self, engine: str, comm: Any, loader: dict[str, Any]) -> None:
        torch.manual_seed(5)
        x = torch.randn(SAMPLES, 6)
        model: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.5), nn.Linear(10, 3))
        self.model = self.call = model
        self.optimizer: Any
        if engine == "ddp":
            self.call = mpidl.DistributedDataParallel(model, process_group=comm)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            self.optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=comm, lr=0.01, **WAYS[engine])
        self.loader = DataLoader(
            TensorDataset(x, x[:, :3]), BATCH, shuffle=True, process_group=comm, drop_last=True, seed=3, **loader
        )
        torch.manual_seed(70 + comm.rank)  # dropout differs from rank to rank

    def run(self, epoch: int, saves: tuple[int, Path] | None = None) -> list[tuple[float, list[float]]]:
        """Loss and samples of each step that is left of two epochs. saves: after which of these steps, and where."""
        seen = []
        for number in range(epoch, 2):
            self.loader.set_epoch(number)
            for x, y in self.loader:
                loss = (self.call(x) - y).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append((loss.item(), x.flatten().tolist()))
                if saves is not None and saves[0] == len(seen):
                    mpidl.checkpoint.save(saves[1], self.call, self.optimizer, sampler=self.loader, step=len(seen))
        self.loader.close()
        return seen


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_with_dropout_goes_on_to_the_bit_within_an_epoch(comm, shared: Path, engine: str, kind: str) -> None:
    steps = SAMPLES // (BATCH * comm.size)
    stop = steps + 2  # in the second epoch
    whole = Training(engine, comm, LOADERS[kind]).run(0, (stop, shared))
    again = Training(engine, comm, LOADERS[kind])
    assert mpidl.checkpoint.load(shared, again.call, again.optimizer, sampler=again.loader).step == stop
    assert again.run(1) == whole[stop:]
    assert len(whole) == 2 * steps
