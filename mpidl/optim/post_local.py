"""Post-local SGD: averaged gradients at first; later steps of each rank alone, and weights averaged now and then.

    steps      0 .. start_step - 1      start_step, ...
    gradients  averaged                 each rank's own
    weights    equal on all ranks       averaged every `period` steps

Source: Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD".

Who runs what: the averager reduces in the caller's thread, on the program's own Communicator, in `step`, which every
rank calls equally often; `_check_settings_agree` checks period and counters before, so that no rank averages alone.

The hook ends the averaging of gradients, the averager begins that of weights; they belong together:

    averager = PeriodicAverager(model.parameters(), comm, period=4, warmup_steps=100)
    ddp.register_comm_hook(PostLocalSGDState(comm, averager=averager), post_local_sgd_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from collectives import Communicator

from ..comm_hooks import GradBucket, Handle, allreduce, completed
from ..errors import ConfigurationError
from ..job.agreement import check_everywhere
from ..mesh.groups import data_group
from ..optimizer_trial import StepNeeds
from ..replicas.start_check import check_settings_agree
from ..setting_checks import integer, require

_AVERAGER = "averager"
_GROUP = "process_group=, as mesh.along('dp', 'cp')"


class Averager(Protocol):
    """The averaging that an optimizer calls after each of its steps, and saves with its state.

    warmup_steps: how many first ones there are, in which gradients are averaged.
    steps: how many `step` has counted.

    Its construction raises ModelMismatch on every rank where the ranks' settings or shapes differ.
    """

    warmup_steps: int
    steps: int

    def step(self) -> bool:
        """Counts a step, and averages if it is time to. Returns True if it did. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, and what else it keeps."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave."""


class PeriodicAverager:
    """Averages parameters over the ranks every `period` steps, after the first `warmup_steps`.

    Construction is collective. It raises on every rank ConfigurationError if an argument is wrong on any, ModelMismatch
    where the ranks' arguments differ; so does the first step after a load where the numbers of steps differ.

    parameters: floating-point tensors, of the same number, shapes and dtypes on every rank.
    process_group: the Communicator; by default the world.
    period: steps from one averaging to the next, at least 1.
    warmup_steps: steps in which gradients are averaged, so that the weights are equal anyway.

    steps: how many `step` has counted.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        process_group: Communicator | None = None,
        period: int = 4,
        warmup_steps: int = 0,
    ) -> None:
        self.process_group = data_group("PeriodicAverager", process_group, needed=_GROUP)
        self._parameters = list(dict.fromkeys(parameters))
        counts = check_everywhere(self.process_group, lambda: self._checked_arguments(period, warmup_steps))
        self.period, self.warmup_steps = counts
        self.steps, self._is_compared = 0, False
        # Here, as ranks with other warmup_steps would wait for each other in a backward pass.
        self._check_settings_agree()

    def _checked_arguments(self, period: int, warmup_steps: int) -> tuple[int, int]:
        require("parameters", self._parameters, bool(self._parameters), "at least one tensor")
        for p in self._parameters:
            require("parameters", p.dtype, p.dtype.is_floating_point, "floating-point tensors")
        return integer("period", period, 1), integer("warmup_steps", warmup_steps, 0)

    @property
    def is_synchronised(self) -> bool:
        """True unless there were local steps since the last averaging, in which case each rank has its own weights."""
        return self.steps <= self.warmup_steps or self._is_due()

    def _is_due(self) -> bool:
        local = self.steps - self.warmup_steps
        return local > 0 and local % self.period == 0

    def _check_settings_agree(self) -> None:
        """Compares the ranks' settings, once and after a load."""
        if not self._is_compared:
            settings: dict[str, Any] = {"period": self.period, "warmup_steps": self.warmup_steps, "steps": self.steps}
            settings["parameters"] = [(tuple(p.shape), p.dtype) for p in self._parameters]
            check_settings_agree(self.process_group, "PeriodicAverager", settings)
            self._is_compared = True

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Replaces every parameter by its mean over the ranks, bitwise equal on all of them. Collective."""
        self._check_settings_agree()
        whole = [p.detach() for p in self._parameters]
        flat = [p if p.is_contiguous() else p.contiguous() for p in whole]
        self.process_group.all_reduce(flat, "avg")
        for p, mean in zip(whole, flat, strict=True):
            if mean is not p:
                p.copy_(mean)

    def step(self) -> bool:
        """Counts a step of the optimizer, and at every `period`-th one averages. Returns True if it did. Collective."""
        self._check_settings_agree()
        self.steps += 1
        due = self._is_due()
        if due:
            self.average_parameters()
        return due

    def state_dict(self) -> dict[str, int]:
        """Returns the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the number of steps, on every rank the same, which the next step compares."""
        self.steps, self._is_compared = integer("steps", state_dict.get("steps"), 0), False


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps with `optimizer`, then lets the averager count the step and average the weights when it is time to.

    It shares groups and state with `optimizer`, so that learning-rate schedulers take either. Groups are fixed, as the
    averager's parameters are. Every rank must make the same steps.
    """

    step_needs = StepNeeds(wholes=False, averages="weights")  # `optimizer` tells in its own step if it needs wholes

    def __init__(self, optimizer: torch.optim.Optimizer, averager: Averager) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"optimizer: got {type(optimizer).__name__}; needs a torch.optim.Optimizer")
        if not hasattr(averager, "step"):
            raise ConfigurationError(f"averager: got {type(averager).__name__}; needs a PeriodicAverager")
        if isinstance(averager, PeriodicAverager) and hasattr(optimizer, "owned_weights"):
            raise ConfigurationError(
                "optimizer: got a ZeroOptimizer, whose weights lie in slices; needs one of torch.optim, or "
                "mpidl.optim.DiLoCo over a ZeroOptimizer of a node"
            )
        self.optimizer, self.averager = optimizer, averager
        self._building = True
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._building = False
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigurationError: groups are fixed at construction."""
        if not self._building:
            raise ConfigurationError("add_param_group: the averager would not see the parameters; make both anew")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps with the optimizer, then with the averager. Returns what the optimizer's step does."""
        loss = self.optimizer.step(closure)
        self.averager.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the optimizer's zero_grad."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, and under "averager" the averager's."""
        return {**self.optimizer.state_dict(), _AVERAGER: self.averager.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of both. A plain optimizer's state goes to `self.optimizer.load_state_dict`."""
        if _AVERAGER not in state_dict:
            raise ConfigurationError(
                f"load_state_dict: got {sorted(state_dict)}; lacks {_AVERAGER!r} (a plain optimizer's state goes to "
                "its own load_state_dict, as `.optimizer`)"
            )
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != _AVERAGER})
        self.averager.load_state_dict(state_dict[_AVERAGER])
        self._share()


