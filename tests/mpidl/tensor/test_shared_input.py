"""Layers that share an input of whole sequences: one sum of its gradient over tp, beside the last weight's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import Communicator
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.functions import CutProduct
from mpidl.tensor.shared_input import SharedInput

pytestmark = pytest.mark.mpi

WIDTH, FEATURES = 6, (4, 3, 5)


def weights(rank: int) -> list[torch.Tensor]:
    """A rank's part of each layer, [out, in]."""
    random = torch.Generator().manual_seed(rank)
    return [torch.rand(n, WIDTH, dtype=torch.float64, generator=random).requires_grad_() for n in FEATURES]


def inputs() -> torch.Tensor:
    random = torch.Generator().manual_seed(99)
    return torch.rand(2, 5, WIDTH, dtype=torch.float64, generator=random).requires_grad_()


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([y.square().sum() for y in outputs]).sum()


def shared_loss(comm: Communicator, x: torch.Tensor, own: list[torch.Tensor]) -> tuple[torch.Tensor, TensorGroup]:
    group = TensorGroup(comm)
    shared = SharedInput(x * 1, group)
    return loss_of([shared.product(shared.x, w, None, out_in=True) for w in own]), group


def expected(comm: Communicator, used: slice = slice(None), besides: bool = False) -> torch.Tensor:
    """The gradient of x: the sum over the ranks of the plain one."""
    total = torch.zeros_like(inputs())
    for rank in range(comm.size):
        x = inputs()
        outputs = [x @ w.t() for w in weights(rank)[used]] + ([x * (rank + 1)] if besides else [])
        (gradient,) = torch.autograd.grad(loss_of(outputs), x)
        total += gradient
    return total


def test_the_sum_begins_before_the_last_weight_s_gradient(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            done.append(name)
            return plain(*arguments)

        monkeypatch.setattr(owner, name, call)

    noted(TensorGroup, "begin_all_reduce")
    noted(CutProduct, "of_weight")
    noted(TensorGroup, "finish_all_reduce")
    x, own = inputs(), weights(comm.rank)
    loss, group = shared_loss(comm, x, own)
    loss.backward()
    assert done == ["of_weight", "of_weight", "begin_all_reduce", "of_weight", "finish_all_reduce"]
    assert (group.traffic.all_reduces, group.traffic.reduced) == (1, x.numel())
    torch.testing.assert_close(x.grad, expected(comm), rtol=1e-12, atol=1e-12)
    for w, plain in zip(own, weights(comm.rank), strict=True):
        (gradient,) = torch.autograd.grad((inputs() @ plain.t()).square().sum(), plain)
        torch.testing.assert_close(w.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_layer_gives_to_the_sum(comm: Communicator, frozen: int) -> None:
    x, own = inputs(), weights(comm.rank)
    own[frozen].requires_grad_(False)
    loss, group = shared_loss(comm, x, own)
    loss.backward()
    torch.testing.assert_close(x.grad, expected(comm), rtol=1e-12, atol=1e-12)
    assert own[frozen].grad is None
    assert group.traffic.all_reduces == 1


def test_an_input_without_a_gradient_is_not_summed(comm: Communicator) -> None:
    x, own = inputs().detach(), weights(comm.rank)
    loss, group = shared_loss(comm, x, own)
    loss.backward()
    assert group.traffic.all_reduces == 0
    assert all(w.grad is not None for w in own)


def test_what_uses_the_input_besides_is_summed_too(comm: Communicator) -> None:
    x, own, group = inputs(), weights(comm.rank), TensorGroup(comm)
    shared = SharedInput(x * 1, group)
    outputs = [shared.product(shared.x, w, None, out_in=True) for w in own]
    loss_of([*outputs, shared.x * (comm.rank + 1)]).backward()
    torch.testing.assert_close(x.grad, expected(comm, besides=True), rtol=1e-12, atol=1e-12)
    assert group.traffic.all_reduces == 2


def test_a_layer_that_a_pass_leaves_out_is_not_waited_for(comm: Communicator) -> None:
    x, own, group = inputs(), weights(comm.rank), TensorGroup(comm)
    shared = SharedInput(x * 1, group)
    outputs = [shared.product(shared.x, w, None, out_in=True) for w in own]
    loss_of(outputs[:2]).backward()
    torch.testing.assert_close(x.grad, expected(comm, slice(2)), rtol=1e-12, atol=1e-12)
    assert (own[2].grad, group.traffic.all_reduces) == (None, 1)


def test_passes_through_one_graph_are_apart(comm: Communicator) -> None:
    """Also one to a single weight, which comes to one of the layers alone."""
    x, own = inputs(), weights(comm.rank)
    loss, _ = shared_loss(comm, x, own)
    for each in own:
        torch.autograd.grad(loss, each, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, expected(comm), rtol=1e-12, atol=1e-12)
    x.grad = None
    loss.backward()
    torch.testing.assert_close(x.grad, expected(comm), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_in_autocast_products_are_narrow_and_the_gradient_is_of_the_input_s_dtype(
    comm: Communicator, bias: bool
) -> None:
    x, group = inputs().detach().float().requires_grad_(), TensorGroup(comm)
    own = [w.detach().bfloat16().requires_grad_() for w in weights(comm.rank)]
    biases = [torch.ones(n, dtype=torch.bfloat16, requires_grad=True) if bias else None for n in FEATURES]
    shared = SharedInput(x * 1, group)
    narrow = shared.x.bfloat16()
    loss_of([shared.product(narrow, w, b, out_in=True) for w, b in zip(own, biases, strict=True)]).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    if not bias:
        torch.testing.assert_close(x.grad.double(), expected(comm), rtol=0.05, atol=0.5)
    assert all(b is None or b.grad is not None for b in biases)
