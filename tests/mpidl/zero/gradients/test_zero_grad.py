"""`zero_grad(set_to_none=False)` under ZeRO: zeros in place of gradients, None stays None, as torch's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mpidl
from tests.mpidl.zero.reference import SETTINGS, Several, check, data, engine, made, plainly
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi

ADAMW = {"lr": 0.1, "weight_decay": 0.1}
ORDERS = {
    "never reached": [(0,), (0,), (0,), (0,)],
    "reached first": [(0, 2), (0,), (0,), (0,)],
    "reached later": [(0,), (0,), (0, 2), (0,)],
    "reached in turn": [(0,), (0, 1), (0, 2), (0,)],
}
by_whom = pytest.mark.parametrize("by_model", [False, True], ids=["optimizer", "model"])


def grads(model: nn.Module) -> list[bool]:
    return [p.grad is not None for p in model.parameters()]


def loss(m: Any, rank: int, step: int, order: tuple[int, ...]) -> torch.Tensor:
    return m(data(rank, step), order).square().sum()


def own_order(order: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    """All of it on the last rank alone, and what all ranks reach on the others."""
    return order if rank == ranks - 1 else (0,)


def follow(comm, way: str, orders: list[tuple[int, ...]], by_model: bool, passes: int = 1, **settings: Any) -> None:
    """Trains with AdamW, whose steps count and decay, next to a plain model with the mean of all ranks' gradients."""
    model = made(Several, comm.rank)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=comm, **SETTINGS[way], **ADAMW, **settings)
    plain = made(Several)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step, order in enumerate(orders):
        for number in range(passes):
            now = 10 * step + number
            for rank in range(comm.size):
                (loss(plain, rank, now, own_order(order, rank, comm.size)) / comm.size).backward()
            with optimizer.no_sync() if number < passes - 1 else nullcontext():
                loss(model, comm.rank, now, own_order(order, comm.rank, comm.size)).backward()
        assert grads(model) == grads(plain)
        for each in (optimizer, plain_optimizer):
            each.step()
        check(model, optimizer, plain)
        for each in (model, plain) if by_model else (optimizer, plain_optimizer):
            each.zero_grad(set_to_none=False)
        assert grads(model) == grads(plain)
        if not settings:
            assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    for each in (optimizer, plain_optimizer):
        each.zero_grad()
    assert not any(grads(model))
    for m, rank in ((plain, rank) for rank in range(comm.size)):
        (loss(m, rank, 99, (1,)) / comm.size).backward()
    loss(model, comm.rank, 99, (1,)).backward()
    for each in (optimizer, plain_optimizer):
        each.step()
    check(model, optimizer, plain)


@every_way
@by_whom
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.each("orders")
def test_what_has_no_gradient_keeps_none(comm, way: str, orders: str, by_model: bool) -> None:
    follow(comm, way, ORDERS[orders], by_model)


@every_part
@by_whom
def test_what_has_no_gradient_keeps_none_with_steps_in_backward(comm, way: str, by_model: bool) -> None:
    follow(comm, way, ORDERS["reached later"], by_model, step_in_backward=True)


@every_part
def test_what_has_no_gradient_keeps_none_after_passes_under_no_sync(comm, way: str) -> None:
    follow(comm, way, ORDERS["reached later"], by_model=False, passes=2)


@every_part
def test_zeros_of_passes_that_were_not_reduced(comm, way: str) -> None:
    """They are the same on no two ranks before the next pass that is reduced; a step takes them, clipping does not."""
    model, optimizer = engine(comm, Several, way)
    plain, reached = made(Several), own_order((0, 2), comm.rank, comm.size)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    with optimizer.no_sync():
        loss(model, comm.rank, 0, reached).backward()
    loss(plain, 0, 0, (0, 2)).backward()
    for each in (optimizer, plain_optimizer):
        each.zero_grad(set_to_none=False)
    assert clip_grad_norm_(model.parameters(), 1.0) == 0
    for each in (optimizer, plain_optimizer):
        each.step()
    check(model, optimizer, plain)
    for rank in range(comm.size):
        (loss(plain, rank, 1, (0,)) / comm.size).backward()
    loss(model, comm.rank, 1, (0,)).backward()
    assert grads(model) == grads(plain)
    assert clip_grad_norm_(model.parameters(), 0.05) == pytest.approx(float(clip_grad_norm_(plain.parameters(), 0.05)))
    for each in (optimizer, plain_optimizer):
        each.step()
    check(model, optimizer, plain)


@every_part
def test_none_that_the_program_has_set_stays_none(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    for p in model.parameters():
        p.grad = None
    optimizer.zero_grad(set_to_none=False)
    assert not any(grads(model))
    optimizer.step()
    check(model, optimizer, made(Several))


@every_part
def test_the_models_own_zero_grad_is_called_once_and_sees_no_cut_gradients(comm, way: str) -> None:
    class Counts(Several):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    model, _ = engine(comm, Counts, way)
    model.register_parameter("frozen", nn.Parameter(torch.ones(2)))
    model.frozen.grad = torch.ones(2)
    plainly(model, comm.rank, 0).backward()
    model.zero_grad(set_to_none=False)
    assert model.calls == 1
    assert torch.equal(model.frozen.grad, torch.zeros(2))
    assert not any(p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert not any(grads(model))
