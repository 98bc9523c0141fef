"""Decides by an optimizer's class, before anything is changed, whether it steps on slices, on whole parameters, or not.

    AdamW, SGD, ...     a step on a parameter is one on its parts: each rank steps on its slices
    Muon, Adafactor     it needs whole parameters: `whole_steps`
    LBFGS               it depends on several parameters at once: refused

torch's classes are known by name, optimizers of mpidl declare what they need, and any other class is tried out on a few
elements (`optimizer_trial.needs_of`). A new optimizer declares `step_needs` in its class (`mpidl.optim` says how);
nothing changes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ConfigurationError
from ...optim.trust_ratio import TrustRatioOptimizer
from ...optimizer_trial import (
    DEPENDENT,
    NOT_SEQUENTIAL,
    ON_WHOLE_MODELS,
    StepNeeds,
    Trial,
    exchanges_gradients,
    needs_of,
    reason_of_changed_settings,
    try_steps,
    without_parameters,
)

_REFUSED = {**ON_WHOLE_MODELS, "SparseAdam": "it takes sparse gradients, and buckets are dense"}


def refuse_class(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """ConfigurationError for one that cannot be sharded, and is known."""
    for base in optimizer_class.__mro__:
        if base.__name__ in _REFUSED:
            named = optimizer_class.__name__ + ("" if base is optimizer_class else f", a kind of {base.__name__},")
            raise ConfigurationError(f"optimizer_class: {named} cannot be sharded: {_REFUSED[base.__name__]}")


def prototype(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of that class with those groups' settings, on single elements of as many dimensions.

    It refuses wrong settings, and parameters, by the class's own errors, before the model is changed.
    """
    given = [_on_single_elements(group) for group in groups]
    sizes = [len(group["params"]) for group in given]
    made = optimizer_class(given, **settings)
    if [len(group["params"]) for group in made.param_groups] != sizes:
        raise ConfigurationError(
            f"optimizer_class: {optimizer_class.__name__} makes {len(made.param_groups)} groups of the {len(sizes)} "
            "that it is given; needs a class that keeps them: make its groups yourself, by params="
        )
    for group in made.param_groups:
        _refuse_differentiable(group)
    return made


def find_needs(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    offloaded: bool,
    step_in_backward: bool = False,
) -> StepNeeds:
    """The needs of a step: no wholes, if a step on a parameter is one on its parts.

    Raises ConfigurationError if it depends on other parameters too.

    offloaded: refuses what needs whole parameters, and what notes anything in its groups, since each sub-group has an
        optimizer of its own.
    step_in_backward: refuses these too, and what else does not step on one parameter after another.
    """
    name = optimizer_class.__name__
    if step_in_backward:
        if offloaded:
            raise ConfigurationError(
                "step_in_backward: what is offloaded is stepped in an order of its own, after the pass"
            )
        if issubclass(optimizer_class, TrustRatioOptimizer):
            raise ConfigurationError(
                f"step_in_backward: {name} needs norms over all ranks' slices, for which a backward pass cannot wait"
            )
    if exchanges_gradients(optimizer_class):
        return StepNeeds(wholes=False)  # it has whole ones anyway
    found = needs_of(optimizer_class, lambda: try_steps(lambda given: optimizer_class(given, **settings), groups))
    noted = frozenset[str]()
    if found.dependent:
        raise ConfigurationError(f"optimizer_class: {name} cannot be sharded: a step on a parameter {DEPENDENT}")
    if step_in_backward and found.together:
        raise ConfigurationError(f"step_in_backward: {name} {NOT_SEQUENTIAL}")
    if isinstance(found, Trial):
        noted = found.noted
        found = StepNeeds(found.wholes or found.failed, together=True)  # it may note more than states
    if found.wholes and offloaded:
        raise ConfigurationError(
            f"offload: a step of {name} needs whole parameters, and what is offloaded are shards: needs offload=None"
        )
    if found.wholes and step_in_backward:
        raise ConfigurationError(
            f"step_in_backward: a step of {name} needs whole parameters, which are brought together after the pass"
        )
    if noted and step_in_backward:
        raise ConfigurationError(f"step_in_backward: {name} {reason_of_changed_settings(noted)}")
    if noted and offloaded:
        raise ConfigurationError(
            f"offload: {name} changes {', '.join(sorted(noted))} of its groups in a step, and offloaded state has one "
            f"{name} for each sub-group: needs offload=None"
        )
    return found


def try_group(made: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Adds a group to a prototype, which refuses wrong settings likewise."""
    _refuse_differentiable(group)
    made.add_param_group(_on_single_elements(group))


def _on_single_elements(group: Mapping[str, Any]) -> dict[str, Any]:
    dimensions = sorted({p.dim() for p in group["params"]})
    return {
        **group,
        "params": [torch.nn.Parameter(torch.zeros((1,) * number, dtype=torch.float32)) for number in dimensions],
    }


def _refuse_differentiable(group: Mapping[str, Any]) -> None:
    if group.get("differentiable"):
        raise ConfigurationError("differentiable: got True; autograd does not follow a step on shards: needs False")


def frozen(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a group's settings, tensors too, as an optimizer or a scheduler may change these in place."""
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in without_parameters(group).items()}
