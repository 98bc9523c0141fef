"""Clipping under ZeRO by torch's own functions and by the optimizer's, as of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import mpidl
from tests.mpidl.zero.reference import Plain, Several, check, engine, made, plainly
from tests.mpidl.zero.ways import WAYS, every_part, every_way

pytestmark = pytest.mark.mpi

MAX = 0.05  # of norms: always less than that of a gradient here


def with_total(parameters: Any) -> torch.Tensor:
    parameters = list(parameters)
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, MAX, norm)
    return norm


def foreach(parameters: Any) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients, 2.0)).norm()
    torch._foreach_mul_(gradients, torch.clamp(MAX / (norm + 1e-6), max=1.0))
    return norm


def foreach_values(parameters: Any) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_clamp_min_(gradients, -0.01)
    torch._foreach_clamp_max_(gradients, 0.01)


CLIPS: dict[str, Callable[[Any], torch.Tensor | float | None]] = {
    "norm": lambda parameters: clip_grad_norm_(parameters, MAX),
    "one-norm": lambda parameters: clip_grad_norm_(parameters, MAX, 1.0),
    "largest": lambda parameters: clip_grad_norm_(parameters, MAX, math.inf),
    "value": lambda parameters: clip_grad_value_(parameters, 0.01),
    "total": with_total,
    "foreach": foreach,
    "foreach-value": foreach_values,
    "data": lambda parameters: [p.grad.data.clamp_(-0.01, 0.01) for p in parameters if p.grad is not None] and None,
    "mpidl": lambda parameters: mpidl.clip_grad_norm_(parameters, MAX),
    "mpidl-value": lambda parameters: mpidl.clip_grad_value_(parameters, 0.01),
}


def follow_clipped(comm, way: str, clip: Callable[[Any], Any], steps: int = 3, **settings: Any) -> None:
    model, optimizer = engine(comm, Several, way, **settings)
    plain = Plain(Several, comm.size)
    for step in range(steps):
        for rank in range(comm.size):
            (plainly(plain.model, rank, step) / comm.size).backward()
        plainly(model, comm.rank, step).backward()
        expected, found = clip(plain.model.parameters()), clip(model.parameters())
        if expected is not None:
            assert float(found) == pytest.approx(float(expected), rel=1e-5)
        plain.optimizer.step()
        optimizer.step()
        check(model, optimizer, plain.model)
        plain.optimizer.zero_grad()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@every_way
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.each("clip")
def test_clipping_is_torchs_of_one_process(comm, way: str, clip: str) -> None:
    follow_clipped(comm, way, CLIPS[clip])


@pytest.mark.ranks(4, exactly=True)
def test_clipping_where_groups_of_ranks_hold_the_same_shards(comm) -> None:
    follow_clipped(comm, "stage 2", CLIPS["norm"], shard_group=comm.split(comm.rank // 2))


PRECISIONS = {
    "fp32": None,
    "bf16": mpidl.Precision(torch.bfloat16),
    "bf16 reduced in fp32": mpidl.Precision(torch.bfloat16, torch.float32),
}


@every_part
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_clipping_by_torch_is_the_optimizers_own(comm, way: str, precision: mpidl.Precision | None) -> None:
    (first, by_torch), (second, by_itself) = (engine(comm, Several, way, precision=precision) for _ in range(2))
    for step in range(3):
        for model in (first, second):
            plainly(model, comm.rank, step).float().backward()
        largest = get_total_norm([p.grad for p in first.parameters()], math.inf)
        assert by_itself.clip_grad_norm_(1e9, math.inf) == pytest.approx(float(largest), rel=1e-6)
        norm = clip_grad_norm_(first.parameters(), MAX)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(by_itself.clip_grad_norm_(MAX), rel=1e-6)
        assert by_itself.clip_grad_norm_(1e9) == pytest.approx(MAX, rel=1e-3)
        for optimizer in (by_torch, by_itself):
            optimizer.step()
            optimizer.zero_grad()
    expected, found = by_itself.model_state_dict(), by_torch.model_state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-7)


@every_part
def test_clipping_before_a_step_on_whole_parameters(comm, way: str) -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.1, weight_decay=0.0, momentum=0.5)

    settings = WAYS[way]
    model, plain = made(Matrices), made(Matrices)
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.Muon, process_group=comm, lr=0.1, weight_decay=0.0, momentum=0.5, **settings
    )
    plain_optimizer = muon(plain.parameters())
    for step in range(2):
        for rank in range(comm.size):
            (plainly(plain, rank, step) / comm.size).backward()
        plainly(model, comm.rank, step).backward()
        for p in (model, plain):
            clip_grad_norm_(p.parameters(), MAX if step else 1e9)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    check(model, optimizer, plain)
