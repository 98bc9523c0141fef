"""Adds parameters to the training that were frozen at construction."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from ...errors import ConfigurationError
from ...gradients.compression.refusals import refuse_complex
from ...job.agreement import check_everywhere
from ...replicas.start_check import check_settings_agree
from ..construction.arguments import parameters_of, refuse_trained_placements
from ..construction.build import slice_shards
from ..optimizer_parts import Parts
from ..stepping.optimizer_class import try_group
from .states import flush


def add_group(parts: Parts, param_group: dict[str, Any]) -> dict[str, Any]:
    """Lets a group's parameters train; returns the group with its parameters as a list. Collective.

    The settings of the new inner group are those of `param_group`. Raises, on every rank and before anything is
    changed, ConfigurationError and the class's own errors.
    """
    group = check_everywhere(parts.with_tp, lambda: _checked(parts.model, parts.slices, param_group))
    check_settings_agree(parts.with_tp, "add_param_group", {"params": parts.names_of(group["params"])})
    # The class's own errors, before anything is changed.
    check_everywhere(parts.with_tp, lambda: try_group(parts.prototype, group))
    check_everywhere(parts.with_tp, lambda: _check_needs(parts, group))
    flush(parts)
    shards = parts.parameters.unfreeze(group["params"], parts.names_of)
    parts.shard_reducer.add(shards)
    parts.trained.extend(group["params"])
    slice_shards(parts.shard_group, parts.offloaded, shards, parts.shards, parts.slices)
    parts.guard.watch(parts.slices)
    return group


def _check_needs(parts: Parts, group: dict[str, Any]) -> None:
    if parts.inner.updates_wholes:
        raise ConfigurationError(
            f"add_param_group: {type(parts.prototype).__name__} has laid its buckets out; give all that train "
            "at construction"
        )
    wholes = parts.find_needs([group]).wholes
    named = list(zip(parts.names_of(group["params"]), group["params"], strict=True))
    offloads = parts.offloaded is not None
    refuse_trained_placements(named, type(parts.prototype), parts.mesh, offloads, wholes, parts.divisor)
    if wholes and not parts.inner.needs_wholes:
        raise ConfigurationError(
            f"add_param_group: a step of {type(parts.prototype).__name__} with this group's settings needs whole "
            "parameters, and with the first groups' it did not: give a group like this one at construction"
        )
    if parts.compressed is not None:
        refuse_complex(dict(zip(group["params"], parts.names_of(group["params"]), strict=True)))


def _checked(
    model: torch.nn.Module, trained: Container[torch.nn.Parameter], param_group: dict[str, Any]
) -> dict[str, Any]:
    """The group with its parameters as a list. ConfigurationError unless they are the model's, unfrozen and new."""
    parameters = parameters_of(param_group, "add_param_group")
    names = {p: name for name, p in model.named_parameters()}
    if not parameters:
        raise ConfigurationError("add_param_group: got no parameters")
    for p in parameters:
        if p not in names:
            raise ConfigurationError(
                f"add_param_group: a tensor of shape {tuple(p.shape)} is no parameter of the model"
            )
        if p in trained:
            raise ConfigurationError(f"add_param_group: {names[p]} is in a group already")
        if not p.requires_grad:
            raise ConfigurationError(f"add_param_group: {names[p]} is frozen; call its requires_grad_() first")
    if len(set(parameters)) < len(parameters):
        raise ConfigurationError("add_param_group: a parameter is given twice")
    return {**param_group, "params": parameters}
