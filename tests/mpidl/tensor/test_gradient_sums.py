"""Gradients of which each rank of tp has a summand are summed once, by the pass that makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh, UsageError
from mpidl.tensor import traffic
from tests.mpidl.tensor.reference import all_in_float64, build, largest_difference, loss_of, part_of, tokens, train

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

GPT2, LLAMA = "gpt2", "llama, two key heads"


def between(model: nn.Module) -> None:
    """An evaluation between a forward and its backward pass."""
    loss = loss_of(model, tokens(0))
    model.eval()
    with torch.no_grad():
        loss_of(model, tokens(1))
    model.train()
    loss.backward()


def two_lengths(model: nn.Module) -> None:
    """A forward pass of other sequences before the backward pass."""
    loss = loss_of(model, tokens(0))
    (loss + loss_of(model, tokens(1)[:, :7])).backward()


def in_both_modes(model: nn.Module) -> None:
    """One backward pass through a forward pass on pieces of the sequences, and through one on whole ones."""
    loss = loss_of(model, tokens(0))
    model.eval()
    whole = loss_of(model, tokens(1))
    model.train()
    (loss + whole).backward()


def accumulated(model: nn.Module) -> None:
    for step in range(3):
        loss_of(model, tokens(step)).backward()


def by_autograd_grad(model: nn.Module) -> None:
    trained = list(model.parameters())
    for p, gradient in zip(trained, torch.autograd.grad(loss_of(model, tokens(0)), trained), strict=True):
        p.grad = gradient


def with_a_frozen_weight(model: nn.Module) -> None:
    frozen = [p for name, p in model.named_parameters() if "ln_1.weight" in name or "k_proj" in name]
    for p in frozen:
        p.requires_grad_(False)
    loss_of(model, tokens(0)).backward()
    for p in frozen:
        p.requires_grad_(True)
        p.grad = torch.zeros_like(p)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    each.__name__: each
    for each in (between, two_lengths, in_both_modes, accumulated, by_autograd_grad, with_a_frozen_weight)
}


def check_gradients(model: nn.Module, whole: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.each("way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_gradients_are_those_of_one_process(comm: Communicator, name: str, way: str) -> None:
    whole, model = build(name), build(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        WAYS[way](whole)
        WAYS[way](model)
        check_gradients(model, whole)


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_a_copy_is_cut_as_well(comm: Communicator, name: str) -> None:
    whole, model = build(name), build(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        made = copy.deepcopy(model)
        assert train(made, 3) == pytest.approx(train(whole, 3), abs=1e-10)
        assert largest_difference(made, whole) < 1e-10
        assert largest_difference(model, build(name)) == 0
        if comm.size > 1:
            with pytest.raises(UsageError, match="unparallelize: the model is a copy"):
                mpidl.unparallelize(made)
        mpidl.unparallelize(model)
        assert largest_difference(made, whole) < 1e-10


@pytest.mark.ranks(2, 3)
def test_one_sum_a_norm_and_none_a_bias(comm: Communicator) -> None:
    """Under sequence parallelism; without it there is nothing to sum."""
    sums = []
    for sequence_parallel in (False, True):
        model = build(GPT2)
        with Mesh(tp=comm.size, comm=comm) as mesh:
            mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            loss = loss_of(model, tokens(0))
            before = traffic(model).all_reduces
            loss.backward()
            sums.append(traffic(model).all_reduces - before)
    blocks, norms = 2, 5
    head = 1
    assert sums == [2 * blocks + head, norms + head]


class InPlace(nn.Module):
    """Writes into the outputs of its layers, as it may with plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu_(self.inner(x))).add_(x)


def test_outputs_may_be_written_into(comm: Communicator) -> None:
    plan = {"0": mpidl.tensor.FeedForwardParallel(inputs=("inner",), output="outer", input="x")}
    torch.manual_seed(0)
    whole = nn.Sequential(InPlace()).double()
    model = copy.deepcopy(whole)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, plan)
        for each in (whole, model):
            each(torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)).square().sum().backward()
        check_gradients(model, whole)
