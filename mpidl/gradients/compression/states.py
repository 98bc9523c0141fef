"""The state of a compressing reduction by names of parameters: steps, mean remainders, the compressor's states.

    {"method": "powersgd:4", "steps": 12, "remainders": {"w": mean of its shape}, "states": {"w": {"right": ...}}}

It is the same on every rank, and for any number of ranks. The mean arrays of a compressor (`Compressor.arrays`) are
among its states.

A checkpoint needs no rank to have all of it: it takes of each bucket's means what a rank writes
(`CompressedReduction.of_means`), and gives each rank its part of them (`OwnPart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.objects import all_gather_object
from .compressor import WAITING, Compressor
from .remainders import OwnPart, Rows

Names = Mapping[torch.nn.Parameter, str]


def state_by_name(
    compressor: Compressor,
    means: Mapping[torch.nn.Parameter, torch.Tensor],
    steps: int,
    names: Names,
    world: Communicator,
) -> dict[str, Any]:
    """Makes the state. Collective.

    means: of each parameter a row for the remainder, and one for each array; not copied.
    """
    states = _states(compressor, names, world)
    for p, name in names.items() if compressor.arrays else ():
        if p in means:
            rows = zip(compressor.arrays, means[p][1:], strict=True)
            states.setdefault(name, {}).update(rows)
    return {
        "method": compressor.name,
        "steps": steps,
        "remainders": {name: means[p][0] for p, name in names.items() if p in means},
        "states": states,
    }


def _states(compressor: Compressor, names: Names, world: Communicator) -> dict[str, dict[str, torch.Tensor]]:
    """The compressor's states by names, also those that only other ranks have. Collective.

    Those that were loaded wait on every rank; a rank that has taken them over has newer ones.
    """
    kept = compressor.state()
    states = {name: dict(kept[p]) for p, name in names.items() if p in kept}
    waiting = {name for name, state in states.items() if all(key.startswith(WAITING) for key in state)}
    for name, state in states.items():
        ordered = sorted(state, key=lambda key: key.startswith(WAITING))  # those that wait are for sections to come
        states[name] = {key.removeprefix(WAITING): state[key] for key in ordered}
    every = _of_all_ranks({name: state for name, state in states.items() if name not in waiting}, world)
    every = {**{name: states[name] for name in waiting}, **every}
    return {name: every[name] for name in names.values() if name in every}


def _of_all_ranks(own: dict[str, dict[str, torch.Tensor]], world: Communicator) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the states of the first rank that has any, by names. Collective."""
    having = all_gather_object(world, [*own])
    if all(found == having[0] for found in having):
        return own
    first = {name: rank for rank in reversed(range(world.size)) for name in having[rank]}
    mine = {name: state for name, state in own.items() if first[name] == world.rank}
    return {name: state for given in all_gather_object(world, mine) for name, state in given.items()}


def load_by_name(
    state_dict: Mapping[str, Any], compressor: Compressor, names: Names, feeds_back: bool
) -> dict[torch.nn.Parameter, Rows]:
    """Gives the compressor its states of what `state_by_name` made; returns the means, none without feedback.

    state_dict: its remainders may each be an `OwnPart`, which has the arrays too.

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
    means: dict[torch.nn.Parameter, Rows] = {}
    rows: dict[torch.nn.Parameter, list[torch.Tensor]] = {}  # whole ones
    for (name, row), mean in given.items():
        p, kind = by_name[name], ("remainder", *compressor.arrays)[row]
        if not isinstance(mean, OwnPart) and mean.shape != p.shape:
            raise ConfigurationError(
                f"load_state_dict: {name}: got a {kind} of shape {tuple(mean.shape)}; needs {tuple(p.shape)}"
            )
        if feeds_back and isinstance(mean, OwnPart):
            means[p] = mean
        elif feeds_back:
            rows[p] = rows.get(p) or [mean.new_zeros(()).expand(p.shape)] * (1 + len(compressor.arrays))
            rows[p][row] = mean.detach()
    compressor.load({by_name[name]: kept for name, kept in states.items() if kept})
    compressor.wait_for_sections()
    return {**means, **rows}
