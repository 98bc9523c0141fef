"""1-bit Adam: Adam at first; then frozen mean squares of the gradients, and a momentum that is sent in one bit.

    steps       1 ... freeze              freeze + 1 ...
    gradients   averaged                  each rank's own, g_r
    m           of their mean             mean over the ranks of beta1 m + (1 - beta1) g_r, in one bit, with errors
    v           of their mean             stays

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
Algorithm 1, and section 7.1 for the freeze.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from collectives import Communicator

from ...gradients.compression.pipeline import PipelinedReduction
from ...gradients.compression.sign import CHUNK
from ...setting_checks import integer, require
from .base import OneBitOptimizer
from .flat import FlatBucket
from .steps import advance_moments, advance_range, decay, denominators, descend, descend_range


class FreezingOptimizer(OneBitOptimizer):
    """Base of the methods that freeze v once: when it has become steady, or at a given step.

    v is steady when |v_t|_1 / |v_(t-D)|_1 >= freeze_ratio, with D = 1 / (1 - beta2) steps and v without its bias
    towards zero, in a step after `lr_warmup_steps`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        progress: dict[str, Any],
        freeze_step: int | None,
        freeze_ratio: float,
        lr_warmup_steps: int,
        *others: Any,
    ) -> None:
        self._freeze_step = None if freeze_step is None else integer("freeze_step", freeze_step, 1)
        fits = isinstance(freeze_ratio, int | float) and not isinstance(freeze_ratio, bool) and 0 < freeze_ratio <= 1
        require("freeze_ratio", freeze_ratio, fits, "a number above 0 and at most 1")
        self._ratio, self._warmup = freeze_ratio, integer("lr_warmup_steps", lr_warmup_steps, 0)
        first: dict[str, Any] = {"steps": 0, "frozen_at": None, "beta2_of_v": None, "norms": []}
        super().__init__(params, defaults, {**first, **progress}, *others)

    @property
    def frozen_at(self) -> int | None:
        """The step after which v has stayed; None before."""
        found: int | None = self.progress["frozen_at"]
        return found

    @property
    def averages_gradients(self) -> bool:
        """True until v is frozen."""
        return self.frozen_at is None

    def _corrections(self, step: int) -> tuple[float, float]:
        """Bias corrections: the divisors of m and v, which began as zeros.

        By the betas of this step; of a v that stays, by the beta2 of the step after which it does.
        """
        beta1, beta2 = self._betas
        if self.frozen_at is None:
            return 1 - beta1**step, 1 - beta2**step
        return 1 - beta1**step, 1 - self._beta2_of_v**self.frozen_at

    def _settings_that_must_agree(self) -> dict[str, Any]:
        names = {"freeze_step": self._freeze_step, "freeze_ratio": self._ratio, "lr_warmup_steps": self._warmup}
        return super()._settings_that_must_agree() | names

    def _freezes(self, step: int) -> bool:
        """Tells if v stays from this step on, and keeps its norm. Collective where v decides."""
        if self._freeze_step is not None:
            return step >= self._freeze_step
        beta2 = self._betas[1]
        span = max(1, round(1 / (1 - beta2)))
        norm = sum(float(bucket.arrays["exp_avg_sq"].sum(dtype=torch.float64)) for bucket in self._buckets)
        norms = [*self.progress["norms"], norm / (1 - beta2**step)][-span - 1 :]
        self._set_progress(norms=norms)
        if step <= self._warmup or len(norms) <= span:
            return False
        # Sums may round otherwise on another kind of processor: one decision of all.
        return self._all_agree(norms[-1] >= self._ratio * norms[0] > 0)

    def _freeze(self, step: int) -> None:
        self._set_progress(frozen_at=step, beta2_of_v=self._betas[1], norms=[])


