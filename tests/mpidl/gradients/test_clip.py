"""Clipping of replicated gradients does what torch.nn.utils does."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import mpidl


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).to(dtype)
    for p in [*made[0].parameters(), *made[1].parameters()]:  # the last layer has no gradient
        p.grad = torch.randn(p.shape, dtype=dtype)
    return made


def check_same(a: nn.Module, b: nn.Module, rtol: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("norm_type", [0.5, 1, 2, 3.0, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_norm_and_gradients_are_torchs(max_norm: float, norm_type: float, dtype: torch.dtype) -> None:
    expected, found = model(dtype), model(dtype)
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), max_norm, norm_type)
    rtol = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    assert mpidl.clip_grad_norm_(found.parameters(), max_norm, norm_type) == pytest.approx(float(norm), rel=rtol)
    check_same(found, expected, rtol)


@pytest.mark.parametrize("clip", [lambda p: mpidl.clip_grad_norm_(p, 0.1), lambda p: mpidl.clip_grad_value_(p, 0.1)])
def test_one_tensor_a_list_and_a_generator_are_taken(clip) -> None:
    single, listed, generated = model(), model(), model()
    weight = single[0].weight
    rest = copy.deepcopy(single[1].weight.grad)
    clip(weight)
    assert weight.grad.abs().max() <= 0.1
    assert torch.equal(single[1].weight.grad, rest)
    clip(list(listed.parameters()))
    clip(p for p in generated.parameters())
    check_same(listed, generated, 0)
    clip([])
    clip(single[2].weight)  # has no gradient


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_where_asked(bad: float, norm_type: float) -> None:
    expected, found = model(), model()
    for made in (expected, found):
        made[0].bias.grad[1] = bad
    before = found[1].weight.grad.clone()
    with pytest.raises(mpidl.TrainingError, match=f"norm of the gradients is {bad}"):
        mpidl.clip_grad_norm_(found.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(found[1].weight.grad, before)
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0, norm_type)
    mpidl.clip_grad_norm_(found.parameters(), 1.0, norm_type)
    torch.testing.assert_close(found[1].weight.grad, expected[1].weight.grad, equal_nan=True)


def test_values_are_torchs() -> None:
    expected, found = model(), model()
    torch.nn.utils.clip_grad_value_(expected.parameters(), 0.3)
    mpidl.clip_grad_value_(found.parameters(), 0.3)
    check_same(found, expected, 0)


def test_gradients_that_require_gradients_are_clipped() -> None:
    x = torch.ones(2, requires_grad=True)
    x.pow(3).sum().backward(create_graph=True)
    assert mpidl.clip_grad_norm_(x, 1.0) == pytest.approx(math.sqrt(18))
    mpidl.clip_grad_value_(x, 0.5)
    assert x.grad.tolist() == [0.5, 0.5]
    x.grad = None


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan, "two", None])
def test_what_is_no_norm_is_refused(norm_type: Any) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="norm_type: got"):
        mpidl.clip_grad_norm_(model().parameters(), 1.0, norm_type)


@pytest.mark.parametrize("bound", [-1.0, math.nan, "wide", None, [1.0]], ids=str)
def test_what_is_no_bound_is_refused(bound: Any) -> None:
    for clip, name in ((mpidl.clip_grad_value_, "clip_value"), (mpidl.clip_grad_norm_, "max_norm")):
        with pytest.raises(mpidl.ConfigurationError, match=re.escape(f"{name}: got {bound!r}; needs a number of 0")):
            clip(model().parameters(), bound)
