"""Outer steps of DiLoCo: fragments of theta_0, when they are reduced, stepped on and merged, and their state.

    step          1 ...        H/F - tau         H/F                    2 H/F - tau       2 H/F
    fragment 0                 begin reducing    outer step, merge
    fragment 1                                                          begin reducing    outer step, merge

One reduction at most is in flight, begun and waited for in the thread of the program, at the same steps on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from numbers import Real
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError, TrainingError
from ..job.agreement import check_everywhere, is_anywhere
from ..mesh.placement import placement
from ..optimizer_trial import comparable
from ..partial_steps import bring_back
from ..replicas.checksums import checksum, difference
from ..replicas.start_check import check_settings_agree
from ..setting_checks import integer, require
from .elementwise_state import state_tensors
from .rank_mean import METHODS, PendingMean, RankMean, is_elementwise, peers_on_other_nodes


class OuterSteps:
    """The outer steps of DiLoCo: counts inner ones, and keeps theta_0. The arguments are DiLoCo's.

    steps: inner steps that `step` has counted, the first `warmup_steps` among them.
    """

    def __init__(
        self,
        inner: Any,
        comm: Communicator,
        node: Communicator | None,
        period: int,
        outer_class: type[torch.optim.Optimizer],
        outer_settings: dict[str, Any],
        fragments: int,
        overlap: int,
        mixing: float,
        compress: str | None,
        error_feedback: bool,
        warmup_steps: int,
    ) -> None:
        self._zero = inner if hasattr(inner, "owned_weights") else None
        self.process_group, self.steps = comm, 0

        check_everywhere(comm, lambda: self._check(inner, comm, node, outer_class, period, fragments, overlap))
        check_everywhere(comm, lambda: _check_reduction_settings(mixing, compress, error_feedback))
        check_everywhere(comm, lambda: _refuse_tp(compress, inner.param_groups))
        check_everywhere(comm, lambda: self._check_warmup(warmup_steps))
        self.period, self.fragments, self.overlap = period, fragments, overlap
        node = node if self._zero is None else self._zero.process_group
        self.mixing, self.compress, self.warmup_steps = float(mixing), compress, warmup_steps
        self._parameters = [p for group in inner.param_groups for p in group["params"]]
        settings = {
            **{"period": period, "fragments": fragments, "overlap": overlap, "mixing": self.mixing},
            **{"compress": compress, "error_feedback": bool(error_feedback), "warmup_steps": warmup_steps},
            **{"outer_class": outer_class.__name__, **comparable(outer_settings)},
            "ranks of a node": 0 if node is None else node.size,
            "shapes": [tuple(p.shape) for p in self._parameters],
        }
        check_settings_agree(comm, "DiLoCo", settings)
        local = self._local_weights()
        holders = self._holders = comm if self._zero is None or node is None else peers_on_other_nodes(comm, node)
        self._fragment_bounds = _fragment_bounds([v.numel() for v in local], self.fragments)
        self._theta: list[torch.Tensor] = []
        self._theta_views: list[list[torch.Tensor]] = []  # of each fragment the views of its theta_0
        for first, last in self._fragment_bounds:
            members = local[first:last]
            dtype = torch.float32
            for values in members:
                dtype = torch.promote_types(dtype, values.dtype)
            flat = torch.empty(sum(v.numel() for v in members), dtype=dtype)
            self._theta.append(flat)
            self._theta_views.append(_views(flat, members))
        self._outer_parameters = [[torch.nn.Parameter(view) for view in views] for views in self._theta_views]
        outer_parameters = [p for own in self._outer_parameters for p in own]
        self.optimizer = check_everywhere(comm, lambda: outer_class(outer_parameters, **outer_settings))
        sizes = [flat.numel() for flat in self._theta]
        within = None if self._zero is not None else node  # ranks of a ZeRO node hold unlike slices
        self._mean = RankMean(holders, within, sizes, compress, error_feedback)
        self._in_flight: PendingMean | None = None
        self._adopt_weights_of_first_rank()

    def _check(
        self,
        inner: Any,
        comm: Communicator,
        node: Any,
        outer_class: Any,
        period: int,
        fragments: int,
        overlap: int,
    ) -> None:
        integer("period", period, 1)
        require("fragments", fragments, integer("fragments", fragments, 1) <= period, f"at most period, {period}")
        least = period // fragments
        fits = integer("overlap", overlap, 0) < least
        require("overlap", overlap, fits, f"less than the steps between fragments, {least}")
        fits = isinstance(outer_class, type) and issubclass(outer_class, torch.optim.Optimizer)
        require("outer_class", outer_class, fits, "a class of torch.optim")
        fits = node is None or isinstance(node, Communicator)
        require("node_group", node, fits, "None or a Communicator made by split")
        if self._zero is not None:
            self._check_zero(comm, node)
        parameters = [p for group in inner.param_groups for p in group["params"]]
        for p in parameters:
            require("parameters", p.dtype, p.dtype.is_floating_point, "floating-point tensors")
            require("parameters", p.device.type, p.device.type == "cpu", "tensors in the host's memory")

    def _check_zero(self, comm: Communicator, node: Communicator | None) -> None:
        own = self._zero.process_group  # type: ignore[union-attr]
        if node is not None and node is not own:
            raise ConfigurationError("node_group: got a Communicator; needs None, as the ZeroOptimizer has its own")
        if own.size == comm.size > 1:
            raise ConfigurationError(
                f"optimizer: got a ZeroOptimizer over all {comm.size} ranks, which average gradients in every step; "
                "needs one over the ranks of a node, by process_group="
            )
        if self._zero.owned_weights().delays:  # type: ignore[union-attr]
            raise ConfigurationError("optimizer: got a ZeroOptimizer with delayed_update; needs it False")

    def _check_warmup(self, steps: int) -> None:
        fits = integer("warmup_steps", steps, 0) == 0 or self._zero is None
        require("warmup_steps", steps, fits, "0 over a ZeroOptimizer, whose ranks average gradients in a node alone")

    # ---- weights ---------------------------------------------------------------------------------------------

    def _local_weights(self) -> list[torch.Tensor]:
        """The weights of this rank: whole parameters, or its slices."""
        if self._zero is None:
            return [p.detach() for p in self._parameters]
        return list(self._zero.owned_weights().values().values())

    def _writing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._zero is None else self._zero.owned_state().written()

    @torch.no_grad()
    def _adopt_weights_of_first_rank(self) -> None:
        """Makes theta_0 the weights of rank 0, and all ranks' weights theta_0. Collective."""
        with self._writing():
            for number, (first, last) in enumerate(self._fragment_bounds):
                for own, outer in zip(self._local_weights()[first:last], self._theta_views[number], strict=True):
                    outer.copy_(own)
                self._holders.broadcast(self._theta[number])
                self._write_weights(number, 0.0)

    @torch.no_grad()
    def _write_weights(self, number: int, mixing: float) -> None:
        """Makes a fragment's weights theta_0, but for the share `mixing` of their own."""
        first, last = self._fragment_bounds[number]
        for own, outer in zip(self._local_weights()[first:last], self._theta_views[number], strict=True):
            if mixing:
                own.copy_(torch.lerp(outer, own.to(outer.dtype), mixing))
            else:
                own.copy_(outer)

    # ---- steps -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Counts an inner step; begins and makes outer steps that are due. Returns True if it made one. Collective."""
        self.steps += 1
        local = self.steps - self.warmup_steps
        if local <= 0:
            if local == 0:
                self._end_warmup()
            return False
        merged = self._in_flight is not None and self._is_outer_step(self._in_flight.number, local)
        if merged:
            self._merge()
        for number in range(self.fragments):
            if self._is_outer_step(number, local + self.overlap):
                self._begin(number)
                if not self.overlap:
                    self._merge()
                    merged = True
        return merged

    @property
    def is_synchronised(self) -> bool:
        """True if all ranks have the same weights now: before local steps, and after an outer step of all of them."""
        local = self.steps - self.warmup_steps
        return local <= 0 or (self.fragments == 1 and not self.mixing and local % self.period == 0)

    def _is_outer_step(self, number: int, step: int) -> bool:
        return step % self.period == self.period * (number + 1) // self.fragments % self.period

    def _end_warmup(self) -> None:
        """Makes theta_0 the weights, which must be equal on all ranks by now."""
        sums = {f"parameter {number}": checksum(values) for number, values in enumerate(self._local_weights())}
        if (found := difference(self.process_group, sums)) is not None:
            raise TrainingError(
                f"DiLoCo: the ranks' weights differ after the {self.warmup_steps} warmup_steps, in which gradients are "
                f"averaged; needs post_local_sgd_hook at a DistributedDataParallel over all ranks ({found})"
            )
        self._adopt_weights_of_first_rank()

    @torch.no_grad()
    def _begin(self, number: int) -> None:
        """Starts to reduce how far this rank has gone since the last outer step of a fragment.

        Weights of 16 bits started from theta_0 as rounded to 16 bits, so the difference is taken from that value:
        the rounding is no progress of the rank.
        """
        first, last = self._fragment_bounds[number]
        flat = self._theta[number].clone()
        for change, own in zip(_views(flat, self._theta_views[number]), self._local_weights()[first:last], strict=True):
            if own.dtype != change.dtype:
                change.copy_(change.to(own.dtype))
            change.sub_(own)
        self._in_flight = self._mean.begin(number, flat)

    @torch.no_grad()
    def _merge(self) -> None:
        """Makes the outer step of the fragment that was reduced."""
        reduction, self._in_flight = self._in_flight, None
        assert reduction is not None
        mean = reduction.wait()
        is_nonfinite = not bool(mean.isfinite().all())
        if self._zero is not None:  # slices differ in a node
            is_nonfinite = is_anywhere(self.process_group, is_nonfinite)
        if is_nonfinite:
            raise TrainingError(
                f"DiLoCo: the mean pseudo-gradient of fragment {reduction.number} is not finite at step {self.steps}: "
                "a rank's weights are not; theta_0 is as it was"
            )
        self._mean.finish(reduction)
        outer_parameters = self._outer_parameters[reduction.number]
        for p, gradient in zip(outer_parameters, _views(mean, outer_parameters), strict=True):
            p.grad = gradient
        self.optimizer.step()
        for p, view in zip(outer_parameters, self._theta_views[reduction.number], strict=True):
            p.grad = None
            bring_back(p, view)
        with self._writing():
            self._write_weights(reduction.number, self.mixing)

    def global_parameters(self) -> list[torch.Tensor]:
        """theta_0 of each parameter, in the order of the inner optimizer's groups.

        Under ZeRO of each of this rank's slices, in the order of `owned_weights().values()`.
        """
        return [view.detach() for views in self._theta_views for view in views]

    # ---- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, theta_0, the outer optimizer's state, errors and a mean in flight. Collective.

        Equal on all ranks, but under ZeRO, where it is that of the rank's slices. Errors are their mean over the ranks.
        """
        in_flight = None
        if self._in_flight is not None:
            in_flight = {"fragment": self._in_flight.number, "mean": self._in_flight.wait().clone()}
        return {
            "steps": self.steps,
            "global": [flat.clone() for flat in self._theta],
            "outer": self.optimizer.state_dict(),
            "errors": self._mean.mean_remainders(self._in_flight),
            "in flight": in_flight,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave, on any number of ranks, under ZeRO on as many. Weights are loaded elsewhere.

        Raises ConfigurationError on every rank for a state of other fragments. Collective.
        """
        check_everywhere(self.process_group, lambda: self._check_state(state_dict))
        self.steps = state_dict["steps"]
        for flat, saved in zip(self._theta, state_dict["global"], strict=True):
            flat.copy_(saved)
        self.optimizer.load_state_dict(state_dict["outer"])
        self._mean.load_remainders(state_dict["errors"])
        if self._in_flight is not None:
            self._in_flight.wait()
        found = state_dict["in flight"]
        self._in_flight = None if found is None else PendingMean(found["fragment"], found["mean"].clone())

    def _check_state(self, given: Any) -> None:
        names = {"steps", "global", "outer", "errors", "in flight"}
        if not isinstance(given, Mapping) or not names <= given.keys():
            raise ConfigurationError("load_state_dict: needs what the state_dict() of a DiLoCo gave")
        integer("steps", given["steps"], 0)
        own, sizes = [flat.numel() for flat in self._theta], [flat.numel() for flat in given["global"]]
        if own != sizes:
            raise ConfigurationError(f"load_state_dict: got fragments of {sizes} elements; needs {own}")

    def held_tensors(self) -> list[torch.Tensor]:
        """theta_0, outer state, errors, and what is reduced."""
        in_flight = [] if self._in_flight is None else [self._in_flight.mean]
        own = state_tensors(self.optimizer.state.values())
        return [*self._theta, *own, *self._mean.held_tensors(), *in_flight]


