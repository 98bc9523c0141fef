"""LAMB: Adam whose update is scaled layer by layer to the size of the weights, for very large batches.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..mesh import Mesh
from ..optimizer_trial import StepNeeds
from ..setting_checks import require, require_betas
from .trust_ratio import TrustRatioOptimizer


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments. For each parameter w with gradient g, at its step t

        m = beta1 * m + (1 - beta1) * g;         m' = m / (1 - beta1^t)
        v = beta2 * v + (1 - beta2) * g * g;     v' = v / (1 - beta2^t)
        u = m' / (sqrt(v') + eps) + weight_decay * w
        w = w - lr * (phi(|w|) / |u|) * u

    params: parameters or groups of them. A group with `trust=False` (biases, normalisation layers) has ratio 1, as has
        a parameter whose weights or update are all zero: it is Adam with decoupled weight decay.
    bounds: phi keeps the norm of the weights within them, (least, most); None: phi is the identity.
    maximize: goes up the gradient.
    mesh: a `Mesh` over whose tp parameters are cut; ZeroOptimizer gives its own. A step is collective over tp then.

    The state of a parameter is `step`, `exp_avg` (m) and `exp_avg_sq` (v). A step holds the updates of all parameters
    at one time. Sharded by ZeroOptimizer as well as plain.
    """

    step_needs = StepNeeds(wholes=False)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bounds: tuple[float, float] | None = None,
        *,
        trust: bool = True,
        maximize: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bounds": bounds,
            "trust": trust,
            "maximize": maximize,
        }
        super().__init__(params, defaults, mesh)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after a check of its settings and parameters."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            require("params", p.dtype, p.dtype.is_floating_point, "floating-point tensors")

    def _check(self, settings: dict[str, Any]) -> None:
        bounds = settings["bounds"]
        require_betas(settings["betas"])
        require("eps", settings["eps"], settings["eps"] > 0, "above 0")
        fits = bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1])
        require("bounds", bounds, fits, "None or (least, most), with 0 <= least <= most")

    def _step(self) -> None:
        work = []
        for group in self.param_groups:
            parameters, gradients = self._gradients(group)
            work.append((group, parameters, self._updates(group, parameters, gradients)))
        weights = [w for group, parameters, _ in work if group["trust"] for w in parameters]
        changes = [u for group, _, updates in work if group["trust"] for u in updates]
        norms = iter(self._norms_of_pairs(weights, changes))
        for group, parameters, updates in work:
            for w, u in zip(parameters, updates, strict=True):
                ratio = _ratio(group, *next(norms)) if group["trust"] else 1.0
                w.sub_(u, alpha=group["lr"] * ratio)

    def _updates(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Updates the moments, and returns each parameter's update before its ratio."""
        beta1, beta2 = group["betas"]
        updates = []
        for w, g in zip(parameters, gradients, strict=True):
            state = self.state[w]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(w, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(w, memory_format=torch.preserve_format)
            state["step"] += 1
            step = state["step"].item()
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(g, 1 - beta1)
            square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            scale = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
            update = mean.div(1 - beta1**step).div_(scale)
            updates.append(update.add_(w, alpha=group["weight_decay"]))
        return updates


def _ratio(group: dict[str, Any], weight: float, update: float) -> float:
    """Computes an update's factor from the norms of the parameter and the update."""
    if group["bounds"] is not None:
        least, most = group["bounds"]
        weight = min(max(weight, least), most)
    return weight / update if weight > 0 and update > 0 else 1.0
