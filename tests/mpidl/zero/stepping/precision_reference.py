"""Mixed precision written out in one process: the judge of training with `mpidl.Precision`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Precision
from tests.mpidl.small_models import fresh, sequences
from tests.mpidl.zero.ways import ADAM, zero

SCALE = 1024.0
CLIP = 0.01  # by value: a norm is a sum whose order depends on the shards, and its last bits turn other roundings

Make = Callable[[], nn.Module]


class WideNorm(nn.LayerNorm):
    """In fp32, whatever comes and goes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == torch.float32
        return super().forward(x.float()).to(x.dtype)


def by_hand(
    make: Make, dtype: torch.dtype, reduce: torch.dtype, wide: bool, ranks: int, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """The losses and masters of the policy, each rank's share of the batch after the other. wide: norms in fp32."""
    model = fresh(make)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
    for p in model.parameters():  # buffers are left as they are
        p.data = p.data.to(dtype)
    for module in model.modules():
        if wide and isinstance(module, nn.LayerNorm):
            module.float().__class__ = WideNorm
    optimizer = torch.optim.AdamW(masters.values(), **ADAM)
    losses = []
    for step in range(steps):
        losses.append(0.0)
        sums = {name: torch.zeros(p.shape) for name, p in masters.items()}
        reached = set()
        for rank in range(ranks):
            x, y = (part.chunk(ranks)[rank] for part in sequences(step, 0))
            loss = model(x, y)
            (loss * SCALE).backward()
            losses[-1] += loss.item() / ranks
            for name, p in trained.items():
                if p.grad is not None:
                    reached.add(name)
                    sums[name] += p.grad.float()
            model.zero_grad()
        for name, master in masters.items():
            master.grad = (sums[name] / ranks).to(reduce).float() / SCALE if name in reached else None
        nn.utils.clip_grad_value_(masters.values(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(masters[name])
    return losses, {name: p.detach() for name, p in masters.items()}


def trained_with(
    comm: Communicator, make: Make, way: str, precision: Precision, steps: int
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Trains by a ZeroOptimizer; weights on rank 0."""
    model = fresh(make, comm.rank)
    optimizer = zero(model, comm, way, precision=precision, bucket_cap_mb=0.005)
    scaler = mpidl.GradScaler(init_scale=SCALE, process_group=comm)
    losses = np.zeros(steps)
    for step in range(steps):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_value_(CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses[step] = loss.item()
    comm.all_reduce(losses, "avg")
    return losses, optimizer.model_state_dict()