def _check_reduction_settings(mixing: Any, compress: Any, error_feedback: Any) -> None:
    fits = isinstance(mixing, Real) and not isinstance(mixing, bool) and 0 <= float(mixing) < 1
    require("mixing", mixing, fits, "a number of at least 0 and below 1")
    fits = compress is None or compress in METHODS
    require("compress", compress, fits, f"one of {', '.join(METHODS)}, or None")
    require("error_feedback", error_feedback, isinstance(error_feedback, bool), "True or False")


def _refuse_tp(compress: str | None, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigurationError for a method that would round values that all ranks of tp hold differently on each.

    As `gradients.compression.refusals.refuse_mesh` does, which is given a mesh.
    """
    if compress is None or is_elementwise(compress):
        return
    for number, group in enumerate(groups):
        for p in group["params"]:
            if "tp" in placement(p).axes:
                raise ConfigurationError(
                    f"compress: {compress} rounds a value by others in its fragment, and a parameter of shape "
                    f"{tuple(p.shape)} in group {number} is cut over tp, so that what is whole on every rank of tp "
                    "would differ between them; needs bf16 or None, or tp=1"
                )


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Places in a flat tensor, of these shapes."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _fragment_bounds(sizes: Sequence[int], fragments: int) -> list[tuple[int, int]]:
    """Cuts a list into runs of about equal sums, by the middles of the members."""
    total = max(1, sum(sizes))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    fragment_of = [min(fragments - 1, int(middle * fragments / total)) for middle in middles]
    return [(sum(n < k for n in fragment_of), sum(n <= k for n in fragment_of)) for k in range(fragments)]
