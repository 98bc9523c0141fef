"""`ZeroOptimizer.step(closure)`: what the closure does is judged as what the program does before `step()`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import Plain, Several, check, engine, made, plainly
from tests.mpidl.zero.ways import WAYS, every_way

pytestmark = pytest.mark.mpi


@every_way
def test_a_closure_computes_the_gradients(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = plainly(model, comm.rank, 0)
        loss.backward()
        return loss

    plainly(model, comm.rank, 5).backward()
    model.head.bias.grad = torch.ones(2)  # which the closure forgets
    plain.step(lambda m, rank: plainly(m, rank, 0).backward())
    torch.testing.assert_close(optimizer.step(closure), plainly(made(Several), comm.rank, 0))
    check(model, optimizer, plain.model)


def sets_a_gradient(model: nn.Module) -> None:
    model.head.bias.grad = torch.ones_like(model.head.bias)


@torch.no_grad()
def writes_a_weight(model: nn.Module) -> None:
    model.head.bias.mul_(3)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "gradient": (sets_a_gradient, r"head\.bias: its \.grad was set"),
    "weight": (writes_a_weight, r"head\.bias: changed in place"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["before", "in the closure"])
@pytest.mark.parametrize(
    ("way", "change"),
    [*((way, "gradient") for way in WAYS), *((way, "weight") for way in ("stage 1", "stage 2"))],
)
def test_what_a_step_cannot_take_is_refused_on_every_rank(comm, way: str, change: str, inside: bool) -> None:
    model, optimizer = engine(comm, Several, way, precision=mpidl.Precision(torch.bfloat16))
    before = optimizer.model_state_dict()
    act, match = CHANGES[change]

    def closure() -> None:
        optimizer.zero_grad()
        plainly(model, comm.rank, 0).float().backward()
        if comm.rank == comm.size - 1:
            act(model)

    if not inside:
        closure()
    with pytest.raises(mpidl.TrainingError, match=match):
        optimizer.step(closure if inside else None)
    optimizer.zero_grad()
    optimizer.load_model_state_dict(before)
    optimizer.step(lambda: plainly(model, comm.rank, 0).float().backward())
