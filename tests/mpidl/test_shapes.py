"""Layers of any shape have the same bits in every engine, wherever in flat memory their weights and gradients lie.

Products of matrices are rounded by the alignment of their operands, above all of vectors: inputs of one row. The judge
is DDP, whose parameters lie in memory of their own; on one rank also the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

SETTINGS: dict[str, dict[str, Any]] = {
    "ddp, a bucket for each": {"bucket_cap_mb": 1e-6},
    "ddp, small buckets": {"bucket_cap_mb": 0.001},
    "ddp, copies": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": False},
    **WAYS,
    "stage 1, small buckets": {**WAYS["stage 1"], "bucket_cap_mb": 0.001},
    "stage 2, small buckets": {**WAYS["stage 2"], "bucket_cap_mb": 0.003},
    "stage 3 gathered, one unit": {**WAYS["stage 3 gathered"], "units": lambda module: False},
}
every_sharded = pytest.mark.parametrize("way", [name for name, way in SETTINGS.items() if "stage" in way])
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Branches(nn.Module):
    """A small network for each pair of widths, with inputs of one row and of some."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(m, n), nn.Tanh(), nn.Linear(n, m)) for m, n in pairs])

    def forward(self, seed: int) -> torch.Tensor:
        """The losses of each."""
        dice = torch.Generator().manual_seed(seed)
        inputs = [(b, torch.randn(rows, b[0].in_features, generator=dice)) for b in self.branches for rows in (1, 6)]
        return torch.stack([branch(x).square().mean() for branch, x in inputs])


def trained(comm, pairs: Iterable[tuple[int, int]], way: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """Losses of each rank, and weights on rank 0, after some steps. way: None for the plain model."""
    torch.manual_seed(5)
    model = call = Branches(pairs)
    if way is not None and "stage" in way:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=comm, **way, **ADAMW, **settings)
    else:
        if way is not None:
            call = mpidl.DistributedDataParallel(model, process_group=comm, **way)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, **settings)
    found: dict[str, Any] = {}
    for step in range(2):
        losses = call(10 * step + comm.rank)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"losses of step {step}"] = losses.detach()
    whole = optimizer.model_state_dict() if isinstance(optimizer, mpidl.ZeroOptimizer) else model.state_dict()
    return {**found, **(whole if comm.rank == 0 else {})}


def differences(comm, pairs: Sequence[tuple[int, int]], **settings: Any) -> dict[str, list[str]]:
    expected = trained(comm, pairs, {}, **settings)
    differ = {}
    for name, way in {**SETTINGS, **({"plain": None} if comm.size == 1 else {})}.items():
        found = trained(comm, pairs, way, **settings)
        differ[name] = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    return differ


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_layers_of_any_shape_have_the_same_bits_in_every_engine(comm, kernel: dict[str, bool]) -> None:
    widths = (1, 2, 5, 13, 16, 33)
    differ = differences(comm, [(m, n) for m in widths for n in widths if m <= n], **kernel)
    assert differ == {name: [] for name in differ}


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.parametrize("first", range(1, 65, 8))
def test_so_have_all_shapes(comm, first: int) -> None:
    pairs = [(m, n) for m in range(first, first + 8) for n in range(m, 65)]
    differ = differences(comm, pairs)
    assert differ == {name: [] for name in differ}


def test_parameters_and_gradients_begin_with_a_cache_line(comm) -> None:
    pairs = [(1, 1), (3, 5), (16, 2)]
    for name, way in SETTINGS.items():
        model = Branches(pairs)
        places = []
        if "stage" in way:
            optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, lr=0.1, **way)
            with optimizer.gathered(writable=False):
                places += [p.data_ptr() for p in model.parameters()]
        else:
            wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **way)
            for step in range(2):  # with the first and with the final buckets
                wrapped(step).sum().backward()
                places += [p.grad.data_ptr() for p in model.parameters()]
        assert {place % 64 for place in places} == {0}, name


@every_sharded
def test_padding_adds_nothing_even_after_gradients_that_were_no_numbers(comm, way: str) -> None:
    torch.manual_seed(0)
    model, alone = (Branches([(1, 1), (3, 5)]) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, lr=0.1, **SETTINGS[way])
    (model(0).sum() * math.nan).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    for _ in range(2):  # the second sum lies elsewhere in stage 1
        model(1).sum().backward()
        alone(1).sum().backward()
    assert not optimizer.unscale_(1.0)
    expected = mpidl.clip_grad_norm_(alone, 1e9)
    assert optimizer.clip_grad_norm_(1e9) == pytest.approx(expected, rel=1e-5)
    assert optimizer.find_nonfinite() is None
