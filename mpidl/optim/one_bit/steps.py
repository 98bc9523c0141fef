"""Arithmetic on the parameters of a bucket, many tensors a call; weights of 16 bits are updated in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .flat import FlatBucket


def advance_moments(bucket: FlatBucket, gradients: Sequence[torch.Tensor | None], betas: tuple[float, float]) -> None:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g, of the parameters that have a gradient."""
    beta1, beta2 = betas
    found = [n for n, g in enumerate(gradients) if g is not None]
    if not found:
        return
    given: list[Any] = [gradients[n] for n in found]
    first, second = ([bucket.views[key][n] for n in found] for key in ("exp_avg", "exp_avg_sq"))
    torch._foreach_lerp_(first, given, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, given, given, 1 - beta2)


def advance_first_moment(bucket: FlatBucket, gradients: Sequence[torch.Tensor | None], beta1: float) -> torch.Tensor:
    """m = beta1 m + (1 - beta1) g, where no gradient counts as zeros. Returns the array."""
    array = bucket.arrays["exp_avg"]
    array.mul_(beta1)
    found = [n for n, g in enumerate(gradients) if g is not None]
    if found:
        views = [bucket.views["exp_avg"][n] for n in found]
        given: list[Any] = [gradients[n] for n in found]
        torch._foreach_add_(views, given, alpha=1 - beta1)
    return array


def denominators(array: torch.Tensor, correction: float, eps: float) -> torch.Tensor:
    """sqrt(v / correction) + eps, of an array of a bucket."""
    return torch.div(array, correction).sqrt_().add_(eps)


def decay(parameters: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """w = w - lr weight_decay w."""
    for p, group in zip(parameters, groups, strict=True):
        if group["weight_decay"]:
            p.mul_(1 - float(group["lr"]) * group["weight_decay"])


def descend(p: torch.Tensor, numerator: torch.Tensor, denominator: torch.Tensor, rate: float) -> None:
    """w = w - rate * numerator / denominator."""
    if p.dtype == torch.float32:
        p.addcdiv_(numerator, denominator, value=-rate)
    else:
        p.copy_(p.float().addcdiv_(numerator, denominator, value=-rate))
