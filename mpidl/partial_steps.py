"""Runs the step of a torch optimizer on some of its parameters at a time, for steps within the backward pass.

They change these parameters as one step on all of them would. Values that a step has put elsewhere are brought back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

STEP_NOT_CALLED = (
    "step_in_backward: the last backward pass has made a step, and optimizer.step() was not called after it; call it "
    "after each, and accumulate gradients, or make several backward passes, under no_sync()"
)
STEP_INSIDE = "step() inside a backward pass, which has not reduced all gradients yet: step after it"
NOT_REDUCED = (
    "the gradients of backward passes under no_sync() have not been reduced; run the last pass of a step outside "
    "of it, or call zero_grad()"
)
_PARTIAL = "_mpidl_steps_on_some"  # attribute of an optimizer
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class PartialSteps:
    """Makes steps of an optimizer on some of its parameters.

    optimizer: whose state and groups' settings are used, as they are at each step. It must step on each parameter by
    itself, and keep only a state of each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: dict[torch.Tensor, int] = {}

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Steps on these, of those that have a gradient. Hooks of the optimizer's own `step` are not called."""
        groups = self._optimizer.param_groups
        chosen: dict[int, list[torch.Tensor]] = {}
        for p in parameters:
            if p not in self._groups:
                self._groups = {p: number for number, group in enumerate(groups) for p in group["params"]}
            chosen.setdefault(self._groups[p], []).append(p)
        if chosen:
            narrowed = [{**groups[number], "params": some} for number, some in sorted(chosen.items())]
            _of_groups(self._optimizer, narrowed).step()


def _of_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Copies an optimizer with other groups, and without hooks, such as those of learning-rate schedulers."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)
    made.__dict__.update({name: OrderedDict() for name in _HOOKS}, param_groups=groups)
    setattr(made, _PARTIAL, True)
    return made


def is_partial(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the step is one of `PartialSteps`."""
    return hasattr(optimizer, _PARTIAL)


def bring_back(parameter: torch.Tensor, place: torch.Tensor) -> None:
    """Copies values that an optimizer has put elsewhere, as by `p.data = ...`, to their place, where they lie again."""
    if parameter.data_ptr() != place.data_ptr() and place.numel():
        place.copy_(parameter.detach())
        parameter.data = place