class OneBitAdam(FreezingOptimizer):
    """Adam that sends 97 % less once v is frozen. For each parameter w with the ranks' gradients g_r, at step t

        before the freeze    g = mean of g_r;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g g
        after it             m = 1-bit mean over the ranks of beta1 m + (1 - beta1) g_r
        w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^f)) + eps) + weight_decay w),  f = t until the freeze

    params: parameters or groups of them, of 32 or 16 bits. Their gradients lie on this rank after the freeze, so that
        clipping and unscaling before a step is of the rank's own gradients.
    freeze_step: the last step of plain Adam; None: found by v (`freeze_ratio`, 0.96 in the paper).
    lr_warmup_steps: steps in which the learning rate rises; v is not found steady in them.
    process_group, where, error_feedback, bucket_cap_mb: as of `OneBitOptimizer`.

    An element whose v is zero at the freeze, which never had a gradient, gets no update from then on, but its decay.
    A parameter without a gradient in a step has, after the freeze, one of zeros. A parameter with requires_grad=False
    stays as it is, without decay, and so does its state. Which ones train may change from step to step, on all ranks.

    betas and eps are read from the groups in every step, so that a schedule may change them; all groups have the same.

    State of a parameter: `exp_avg` (m), `exp_avg_sq` (v), fp32; `error` in a state_dict. With ZeroOptimizer, stage 1,
    states are not cut: every rank needs whole ones.

    Raises ConfigurationError for wrong settings; ModelMismatch in the first step where the ranks' settings differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        freeze_ratio: float = 0.96,
        lr_warmup_steps: int = 0,
        process_group: Communicator | None = None,
        where: str | None = None,
        error_feedback: bool = True,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        exchange = process_group, where, error_feedback, bucket_cap_mb
        super().__init__(params, defaults, {}, freeze_step, freeze_ratio, lr_warmup_steps, *exchange)

    def _update(self) -> None:
        step = self.progress["steps"] + 1
        if self.frozen_at is None:
            for bucket in self._buckets:
                gradients = bucket.gradients()
                advance_moments(bucket, gradients, self._betas)
                self._descend(bucket, step, [g is not None for g in gradients])
            if self._freezes(step):
                self._freeze(step)
        else:
            with self._left_out.states_kept("exp_avg"):
                self._exchange_momenta(step)
        self._set_progress(steps=step)

    def _exchange_momenta(self, step: int) -> None:
        """A step after the freeze."""
        self._mask_errors()
        scratch = torch.empty(CHUNK, dtype=torch.float32, device=self._buckets[0].device)
        exchanges = [self._exchange_momentum(bucket, step, scratch) for bucket in self._buckets]
        for bucket, exchange in zip(self._buckets, exchanges, strict=True):
            exchange.wait()
            strided = [p.requires_grad and not p.is_contiguous() for p in bucket.parameters]
            if any(strided):
                self._descend(bucket, step, strided)

    def _exchange_momentum(self, bucket: FlatBucket, step: int, scratch: torch.Tensor) -> PipelinedReduction:
        """Starts it for a bucket: each chunk of m is advanced as it is sent, and used as its mean arrives."""
        beta1, eps, groups = self._betas[0], self._eps, bucket.groups_of_parameters(self.param_groups)
        gradients = [None if g is None else g.reshape(-1) for g in bucket.gradients()]
        return self._start_exchange(
            bucket,
            bucket.arrays["exp_avg"],
            partial(advance_range, bucket, gradients, beta1),
            partial(descend_range, bucket, groups, self._corrections(step), eps, scratch),
        )

    def _descend(self, bucket: FlatBucket, step: int, reached: list[bool]) -> None:
        """Updates the weights of a bucket by m. reached: per parameter, whether to do so."""
        first, second = self._corrections(step)
        divided = bucket.views_of(denominators(bucket.arrays["exp_avg_sq"], second, self._eps))
        groups = bucket.groups_of_parameters(self.param_groups)
        kept = [n for n, flag in enumerate(reached) if flag]
        decay([bucket.parameters[n] for n in kept], [groups[n] for n in kept])
        for n in kept:
            descend(bucket.parameters[n], bucket.views["exp_avg"][n], divided[n], float(groups[n]["lr"]) / first)
