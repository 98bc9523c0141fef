"""Learning rates over the steps: a warm-up, then constant, linear, cosine or polynomial; and rates for larger batches.

    lr = scale_learning_rate(0.1, batch=8192)                                  # 3.2
    optimizer = LARS(model.parameters(), lr=lr)
    scheduler = warmup_cosine(optimizer, 500, 10_000, start=0.1 / lr)          # from 0.1 up to 3.2, then down to 0
    ... optimizer.step(); scheduler.step()

Each returns torch's LambdaLR, which multiplies the groups' learning rates by a factor that depends on the step alone.
torch's LinearLR cannot begin at 0, its CosineAnnealingLR rises again after the last step, its PolynomialLR ends at 0.
Source of the scaling rule and the gradual warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet
in 1 Hour", sections 2.1 and 2.2.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..setting_checks import require


def scale_learning_rate(base_lr: float, batch: int, base_batch: int = 256, rule: str = "linear") -> float:
    """Scales a learning rate that is good for `base_batch` samples to a global batch.

    batch: samples of all ranks in a step.
    rule: "linear" (SGD, LARS), or "sqrt" (LAMB: You et al. 2020, section 4).
    """
    require("base_lr", base_lr, base_lr >= 0, "at least 0")
    require("batch", batch, batch > 0, "samples of all ranks in a step, above 0")
    require("base_batch", base_batch, base_batch > 0, "above 0")
    require("rule", rule, rule in ("linear", "sqrt"), "'linear' or 'sqrt'")
    larger = batch / base_batch
    return base_lr * (larger if rule == "linear" else math.sqrt(larger))


def warmup_constant(
    optimizer: torch.optim.Optimizer, warmup_steps: int, *, start: float = 0.0, last_epoch: int = -1
) -> LambdaLR:
    """Raises the learning rate linearly from `start` times its value until step `warmup_steps`, then keeps it.

    start: the factor at step 0. With `start = base_lr / lr` it is the gradual warm-up from the rate before scaling.
    last_epoch: the last step of a schedule that goes on, as in torch.
    """
    return _schedule(optimizer, warmup_steps, warmup_steps, 1.0, start, 1.0, last_epoch)


def warmup_linear(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int,
    *,
    start: float = 0.0,
    end: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warms up, then lowers the learning rate linearly to `end` times its value at step `total_steps`; keeps that."""
    return _schedule(optimizer, warmup_steps, total_steps, 1.0, start, end, last_epoch)


def warmup_cosine(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int,
    *,
    start: float = 0.0,
    end: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warms up, then lowers the learning rate by half a cosine to `end` times its value at step `total_steps`."""
    return _schedule(optimizer, warmup_steps, total_steps, None, start, end, last_epoch)


def warmup_polynomial(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int,
    power: float = 2.0,
    *,
    start: float = 0.0,
    end: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warms up, then lowers the rate as (the share of steps left)^power to `end` times its value at `total_steps`."""
    require("power", power, power > 0, "above 0")
    return _schedule(optimizer, warmup_steps, total_steps, power, start, end, last_epoch)


def _schedule(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int,
    power: float | None,
    start: float,
    end: float,
    last_epoch: int,
) -> LambdaLR:
    require("warmup_steps", warmup_steps, warmup_steps >= 0, "at least 0")
    require("total_steps", total_steps, total_steps >= warmup_steps, f"at least warmup_steps, {warmup_steps}")
    require("start", start, start >= 0, "a factor of at least 0")
    require("end", end, end >= 0, "a factor of at least 0")
    return LambdaLR(optimizer, partial(_factor, warmup_steps, total_steps, power, start, end), last_epoch)


def _factor(warmup_steps: int, total_steps: int, power: float | None, start: float, end: float, step: int) -> float:
    """Computes the factor of the learning rate at a step. power: of the share of steps left; None: half a cosine."""
    if step < warmup_steps:
        return start + (1 - start) * step / warmup_steps
    if step >= total_steps:
        return end
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    left: float = (1.0 + math.cos(math.pi * done)) / 2 if power is None else (1.0 - done) ** power
    return end + (1 - end) * left
