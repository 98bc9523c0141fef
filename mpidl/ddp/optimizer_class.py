"""Decides whether an optimizer can step on one bucket after another, as steps within the backward pass do.

    AdamW, SGD, Muon, LAMB, ...     a step on a parameter depends on that parameter alone
    LBFGS                           it works on the whole model's gradient at once: refused

`optimizer_trial.needs_of` tells what a step needs: as its class declares, from a table for classes of torch, or by
trial steps on a few elements. `zero.stepping.optimizer_class` decides for ZeRO, `tensor.step_checks` for steps on parts
of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..digest import digest
from ..errors import ConfigurationError, ConfigurationTypeError
from ..optimizer_trial import (
    DEPENDENT,
    NOT_SEQUENTIAL,
    ON_WHOLE_MODELS,
    Trial,
    averaged_by_step,
    needs_of,
    reason_of_changed_settings,
    try_steps_of,
)
from ..trained_by import trainer_of

# Why an optimizer is refused whose step averages something itself, by `StepNeeds.averages`.
_AVERAGING = {
    "gradients": "cannot step on a bucket: it exchanges all gradients at once",
    "weights": "cannot step on a bucket: it counts steps and averages weights in some; give step_in_backward the "
    "optimizer that it wraps",
    "factors": "with process_group= averages factors of all matrices at once; step after the pass",
}


def check(
    optimizers: Sequence[Any], names: Mapping[torch.nn.Parameter, str], ignored: Collection[torch.nn.Parameter]
) -> None:
    """Raises ConfigurationError for what cannot step within the passes of a module.

    names: of the parameters whose gradients the module's passes average.
    ignored: its other ones.
    """
    from ..tensor.step_checks import refuse_steps_on_parts  # with all of tensor parallelism, which few programs use

    seen: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationTypeError(
                f"step_in_backward: got {type(optimizer).__name__}; needs optimizers of torch.optim's kind"
            )
        _check_class(optimizer)
        refuse_steps_on_parts(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p not in names:
                whose = "is in parameters_to_ignore" if p in ignored else "is none of the module's"
                raise ConfigurationError(
                    f"step_in_backward: {type(optimizer).__name__} has a parameter of shape {tuple(p.shape)} that "
                    f"{whose}, so that its passes do not average the gradient; give it an optimizer of its own"
                )
            if p in seen:
                twice = "twice" if seen[p] is optimizer else "in two optimizers"
                raise ConfigurationError(f"step_in_backward: got {names[p]} {twice}; needs each parameter once")
            seen[p] = optimizer


def settings_to_compare(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.nn.Parameter, str]
) -> dict[str, str]:
    """The arguments that must be equal on all ranks, by optimizer: its class, and its parameters."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        given = [names[p] for group in optimizer.param_groups for p in group["params"]]
        found[f"optimizer {number}"] = (
            f"{type(optimizer).__name__} of {len(given)} parameters, {digest(repr(given)).hex()}"
        )
    return found


def _check_class(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__name__ in ON_WHOLE_MODELS:
            why = ON_WHOLE_MODELS[base.__name__]
            raise ConfigurationError(f"step_in_backward: {name} cannot step on a bucket: {why}")
    averaged = averaged_by_step(optimizer)
    if averaged:
        raise ConfigurationError(f"step_in_backward: {name} {_AVERAGING[averaged]}")
    if any(trainer_of(p) is not None for group in optimizer.param_groups for p in group["params"]):
        raise ConfigurationError("step_in_backward: a ZeroOptimizer trains the module; it has step_in_backward=True")
    mesh = getattr(optimizer, "mesh", None)  # of LARS and LAMB
    if mesh is not None and mesh.size("tp") > 1:
        raise ConfigurationError(
            f"step_in_backward: {name} needs norms over tp, whose ranks have other buckets; step after the pass"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError(
            "step_in_backward: got differentiable=True; autograd does not follow a step within a backward pass"
        )
    needs = needs_of(type(optimizer), lambda: try_steps_of(optimizer), by_name=False)
    if isinstance(needs, Trial) and needs.failed:
        raise ConfigurationError(f"step_in_backward: {name} fails on a few elements, on which its steps were tried")
    if needs.dependent:
        raise ConfigurationError(f"step_in_backward: a step of {name} on a parameter {DEPENDENT}")
    if needs.together:
        raise ConfigurationError(f"step_in_backward: {name} {NOT_SEQUENTIAL}")
    if isinstance(needs, Trial) and needs.noted:
        raise ConfigurationError(f"step_in_backward: {name} {reason_of_changed_settings(needs.noted)}")
