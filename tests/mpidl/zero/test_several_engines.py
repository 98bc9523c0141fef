"""Several ZeroOptimizers in one backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import SETTINGS, SGD, Plain, Several, check, data, made

pytestmark = pytest.mark.mpi

ORDERS = [(0, 1, 2), (2,), (), (1, 2)]


def loss(inner: Any, outer: Any, rank: int, step: int) -> torch.Tensor:
    """Each rank reaches other blocks of both models."""
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    between = torch.cat([inner(x, ORDERS[(rank + step) % 4]), x[:, :1]], 1)
    return outer(between, ORDERS[(rank + step + 1) % 4]).square().sum()


# Over several nodes stage 3 gathers each model's units for all ranks together.
@pytest.mark.parametrize("way", ["stage 1", "stage 2", pytest.param("stage 3", marks=pytest.mark.one_node)])
@pytest.mark.parametrize("replicas", [False, True], ids=["", "replicas"])
def test_ranks_may_fill_the_buckets_of_each_in_another_order(comm, way: str, replicas: bool) -> None:
    group = comm.split(comm.rank) if replicas else None  # each rank is one
    settings = {"process_group": comm, "shard_group": group, **SETTINGS[way], **SGD}
    models: list[nn.Module] = [made(Several, comm.rank) for _ in range(2)]
    optimizers = [mpidl.ZeroOptimizer(m, torch.optim.SGD, **settings) for m in models]
    plain = [made(Several) for _ in range(2)]
    judges = [torch.optim.SGD(m.parameters(), **SGD) for m in plain]
    for step in range(4):
        loss(*models, comm.rank, step).backward()
        sum(loss(*plain, rank, step) / comm.size for rank in range(comm.size)).backward()  # type: ignore[union-attr]
        for optimizer in (*optimizers, *judges):
            optimizer.step()
            optimizer.zero_grad()
        for model, optimizer, expected in zip(models, optimizers, plain, strict=True):
            check(model, optimizer, expected)


# Stages 2 and 3 have fewer buffers than these models have buckets. What "topk:1" sends is all.
@pytest.mark.parametrize("hook", [None, "allreduce", "topk:1", "topk:1, loaded"])
@pytest.mark.parametrize("way", ["stage 1", "stage 2", pytest.param("stage 3", marks=pytest.mark.one_node)])
def test_ranks_may_call_independent_models_in_another_order(comm, way: str, hook: str | None) -> None:
    """Backward goes through all of one model before the other begins, which is another one on every second rank."""
    order, settings = [0, 1] if comm.rank % 2 == 0 else [1, 0], {"process_group": comm, **SETTINGS[way], **SGD}
    if hook is not None and hook.startswith("topk"):
        settings["compress"] = "topk:1"

    def make() -> nn.Module:
        return Several(6)

    def own_loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(data(rank, step), tuple(range(6))).square().sum()

    models = [made(make, comm.rank) for _ in range(2)]
    optimizers = [mpidl.ZeroOptimizer(m, torch.optim.SGD, **settings) for m in models]
    for optimizer in optimizers if hook == "allreduce" else []:
        optimizer.register_comm_hook(None, mpidl.comm_hooks.allreduce)
    plain = [Plain(make, comm.size) for _ in range(2)]
    for step in range(2):
        for optimizer in optimizers if step and hook == "topk:1, loaded" else []:
            optimizer.compressed.load_state_dict(optimizer.compressed.state_dict())
        losses = {number: own_loss(models[number], comm.rank, step + number) for number in order}
        (losses[0] + losses[1]).backward()
        for number, (model, optimizer, judge) in enumerate(zip(models, optimizers, plain, strict=True)):
            judge.step(lambda m, rank, at=step + number: own_loss(m, rank, at).backward())  # type: ignore[misc]
            optimizer.step()
            optimizer.zero_grad()
            check(model, optimizer, judge.model)
