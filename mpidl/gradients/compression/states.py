"""The state of a compressing reduction by names of parameters: steps, mean remainders, the compressor's states.

    {"method": "powersgd:4", "steps": 12, "remainders": {"w": mean of its shape}, "states": {"w": {"right": ...}}}

It is the same on every rank, and for any number of ranks. The mean arrays of a compressor (`Compressor.arrays`) are
among its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.objects import all_gather_object
from .compressor import Compressor

Names = Mapping[torch.nn.Parameter, str]


def state_by_name(
    compressor: Compressor,
    means: Mapping[torch.nn.Parameter, torch.Tensor],
    steps: int,
    names: Names,
    world: Communicator,
) -> dict[str, Any]:
    """Makes the state. Collective. means: of each parameter a row for the remainder, and one for each array."""
    states = _states(compressor, names, world)
    for p, name in names.items() if compressor.arrays else ():
        if p in means:
            rows = zip(compressor.arrays, means[p][1:], strict=True)
            states.setdefault(name, {}).update({array: row.view(p.shape).clone() for array, row in rows})
    return {
        "method": compressor.name,
        "steps": steps,
        "remainders": {name: means[p][0].view(p.shape).clone() for p, name in names.items() if p in means},
        "states": states,
    }


def _states(compressor: Compressor, names: Names, world: Communicator) -> dict[str, dict[str, torch.Tensor]]:
    """The compressor's states by names, also those that only other ranks have. Collective."""
    kept = compressor.state()
    own = {name: dict(kept[p]) for p, name in names.items() if p in kept}
    having = all_gather_object(world, [*own])
    if all(found == having[0] for found in having):
        return own
    first = {name: rank for rank in reversed(range(world.size)) for name in having[rank]}
    mine = {name: state for name, state in own.items() if first[name] == world.rank}
    every = {name: state for given in all_gather_object(world, mine) for name, state in given.items()}
    return {name: every[name] for name in names.values() if name in every}


def load_by_name(
    state_dict: Mapping[str, Any], compressor: Compressor, names: Names, feeds_back: bool
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gives the compressor its states of what `state_by_name` made; returns the means, none without feedback.

    States of another method are left out: its remainders are taken over, as they are gradients.
    Raises ConfigurationError for names or shapes of other parameters, before anything changes.
    """
    by_name = {name: p for p, name in names.items()}
    for kind in ("remainders", "states"):
        unknown = sorted(set(state_dict[kind]) - set(by_name))
        if unknown:
            raise ConfigurationError(f"load_state_dict: {kind}: got {unknown[0]}, which is no parameter")
    is_own = state_dict["method"] == compressor.name
    states = {name: dict(kept) for name, kept in state_dict["states"].items()} if is_own else {}
    given = {(name, 0): mean for name, mean in state_dict["remainders"].items()}
    for row, array in enumerate(compressor.arrays, start=1):
        given |= {(name, row): kept.pop(array) for name, kept in states.items() if array in kept}
    means: dict[torch.nn.Parameter, torch.Tensor] = {}
    for (name, row), mean in given.items():
        p, kind = by_name[name], ("remainder", *compressor.arrays)[row]
        if mean.shape != p.shape:
            raise ConfigurationError(
                f"load_state_dict: {name}: got a {kind} of shape {tuple(mean.shape)}; needs {tuple(p.shape)}"
            )
        if feeds_back:
            rows = means.setdefault(p, torch.zeros(1 + len(compressor.arrays), p.numel()))
            rows[row] = mean.detach().reshape(-1)
    compressor.load({by_name[name]: kept for name, kept in states.items() if kept})
    return means
