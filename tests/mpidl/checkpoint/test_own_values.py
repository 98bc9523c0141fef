"""Values that differ between the ranks for a while: states of the optimizer, and gradients of micro-steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.checkpoint import load, save
from mpidl.optim import PeriodicAverager, PostLocalSGDOptimizer
from mpidl.optim.post_local import PostLocalSGDState, post_local_sgd_hook

pytestmark = pytest.mark.mpi


class Pair(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use_b: bool = True) -> torch.Tensor:
        return self.b(self.a(x)) if use_b else self.a(x)


def own_batch(comm: Communicator, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + comm.rank)) * (1 + comm.rank)


def post_local(comm: Communicator, optimizer: Any) -> tuple[Any, Any, Any]:
    """Training whose ranks go on by themselves from the first step on."""
    model = Pair()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped.register_comm_hook(PostLocalSGDState(comm, 0), post_local_sgd_hook)
    averager = PeriodicAverager(model.parameters(), comm, period=100)
    return model, wrapped, PostLocalSGDOptimizer(optimizer(model.parameters()), averager)


def assert_equal_states(found: Any, expected: Any, models: tuple[nn.Module, nn.Module]) -> None:
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name
        assert found.state[p].keys() == expected.state[q].keys()
        for key, value in expected.state[q].items():
            assert torch.equal(found.state[p][key], value), f"{key} of {name}"


def test_states_of_another_shape_than_their_parameter_are_the_rank_s_own(comm, shared: Path) -> None:
    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.1)

    model, wrapped, optimizer = post_local(comm, adafactor)

    def train(wrapped: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            wrapped(own_batch(comm, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(wrapped, optimizer, 0, 3)
    save(shared, wrapped, optimizer, step=3)
    again, wrapped_again, optimizer_again = post_local(comm, adafactor)
    load(shared, wrapped_again, optimizer_again)
    assert_equal_states(optimizer_again, optimizer, (again, model))
    for pair in ((wrapped, optimizer), (wrapped_again, optimizer_again)):
        train(*pair, 3, 5)
    assert_equal_states(optimizer_again, optimizer, (again, model))


def test_step_counts_of_ignored_parameters_are_the_rank_s_own(comm, shared: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = Pair()
        ignored = ["b.weight", "b.bias"]
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, parameters_to_ignore=ignored)
        return model, wrapped, torch.optim.Adam(model.parameters(), lr=0.01)

    model, wrapped, optimizer = made()
    for step in range(6):
        wrapped(own_batch(comm, step), use_b=comm.rank == 1 or step % 3 == 0).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.b.bias]["step"] == (6 if comm.rank == 1 else 2)
    save(shared, wrapped, optimizer, step=6)
    again, wrapped_again, optimizer_again = made()
    load(shared, wrapped_again, optimizer_again)
    assert_equal_states(optimizer_again, optimizer, (again, model))


@pytest.mark.parametrize("unreduced", [False, True])
@pytest.mark.parametrize("way", ["post-local", "ignored"])
def test_gradients_of_micro_steps_come_back_to_their_rank(comm, shared: Path, way: str, unreduced: bool) -> None:
    def made() -> tuple[Any, Any, Any]:
        if way == "post-local":
            return post_local(comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        model = Pair()
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, parameters_to_ignore=["b.weight", "b.bias"])
        return model, wrapped, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def first_pass(wrapped: Any) -> None:
        if unreduced:
            with wrapped.no_sync():
                wrapped(own_batch(comm, 1)).square().sum().backward()
        else:
            wrapped(own_batch(comm, 1)).square().sum().backward()

    def second_pass(model: nn.Module, wrapped: Any, optimizer: Any) -> list[torch.Tensor]:
        wrapped(own_batch(comm, 2)).square().sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, wrapped, optimizer = made()
    wrapped(own_batch(comm, 0)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    first_pass(wrapped)
    save(shared, wrapped, optimizer, step=1, micro_step=1)
    gradients = [p.grad.clone() for p in model.parameters()]
    expected = second_pass(model, wrapped, optimizer)
    again, wrapped_again, optimizer_again = made()
    load(shared, wrapped_again, optimizer_again)
    assert all(torch.equal(p.grad, g) for p, g in zip(again.parameters(), gradients, strict=True))
    assert all(map(torch.equal, second_pass(again, wrapped_again, optimizer_again), expected))


@pytest.mark.ranks(2, 3)
def test_a_gradient_that_some_ranks_have_counts_as_zeros_on_the_others(comm, shared: Path) -> None:
    model = Pair()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.no_sync():
        wrapped(own_batch(comm, 0), use_b=comm.rank == 0).square().sum().backward()
    own = model.b.weight.grad
    mean = torch.zeros(4, 4) if own is None else own.clone()
    comm.all_reduce(mean, "avg")
    save(shared, wrapped, optimizer, step=1, micro_step=1)
    alone = comm.split(comm.rank)
    again = Pair()
    load(shared, again, torch.optim.SGD(again.parameters(), lr=0.1), process_group=alone)
    torch.testing.assert_close(again.b.weight.grad, mean)
    alone.close()
    load(shared, wrapped, optimizer)
    assert (model.b.weight.grad is None) == (comm.rank > 0)
