"""1-bit LAMB: LAMB at first; then a momentum that is sent in one bit, and trust ratios derived from what is received.

    steps          1 ... freeze                                freeze + 1 ...
    m, v           of the averaged gradients                   m: 1-bit mean, each layer scaled; v: stays
    trust ratio    |w| / |update|; its moving average c        c * r
    r                                                          max of sqrt(v) / sqrt(fresh v), in steps of 10 %

Layers have momenta of unlike sizes, and an exchange has one scale for many of them. So each is multiplied by its
scaling, that at the freeze makes the root mean square of m the same for all. The fresh v is that of the gradient which
the received momenta tell: (m_t - beta1 m_(t-1)) / (1 - beta1).

Source: Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
Speed", Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...gradients.scalars import values_of
from ...mesh import placement
from ...setting_checks import require
from ..trust_ratio import squared_norms
from .adam import FreezingOptimizer
from .flat import FlatBucket
from .steps import advance_first_moment, advance_moments, denominators

_FRESH = "exp_avg_sq_fresh"
_AVERAGE = 0.9  # of trust ratios
_LEAST, _MOST, _CHANGE = 0.5, 4.0, 0.1  # of r


class OneBitLamb(FreezingOptimizer):
    """LAMB that sends 97 % less once v is frozen. For each parameter w with the ranks' gradients g_r, at step t

        before the freeze (at f)    m, v, ratio as in LAMB, of the mean of g_r;   c = 0.9 c + 0.1 ratio
        after it                    m = 1-bit mean over the ranks of beta1 m + (1 - beta1) g_r
                                    ratio = c / (1 - 0.9^k) * r
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^f)) + eps) + weight_decay w;   w = w - lr * ratio * u

    with k the steps until f in which w had a gradient (ratio = r if none), and r the largest element of
    (sqrt(v / (1 - beta2^f)) + eps) / (sqrt(fresh v / (1 - beta2^t)) + eps), not more than 10 % from that of the step
    before, and in 0.5 ... 4.

    params: parameters or groups of them, of 32 or 16 bits. A group with `trust=False` has ratio 1.
    Others: as of `OneBitAdam`. State of a parameter: `exp_avg`, `exp_avg_sq`, `exp_avg_sq_fresh`, fp32; `error` in a
    state_dict; c, r and the scaling in `progress`.
    """

    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", _FRESH)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust: bool = True,
        freeze_step: int | None = None,
        freeze_ratio: float = 0.96,
        lr_warmup_steps: int = 0,
        process_group: Communicator | None = None,
        where: str | None = None,
        error_feedback: bool = True,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust}
        # In the order of the parameters. measured: how many ratios are in the moving average.
        progress: dict[str, Any] = {"ratios": [], "measured": [], "factors": [], "scalings": []}
        exchange = process_group, where, error_feedback, bucket_cap_mb
        super().__init__(params, defaults, progress, freeze_step, freeze_ratio, lr_warmup_steps, *exchange)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at construction only."""
        trust = {**self.defaults, **param_group}["trust"]
        require("trust", trust, isinstance(trust, bool), "True or False")
        super().add_param_group(param_group)
        if any("tp" in placement(p).axes for p in self.param_groups[-1]["params"]):
            raise ConfigurationError(f"{type(self).__name__}: got parameters that are cut over tp; needs whole ones")

    def _update(self) -> None:
        step = self.progress["steps"] + 1
        if self.frozen_at is None:
            for bucket in self._buckets:
                gradients = bucket.gradients()
                advance_moments(bucket, gradients, self._betas)
                self._descend(bucket, step, [g is not None for g in gradients], None)
            if self._freezes(step):
                self._set_scalings()
                for bucket in self._buckets:
                    bucket.arrays[_FRESH].copy_(bucket.arrays["exp_avg_sq"])
                self._freeze(step)
        else:
            with self._left_out.states_kept("exp_avg", _FRESH):
                self._exchange_momenta(step)
        self._set_progress(steps=step)

    def _exchange_momenta(self, step: int) -> None:
        """A step after the freeze."""
        self._mask_errors()
        beta1, beta2 = self._betas
        exchanged = []
        for bucket in self._buckets:
            before = bucket.arrays["exp_avg"].clone()
            local = advance_first_moment(bucket, bucket.gradients(), beta1)
            self._scale(bucket, inverse=False)
            exchanged.append((bucket, before, self._start_exchange(bucket, local)))
        for bucket, before, exchange in exchanged:
            exchange.wait()
            self._scale(bucket, inverse=True)
            gradient = before.mul_(-beta1).add_(bucket.arrays["exp_avg"]).div_(1 - beta1)
            fresh = bucket.arrays[_FRESH].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            divided = denominators(fresh, 1 - beta2**step, self._eps)
            trained = [p.requires_grad for p in bucket.parameters]
            self._descend(bucket, step, trained, bucket.views_of(divided))

    def _descend(
        self, bucket: FlatBucket, step: int, reached: Sequence[bool], fresh: Sequence[torch.Tensor] | None
    ) -> None:
        """Updates the weights of a bucket. fresh: denominators by the fresh v, after the freeze."""
        first, second = self._corrections(step)
        steady = bucket.views_of(denominators(bucket.arrays["exp_avg_sq"], second, self._eps))
        groups = bucket.groups_of_parameters(self.param_groups)
        found = [n for n, flag in enumerate(reached) if flag and bucket.parameters[n].numel()]
        weights = [bucket.parameters[n].float() for n in found]
        updates = [
            torch.div(bucket.views["exp_avg"][n], first).div_(steady[n]).add_(w, alpha=groups[n]["weight_decay"])
            for n, w in zip(found, weights, strict=True)
        ]
        if fresh is None:
            ratios = self._measured(bucket, found, weights, updates)
        else:
            largest = values_of([(steady[n] / fresh[n]).amax() for n in found])
            ratios = self._followed(bucket, found, largest)
        for n, w, update, ratio in zip(found, weights, updates, ratios, strict=True):
            trusted = ratio if groups[n]["trust"] else 1.0
            bucket.parameters[n].copy_(w.sub_(update, alpha=float(groups[n]["lr"]) * trusted))

    def _measured(
        self, bucket: FlatBucket, found: Sequence[int], weights: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]
    ) -> list[float]:
        """The trust ratios of LAMB, which go into their moving averages."""
        norms = squared_norms([*weights, *updates]).sqrt_().tolist()
        pairs = zip(norms[: len(found)], norms[len(found) :], strict=True)
        ratios = [weight / update if weight > 0 and update > 0 else 1.0 for weight, update in pairs]
        averages, counts = self._per_parameter("ratios", 0.0), self._per_parameter("measured", self.progress["steps"])
        for number, ratio in zip(self._numbers(bucket, found), ratios, strict=True):
            averages[number] = _AVERAGE * averages[number] + (1 - _AVERAGE) * ratio
            counts[number] += 1
        self._set_progress(ratios=averages, measured=counts)
        return ratios

    def _followed(self, bucket: FlatBucket, found: Sequence[int], largest: Sequence[float]) -> list[float]:
        """The trust ratios after the freeze: the moving averages, times r."""
        averages, factors = self._per_parameter("ratios", 0.0), self._per_parameter("factors", 1.0)
        assert self.frozen_at is not None
        counts = self._per_parameter("measured", self.frozen_at)
        ratios = []
        for number, factor in zip(self._numbers(bucket, found), largest, strict=True):
            near = min(max(factor, (1 - _CHANGE) * factors[number]), (1 + _CHANGE) * factors[number])
            factors[number] = min(max(near, _LEAST), _MOST)
            steady = averages[number] / (1 - _AVERAGE ** counts[number]) if counts[number] else 1.0
            ratios.append(steady * factors[number])
        self._set_progress(factors=factors)
        return ratios

    def _set_scalings(self) -> None:
        """Finds the factors by which the momenta of all parameters have one root mean square."""
        scalings = self._per_parameter("scalings", 1.0)
        roots: dict[int, float] = {}
        for bucket in self._buckets:
            everyone = range(len(bucket.parameters))
            squares = squared_norms(bucket.views["exp_avg"]).tolist()
            for number, p, square in zip(self._numbers(bucket, everyone), bucket.parameters, squares, strict=True):
                roots[number] = math.sqrt(square / max(p.numel(), 1))
        common = sum(roots.values()) / len(roots)
        for number, root in roots.items():
            scalings[number] = common / root if root > 0 else 1.0
        self._set_progress(scalings=scalings)

    def _scale(self, bucket: FlatBucket, inverse: bool) -> None:
        scalings = self._per_parameter("scalings", 1.0)
        own = [scalings[number] for number in self._numbers(bucket, range(len(bucket.parameters)))]
        (torch._foreach_div_ if inverse else torch._foreach_mul_)(bucket.views["exp_avg"], own)

    def _per_parameter(self, name: str, value: float) -> list[float]:
        """A copy of a list of numbers in `progress`, one for each parameter. value: of each where there is none yet."""
        found: list[float] = self.progress.get(name, [])  # states of before have no "measured"
        return list(found) or [value] * sum(len(group["params"]) for group in self.param_groups)

    def _numbers(self, bucket: FlatBucket, found: Iterable[int]) -> list[int]:
        """The parameters' places among all of the optimizer's."""
        everyone = (p for group in self.param_groups for p in group["params"])
        places = {p: number for number, p in enumerate(everyone)}
        return [places[bucket.parameters[n]] for n in found]
