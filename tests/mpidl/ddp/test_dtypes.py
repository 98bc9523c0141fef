"""DistributedDataParallel on gradients of several dtypes and memory orders, and on sparse ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.reference import check, data, follow, made, mean_gradients

pytestmark = pytest.mark.mpi


class Mixed(nn.Module):
    """Three dtypes, one of them complex; an empty and a zero-dimensional parameter; a transposed layout."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 3)
        self.wide = nn.Linear(3, 3).double()
        self.narrow = nn.Linear(3, 3).bfloat16()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.filters = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.wide(self.single(x).double()).bfloat16()).float() * self.scale
        z = (y * self.phase).abs().sum() + (y @ self.turned.t()).sum() + self.empty.sum()
        return z + self.filters(y[:, :, None, None].expand(-1, -1, 2, 3)).square().sum()


def test_any_dtype_and_layout(comm) -> None:
    model = made(Mixed)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for _ in range(2):
        model.zero_grad()
        wrapped(data(comm.rank)).backward()
        expected = mean_gradients(Mixed, lambda m, rank: m(data(rank)), comm.size)
        for name, p in model.named_parameters():
            tolerance = 2e-2 if p.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(p.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)
            assert p.grad.stride() == p.stride() or p.numel() == 0


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_model_that_changes_its_dtype_after_so_many_passes(comm, passes: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 3))

    model = made(make)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for _ in range(passes):
        model.zero_grad()
        wrapped(data(comm.rank)).square().sum().backward()
    model.double()
    model.zero_grad()
    wrapped(data(comm.rank).double()).square().sum().backward()
    expected = mean_gradients(make, lambda m, rank: m.double()(data(rank).double()).square().sum(), comm.size)
    for name, p in model.named_parameters():
        assert p.grad.dtype is torch.float64
        torch.testing.assert_close(p.grad, expected[name])


def filters() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2))


def of_images(model: Any, rank: int) -> torch.Tensor:
    return model(data(rank, 3 * 25).view(2, 3, 5, 5)).square().sum()


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_model_that_changes_its_order_in_memory_after_so_many_passes(comm, passes: int, settings: dict) -> None:
    """Fused optimizers on CPUs take a gradient in the order of its parameter."""
    model = made(filters)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)
    for _ in range(passes):
        model.zero_grad()
        of_images(wrapped, comm.rank).backward()
    model.to(memory_format=torch.channels_last)
    expected = mean_gradients(filters, of_images, comm.size)
    for _ in range(2):
        model.zero_grad()
        of_images(wrapped, comm.rank).backward()
        check(model, expected)
        assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]


@pytest.mark.ranks(2, 3)
def test_an_order_in_memory_that_one_rank_has_changed_is_an_error_on_all(comm) -> None:
    model = made(filters)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    of_images(wrapped, comm.rank).backward()
    if comm.rank == 1:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(mpidl.ModelMismatch, match=r"0\.weight.*strides"):
        of_images(wrapped, comm.rank).backward()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)
        self.bag = nn.EmbeddingBag(7, 3, sparse=True, mode="sum")
        self.layer = nn.Linear(3, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(numbers) + self.bag(numbers[:, None] % 7)).square().sum()


def numbers(rank: int) -> torch.Tensor:
    """Ranks share some rows, and have other numbers of them."""
    return torch.tensor([1, 4, 4, *range(2 * rank)])


def test_gradients_of_sparse_embeddings(comm) -> None:
    model = follow(comm, Words, lambda m, rank: m(numbers(rank)))
    assert model.table.weight.grad.is_sparse
    rows = model.table.weight.grad.coalesce().indices()[0]
    assert set(rows.tolist()) == {n for rank in range(comm.size) for n in numbers(rank).tolist()}
    torch.optim.SparseAdam([model.table.weight]).step()
    theirs = model.table.weight.detach().clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, model.table.weight)


def test_sparse_gradients_that_one_rank_lacks_or_has_dense(comm) -> None:
    class SomeWords(Words):
        def forward(self, rank):
            if rank == 0:
                return self.layer.weight.sum() * 0 + self.layer(torch.ones(1, 3)).sum()
            dense = self.table.weight.sum() if rank == 1 else 0.0
            return super().forward(numbers(rank)) + dense

    follow(comm, SomeWords, lambda m, rank: m(rank), find_unused_parameters=True)
