"""Arithmetic on the parameters of a bucket; weights of 16 bits are updated in fp32.

Many tensors a call; or, between the phases of an exchange, those elements of a bucket that lie in the cache just then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .flat import FlatBucket


def advance_moments(bucket: FlatBucket, gradients: Sequence[torch.Tensor | None], betas: tuple[float, float]) -> None:
    """Advances m and v of parameters with a gradient: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g."""
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
    """Advances m of trained parameters, m = beta1 m + (1 - beta1) g; a missing g is 0. Returns the array of m."""
    views, trained = bucket.views["exp_avg"], bucket.trained()
    if trained:
        torch._foreach_mul_([views[n] for n in trained], beta1)
    found = [n for n, g in enumerate(gradients) if g is not None]
    if found:
        given: list[Any] = [gradients[n] for n in found]
        torch._foreach_add_([views[n] for n in found], given, alpha=1 - beta1)
    return bucket.arrays["exp_avg"]


def advance_range(
    bucket: FlatBucket, gradients: Sequence[torch.Tensor | None], beta1: float, start: int, stop: int
) -> None:
    """Advances m in a range of its array, m = beta1 m + (1 - beta1) g. gradients: flat; None is 0."""
    array = bucket.arrays["exp_avg"]
    for span in bucket.spans(start, stop):
        moment, gradient = array[span.of_array], gradients[span.number]
        if gradient is None:
            moment.mul_(beta1)
        else:
            moment.lerp_(gradient[span.start : span.stop], 1 - beta1)


def descend_range(
    bucket: FlatBucket,
    groups: Sequence[dict[str, Any]],
    corrections: tuple[float, float],
    eps: float,
    scratch: torch.Tensor,
    start: int,
    stop: int,
) -> None:
    """Decays w, then w = w - lr m / corrections[0] / (sqrt(v / corrections[1]) + eps), in a range of the array.

    groups: of each parameter.
    scratch: fp32, of at least the elements of the range.

    Skips parameters that do not train or are not contiguous.
    """
    first, root = corrections[0], math.sqrt(corrections[1])
    for span in bucket.spans(start, stop):
        p, group = bucket.parameters[span.number], groups[span.number]
        if not (p.requires_grad and p.is_contiguous()):
            continue
        w, divided = p.detach().view(-1)[span.start : span.stop], scratch[: span.stop - span.start]
        decay([w], [group])
        torch.sqrt(bucket.arrays["exp_avg_sq"][span.of_array], out=divided).add_(eps * root)
        descend(w, bucket.arrays["exp_avg"][span.of_array], divided, float(group["lr"]) * root / first)


def denominators(array: torch.Tensor, correction: float, eps: float) -> torch.Tensor:
    """Computes sqrt(v / correction) + eps for an array of a bucket."""
    return torch.div(array, correction).sqrt_().add_(eps)


def decay(parameters: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """Decays weights in place: w = w - lr weight_decay w."""
    for p, group in zip(parameters, groups, strict=True):
        if group["weight_decay"]:
            p.mul_(1 - float(group["lr"]) * group["weight_decay"])


def descend(p: torch.Tensor, numerator: torch.Tensor, denominator: torch.Tensor, rate: float) -> None:
    """Updates p in place: p = p - rate * numerator / denominator."""
    if p.dtype == torch.float32:
        p.addcdiv_(numerator, denominator, value=-rate)
    else:
        p.copy_(p.float().addcdiv_(numerator, denominator, value=-rate))
