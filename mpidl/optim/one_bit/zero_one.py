"""0/1 Adam: mean squares v renewed more and more seldom; then local steps, with momenta exchanged now and then.

    steps       1 ... local_after                              local_after + 1 ...
    v           renewed at every k-th step by the averaged     stays
                gradients; k doubles after 16 renewals
    between     gradients are averaged in one bit              each rank steps by its own gradients; at every h-th step
                                                               the sums of the updates are averaged in one bit,
                                                               h doubles up to 16

An exchange of local steps: with S = the sum of lr m over a rank's steps since the last one,

    S = 1-bit mean of the ranks' S;   m = S / (sum of lr);   w = w of the last exchange - S / (sqrt(v) + eps)

Each rank keeps the weights of the last exchange, so that after the next one they are the same bits on all ranks.

Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from collectives import Communicator

from ...errors import TrainingError
from ...setting_checks import integer
from .base import OneBitOptimizer
from .exchange import OneBitExchange
from .flat import FlatBucket
from .steps import advance_first_moment, advance_moments, decay, denominators, descend

_SUM = "sum_of_updates"


class ZeroOneAdam(OneBitOptimizer):
    """Adam that sends one bit an element, or nothing. For each parameter w with the ranks' gradients g_r, at step t

        m = beta1 m + (1 - beta1) g;   w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^n)) + eps) + weight_decay w)

    with g the mean of g_r at steps that renew v (n times so far), else their 1-bit mean, and later g_r itself, with an
    exchange at every h-th step (see the module).

    params: parameters or groups of them, of 32 or 16 bits.
    renewals: of v, at every k-th step, after which k doubles; k is 1 at first.
    local_after: the last step in which v may be renewed.
    local_interval_steps: local steps after which h doubles; h is 1 at first.
    max_local_interval: the largest h.
    process_group, where, error_feedback, bucket_cap_mb: as of `OneBitOptimizer`.

    The weights are the ranks' own between two exchanges: a state can be taken at the step of an exchange alone, when
    `is_synchronised`; TrainingError else, on every rank. Between nodes only, a local step is one of a node.

    A parameter without a gradient has one of zeros. Elements whose v is zero in an exchange get no update by it, but
    their decay. Errors are forgotten when local steps begin. State of a parameter: `exp_avg`, `exp_avg_sq`, fp32;
    `error` in a state_dict. While h is above 1, the weights of the last exchange are kept besides, and from the first
    local step on the sum of updates.

    A parameter with requires_grad=False is left as it is, and so is its state. Where it has made local steps since the
    last exchange, the next one makes it the mean of the ranks' once more. betas and eps are read from the groups, as of
    `OneBitAdam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        renewals: int = 16,
        local_after: int = 100_000,
        local_interval_steps: int = 32_768,
        max_local_interval: int = 16,
        process_group: Communicator | None = None,
        where: str | None = None,
        error_feedback: bool = True,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        self._renewals = integer("renewals", renewals, 1)
        self._local_after = integer("local_after", local_after, 1)
        self._interval_steps = integer("local_interval_steps", local_interval_steps, 1)
        self._max_interval = integer("max_local_interval", max_local_interval, 1)
        progress = {"steps": 0, "interval": 1, "renewed": 0, "renewed_at_interval": 0, "beta2_of_v": None}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        exchange = process_group, where, error_feedback, bucket_cap_mb
        local = {"local_interval": 1, "steps_at_interval": 0, "since": 0}
        super().__init__(params, defaults, {**progress, **local}, *exchange)
        self._weights: dict[FlatBucket, list[torch.Tensor]] = {}  # of the last exchange, while steps are local
        self._rates: dict[torch.nn.Parameter, float] = {}  # sums, of those that have stepped since the last exchange

    def _settings_that_must_agree(self) -> dict[str, Any]:
        found = {"renewals": self._renewals, "local_after": self._local_after}
        found |= {"local_interval_steps": self._interval_steps, "max_local_interval": self._max_interval}
        return super()._settings_that_must_agree() | found

    @property
    def averages_gradients(self) -> bool:
        """True if the next step renews v."""
        step = self.progress["steps"] + 1
        return step <= self._local_after and step % self.progress["interval"] == 0

    @property
    def is_synchronised(self) -> bool:
        """True unless there were local steps since the last exchange, in which case each rank has its own weights."""
        return self.progress["since"] == 0

    def refuse_local_weights(self) -> None:
        """Raises TrainingError between two exchanges."""
        if not self.is_synchronised:
            left = self.progress["local_interval"] - self.progress["since"]
            raise TrainingError(
                f"ZeroOneAdam: after step {self.progress['steps']} each rank has its own weights; "
                f"needs {left} more step{'s' if left > 1 else ''}, after which the ranks exchange"
            )

    def _is_left_out(self, p: torch.nn.Parameter) -> bool:
        return super()._is_left_out(p) and p not in self._rates

    def _update(self) -> None:
        step = self.progress["steps"] + 1
        with self._left_out.states_kept(*self.keys):
            self._make_step(step)
        self._set_progress(steps=step)

    def _make_step(self, step: int) -> None:
        if step > self._local_after:
            self._step_alone(step)
        elif self.averages_gradients:
            for bucket in self._buckets:
                advance_moments(bucket, _filled(bucket), self._betas)
            self._count_renewal()
            self._descend_all(step)
        else:
            self._step_by_signs(step)

    def _count_renewal(self) -> None:
        """Notes that v is renewed, and doubles the interval after `renewals`."""
        now, interval = self.progress["renewed_at_interval"] + 1, self.progress["interval"]
        if now == self._renewals:
            now, interval = 0, 2 * interval
        for errors in self._errors.values():
            errors.mask(None)
        renewed = self.progress["renewed"] + 1
        self._set_progress(renewed=renewed, beta2_of_v=self._betas[1], renewed_at_interval=now, interval=interval)

    def _step_by_signs(self, step: int) -> None:
        """A step by gradients that are averaged in one bit."""
        self._mask_errors()
        started = []
        for bucket in self._buckets:
            array = torch.zeros(bucket.layout.padded, dtype=torch.float32, device=bucket.device)
            torch._foreach_copy_(bucket.views_of(array), _filled(bucket))
            started.append((bucket, array, self._start_exchange(bucket, array)))
        for bucket, array, exchange in started:
            exchange.wait()
            bucket.arrays["exp_avg"].lerp_(array, 1 - self._betas[0])
            self._descend(bucket, step)

    def _descend_all(self, step: int) -> None:
        for bucket in self._buckets:
            self._descend(bucket, step)

    def _descend(self, bucket: FlatBucket, step: int) -> None:
        """Updates the weights of a bucket by m."""
        divided, groups = bucket.views_of(self._denominators(bucket)), bucket.groups_of_parameters(self.param_groups)
        self._decay(bucket, bucket.parameters)
        for n in bucket.trained():
            descend(bucket.parameters[n], bucket.views["exp_avg"][n], divided[n], self._rate(groups[n], step))

    def _decay(self, bucket: FlatBucket, weights: Sequence[torch.Tensor]) -> None:
        """The decay of those parameters of a bucket that train. weights: theirs, or of the last exchange."""
        groups, trained = bucket.groups_of_parameters(self.param_groups), bucket.trained()
        decay([weights[n] for n in trained], [groups[n] for n in trained])

    def _rate(self, group: dict[str, Any], step: int) -> float:
        return float(group["lr"]) / (1 - self._betas[0] ** step)

    def _denominators(self, bucket: FlatBucket) -> torch.Tensor:
        correction = 1 - self._beta2_of_v ** self.progress["renewed"]
        return denominators(bucket.arrays["exp_avg_sq"], correction, self._eps)

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of `OneBitOptimizer.held_tensors`, and the weights of the last exchange."""
        held = super().held_tensors()
        return {**held, "optimizer": held["optimizer"] + [w for kept in self._weights.values() for w in kept]}

    # ---- local steps ------------------------------------------------------------------------------------------------

    def _step_alone(self, step: int) -> None:
        """A local step, and an exchange where it is due."""
        if step == self._local_after + 1:
            for errors in self._errors.values():
                errors.clear()
        self._mask_errors()
        since, interval = self.progress["since"] + 1, self.progress["local_interval"]
        started = []
        for bucket in self._buckets:
            groups = bucket.groups_of_parameters(self.param_groups)
            if since == 1 and interval > 1:
                self._weights[bucket] = [p.detach().clone() for p in bucket.parameters]
            momentum = advance_first_moment(bucket, bucket.gradients(), self._betas[0])
            momentum.index_fill_(0, self._masked(bucket), 0.0)
            bucket.array(_SUM)
            for n in bucket.trained():
                p, rate = bucket.parameters[n], self._rate(groups[n], step)
                bucket.views[_SUM][n].add_(bucket.views["exp_avg"][n], alpha=rate)
                self._rates[p] = self._rates.get(p, 0.0) + rate
            if interval > 1:
                self._decay(bucket, self._weights[bucket])
            if since == interval:
                started.append((bucket, self._start_exchange(bucket, bucket.arrays[_SUM])))
            else:
                self._descend(bucket, step)
        if since < interval:
            self._set_progress(since=since)
            return
        for bucket, exchange in started:
            exchange.wait()
            self._apply(bucket)
        self._rates.clear()
        at_interval = self.progress["steps_at_interval"] + interval
        doubles = at_interval >= self._interval_steps
        self._set_progress(
            since=0,
            steps_at_interval=0 if doubles else at_interval,
            local_interval=min(2 * interval, self._max_interval) if doubles else interval,
        )

    def _apply(self, bucket: FlatBucket) -> None:
        """Updates the weights of the last exchange by the mean sum of updates, of which m is the mean."""
        summed, divided = bucket.views[_SUM], bucket.views_of(self._denominators(bucket))
        stepped = [n for n, p in enumerate(bucket.parameters) if p in self._rates]
        kept = self._weights.pop(bucket, None)
        if kept is None:
            self._decay(bucket, bucket.parameters)
        for n in stepped:
            p = bucket.parameters[n]
            if kept is not None:
                p.copy_(kept[n])
            descend(p, summed[n], divided[n], 1.0)
            if self._rates[p] > 0:
                torch.div(summed[n], self._rates[p], out=bucket.views["exp_avg"][n])
        bucket.arrays[_SUM].zero_()

    def _masked(self, bucket: FlatBucket) -> torch.Tensor:
        found = self._errors[bucket].masked
        assert found is not None
        return found

    def _adopt_loaded_states(self, exchange: OneBitExchange) -> None:
        super()._adopt_loaded_states(exchange)
        self._weights.clear()
        self._rates.clear()
        for bucket in self._buckets:
            bucket.drop(_SUM)


def _filled(bucket: FlatBucket) -> list[torch.Tensor]:
    """The gradients, zeros where there is none."""
    pairs = zip(bucket.parameters, bucket.gradients(), strict=True)
    return [torch.zeros(p.shape, dtype=torch.float32, device=p.device) if g is None else g for p, g in pairs]
