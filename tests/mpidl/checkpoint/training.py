"""A training that checkpoints can interrupt: engines on the global batches of tests.mpidl.small_models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import WAYS

SETTINGS = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}


def name_in_checkpoints(engine: str) -> str:
    """The name of an engine in the index of what it saves."""
    return f"zero{WAYS[engine]['stage']}" if engine in WAYS else engine


class Run:
    """A model with its engine, optimizer and schedule on some ranks."""

    def __init__(
        self,
        engine: str,
        comm: Communicator,
        model: nn.Module | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        settings: dict[str, Any] | None = None,
        **of_engine: Any,
    ) -> None:
        self.engine, self.comm = engine, comm
        self.model = fresh(MODELS["gpt2"]) if model is None else model
        self.call: Any = self.model
        settings = SETTINGS if settings is None else settings
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
        groups[1]["lr"] = 3e-4
        self.optimizer: Any
        if engine in WAYS:
            given = {**WAYS[engine], **of_engine, **settings}
            self.optimizer = mpidl.ZeroOptimizer(self.model, optimizer, params=groups, process_group=comm, **given)
        else:
            if engine == "ddp":
                self.call = mpidl.DistributedDataParallel(self.model, process_group=comm, **of_engine)
            self.optimizer = optimizer(groups, **settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def micro_step(self, step: int, micro: int = 0, of: int = 1) -> float:
        """Forward and backward of this rank's share of a global batch; the mean loss."""
        ranks = 1 if self.engine == "plain" else self.comm.size
        x, y = (part.chunk(ranks)[self.comm.rank % ranks] for part in sequences(step, micro))
        loss = self.call(x, y) / of
        loss.backward()
        total = np.array([loss.item()])
        self.comm.all_reduce(total, "avg")
        return float(total[0])

    def finish(self) -> None:
        """The optimizer's step, and what belongs to it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def steps(self, first: int, last: int) -> list[float]:
        """Trains, and returns the losses of all ranks' samples."""
        losses = []
        for step in range(first, last):
            losses.append(self.micro_step(step))
            self.finish()
        return losses

    def save(self, path: Any, step: int, **more: Any) -> Any:
        """Saves to `path`, with the schedule."""
        return mpidl.checkpoint.save(
            path, self.call, self.optimizer, self.schedule, step=step, process_group=self.comm, **more
        )

    def load(self, path: Any, **more: Any) -> Any:
        """Loads from `path`, with the schedule."""
        return mpidl.checkpoint.load(path, self.call, self.optimizer, self.schedule, process_group=self.comm, **more)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the plain state_dict, on rank 0; copies."""
        if self.engine in WAYS:
            whole = self.optimizer.model_state_dict()
            return {n: value for n, value in whole.items() if torch.is_tensor(value)} if self.comm.rank == 0 else {}
        return {name: value.clone() for name, value in self.model.state_dict().items() if torch.is_tensor(value)}
