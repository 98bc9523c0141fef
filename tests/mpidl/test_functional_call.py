"""`torch.func.functional_call`: torch differentiates the tensors that are given, and the model's own stay alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.reference import Several, check, data, made, mean_gradients
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import every_way

pytestmark = pytest.mark.mpi

call = torch.func.functional_call
every_setting = pytest.mark.parametrize(
    "settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)


def given(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}


def check_given(tensors: dict[str, torch.Tensor], make: Any, run: Any) -> None:
    """Their gradients are this rank's own, as of a plain model."""
    plain = make()
    expected = {name.removeprefix("module."): t.detach().clone().requires_grad_() for name, t in tensors.items()}
    run(plain, expected).backward()
    for name, tensor in tensors.items():
        assert tensor.grad is not None, name
        torch.testing.assert_close(tensor.grad, expected[name.removeprefix("module.")].grad, msg=name)


@every_setting
@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_given_tensors_get_their_own_gradients(comm, settings: dict, before: bool) -> None:
    model = made(Several)
    wrapped: Any = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)

    def loss(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (0, 1, 2)).square().sum()

    def run(m: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return call(m, tensors, (data(comm.rank), (0, 1, 2))).square().sum()

    expected = mean_gradients(Several, loss, comm.size)
    if before:
        loss(wrapped, comm.rank).backward()
    tensors = given(wrapped)
    run(wrapped, tensors).backward()
    check_given(tensors, Several, run)
    check(model, expected if before else dict.fromkeys(expected))
    model.zero_grad()
    for _ in range(2):
        loss(wrapped, comm.rank).backward()
        check(model, expected)
        model.zero_grad()


@every_way
def test_given_tensors_in_the_stages(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way)
    plain = zero.Plain(zero.Several, comm.size)

    def run(m: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return call(m, tensors, (data(comm.rank),)).square().sum()

    for step in range(2):
        plain.step(lambda m, rank, step=step: zero.plainly(m, rank, step).backward())  # type: ignore[misc]
        tensors = given(plain.model)
        reductions = optimizer.traffic().reductions
        run(model, tensors).backward()
        assert optimizer.traffic().reductions == reductions
        check_given(tensors, zero.Several, run)
        zero.plainly(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        zero.check(model, optimizer, plain.model)


def test_some_given_tensors(comm) -> None:
    """The others are the model's own, whose gradients are averaged."""

    def loss(m: Any, rank: int) -> torch.Tensor:
        of_model = getattr(m, "module", m)
        taken = {name: p for name, p in given(of_model).items() if "layers.1" in name}
        prefix = "" if of_model is m else "module."
        taken = {prefix + name: tensor for name, tensor in taken.items()}
        return call(m, taken, (data(rank), (0, 1, 2))).square().sum()

    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        loss(wrapped, comm.rank).backward()
        check(model, mean_gradients(Several, loss, comm.size))
