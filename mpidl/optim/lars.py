"""LARS: SGD with momentum whose learning rate is set layer by layer, for very large batches.

Source: You et al. 2017, "Large Batch Training of Convolutional Networks", section 4, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..mesh import Mesh
from ..optimizer_trial import StepNeeds
from ..setting_checks import require
from .trust_ratio import TrustRatioOptimizer


class LARS(TrustRatioOptimizer):
    """Layer-wise adaptive rate scaling. For each parameter w with gradient g

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        v = momentum * v + lr * ratio * (g + weight_decay * w);    w = w - v

    params: parameters or groups of them. A group with `trust=False` (biases, normalisation layers) has ratio 1, as
        has a parameter whose weights or gradient are all zero: it is plain SGD with momentum.
    lr: the global learning rate, of any size that the batch asks for.
    maximize: goes up the gradient.
    mesh: a `Mesh` over whose tp parameters are cut; ZeroOptimizer gives its own. A step is collective over tp then.

    The state of a parameter is `momentum_buffer`, v. Sharded by ZeroOptimizer as well as plain.
    """

    step_needs = StepNeeds(wholes=False)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        *,
        trust: bool = True,
        maximize: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "trust": trust,
            "maximize": maximize,
        }
        super().__init__(params, defaults, mesh)

    def _check(self, settings: dict[str, Any]) -> None:
        require("momentum", settings["momentum"], 0 <= settings["momentum"] < 1, "at least 0 and below 1")
        require("trust_coefficient", settings["trust_coefficient"], settings["trust_coefficient"] > 0, "above 0")
        require("eps", settings["eps"], settings["eps"] >= 0, "at least 0")

    def _step(self) -> None:
        work = [(group, *self._gradients(group)) for group in self.param_groups]
        weights = [w for group, parameters, _ in work if group["trust"] for w in parameters]
        gradients = [g for group, _, own in work if group["trust"] for g in own]
        norms = iter(self._norms_of_pairs(weights, gradients))
        for group, parameters, own in work:
            for w, g in zip(parameters, own, strict=True):
                ratio = _ratio(group, *next(norms)) if group["trust"] else 1.0
                self._update(group, w, g, group["lr"] * ratio)

    def _update(self, group: dict[str, Any], w: torch.Tensor, g: torch.Tensor, rate: float) -> None:
        update = g.add(w, alpha=group["weight_decay"]) if group["weight_decay"] else g
        if group["momentum"]:
            state = self.state[w]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(w, memory_format=torch.preserve_format)
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(update, alpha=rate)
            w.sub_(momentum)
        else:
            w.sub_(update, alpha=rate)


def _ratio(group: dict[str, Any], weight: float, gradient: float) -> float:
    """Computes the local learning rate from the norms of a parameter and its gradient."""
    if weight == 0 or gradient == 0:
        return 1.0
    ratio: float = group["trust_coefficient"] * weight / (gradient + group["weight_decay"] * weight + group["eps"])
    return ratio
