"""Parameters that were frozen when the shards were cut, and are to train from now on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from ..errors import ConfigurationError
from .arguments import parameters_of
from .shards import ParameterShard


def added_group(
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


def thawed(
    shards: Sequence[ParameterShard],
    parameters: Sequence[torch.nn.Parameter],
    names_of: Callable[[Iterable[torch.nn.Parameter]], list[str]],
) -> list[ParameterShard]:
    """Stage 3's frozen shards that hold these parameters, from here on trained; refused if they hold others too."""
    wanted = set(parameters)
    chosen = [shard for shard in shards if wanted & set(shard.parameters)]
    for shard in chosen:
        left = [p for p in shard.parameters if p not in wanted]
        if left:
            raise ConfigurationError(
                f"add_param_group: stage 3 has cut {', '.join(names_of(shard.parameters)[:5])} over the ranks as one "
                f"piece, of which {', '.join(names_of(left)[:5])} would stay frozen; unfreeze them together, make a "
                "module a unit of its own (units=), or use stage 1 or 2"
            )
    for shard in chosen:
        shard.trains = True
    return chosen
