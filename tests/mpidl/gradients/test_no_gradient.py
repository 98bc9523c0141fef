"""Functions whose backward gives None: a parameter keeps its `.grad` where no rank's pass gives it a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.reference import check, data, follow, made
from tests.mpidl.zero import reference as zero_reference
from tests.mpidl.zero.ways import every_way

pytestmark = pytest.mark.mpi

SETTINGS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)
views = pytest.mark.parametrize("as_views", [True, False], ids=["views", "own"])


class Add(torch.autograd.Function):
    """x + p; its backward gives p no gradient unless told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        return x + p

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.sum(0) if ctx.gives else None, None


class Adds(nn.Module):
    """A layer, and a bias whose gradient some ranks give."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.ranks = ranks
        self.layer, self.bias = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return Add.apply(torch.tanh(self.layer(x)), self.bias, rank in self.ranks)


def loss(m: Any, rank: int) -> torch.Tensor:
    return m(data(rank), rank).square().sum()


@every_setting
@views
def test_none_on_every_rank_stays_none(comm, settings: dict, as_views: bool) -> None:
    model = follow(comm, Adds, loss, gradient_as_bucket_view=as_views, **settings)
    before = model.bias.detach().clone()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    assert torch.equal(model.bias, before)


@every_setting
@views
def test_none_on_some_ranks_counts_as_zero(comm, settings: dict, as_views: bool) -> None:
    follow(comm, lambda: Adds((0,)), loss, gradient_as_bucket_view=as_views, **settings)


@every_setting
def test_none_in_a_pass_after_others(comm, settings: dict) -> None:
    """The gradient that was there stays; zeros do not come in its place."""
    model = made(lambda: Adds(tuple(range(comm.size))))
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)
    loss(wrapped, comm.rank).backward()
    before = model.bias.grad.clone()
    model.ranks = ()
    loss(wrapped, comm.rank).backward()
    torch.testing.assert_close(model.bias.grad, before)
    model.zero_grad()
    loss(wrapped, comm.rank).backward()
    assert model.bias.grad is None


@every_setting
def test_none_of_a_sparse_embedding(comm, settings: dict) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
            return Add.apply(self.layer(x), self.table.weight, False)

    follow(comm, Table, lambda m, rank: m(data(rank).repeat(2, 1), rank).square().sum(), **settings)


@every_way
def test_none_on_every_rank_in_the_stages(comm, way: str) -> None:
    zero_reference.follow(comm, way, Adds, lambda m, rank, step: m(data(rank + step), rank).square().sum())


def test_none_under_no_sync(comm) -> None:
    model = made(Adds)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    with wrapped.no_sync():
        loss(wrapped, comm.rank).backward()
    loss(wrapped, comm.rank).backward()
    assert model.bias.grad is None
    model.zero_grad()
    check(model, {name: None for name, _ in model.named_parameters()})