class PostLocalSGDState:
    """State of `post_local_sgd_hook`, which ends the averaging of gradients over all ranks.

    process_group: all ranks' Communicator; None: the world.
    start_step: the first step whose gradients are not averaged over all ranks; by default the averager's warmup_steps.
    local_group: the Communicator of the ranks that go on averaging theirs, those of a node, say; None: each rank keeps
        its own.
    averager: counts the steps. Without it backward passes are counted: a pass whose step a GradScaler skips, or a
        second reduced pass of a step, then ends the averaging of gradients before that of weights begins.

    steps: of the averager; else backward passes whose buckets have all been reduced.

    Making one is collective. Raises ConfigurationError on every rank for neither of start_step and averager, and for a
    start_step that is not the averager's; ModelMismatch where the ranks' start_step differ.
    """

    needs_every_rank = leaves_gradients_local = True

    def __init__(
        self,
        process_group: Communicator | None,
        start_step: int | None = None,
        local_group: Communicator | None = None,
        *,
        averager: Averager | None = None,
    ) -> None:
        self.process_group = data_group("PostLocalSGDState", process_group, needed=_GROUP)
        self.start_step = check_everywhere(self.process_group, lambda: self._checked_arguments(start_step, averager))
        check_settings_agree(self.process_group, "PostLocalSGDState", {"start_step": self.start_step})
        self.local_group, self._averager = local_group, averager
        self._passes = 0

    def _checked_arguments(self, start_step: int | None, averager: Averager | None) -> int:
        if averager is not None:
            fits = all(hasattr(averager, name) for name in ("warmup_steps", "steps"))
            require("averager", type(averager).__name__, fits, "a PeriodicAverager, or a DiLoCo's averager")
            warmup = averager.warmup_steps
            require("start_step", start_step, start_step in (None, warmup), f"the averager's warmup_steps, {warmup}")
            start_step = warmup
        return integer("start_step", start_step, 0)

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far; of backward passes where there is no averager."""
        return self._passes if self._averager is None else self._averager.steps

    def count_pass(self) -> None:
        """Counts a backward pass."""
        self._passes += 1

    def state_dict(self) -> dict[str, int]:
        """Returns the number of backward passes that have ended."""
        return {"steps": self._passes}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Sets the number of backward passes; steps are in the averager's state."""
        self._passes = integer("steps", state_dict.get("steps"), 0)


def post_local_sgd_hook(state: PostLocalSGDState, bucket: GradBucket) -> Handle:
    """DDP's communication hook: averages a bucket over all ranks before `start_step`, over the local group later.

    Raises ConfigurationError where the wrapper averages over other ranks than the state's.
    """
    bucket.refuse_other_ranks("PostLocalSGDState", state.process_group)
    group = state.process_group if state.steps < state.start_step else state.local_group
    if bucket.is_last():
        state.count_pass()
    if group is None:
        return completed()
    return allreduce(group, bucket)
