"""Reduction of expert gradients: summed over edp, divided by the number of all ranks of dp x cp.

    dp = 4, ep = 2    rank 0: experts A   rank 1: experts B   rank 2: experts A   rank 3: experts B
    tokens of         ranks 0, 1          ranks 0, 1          ranks 2, 3          ranks 2, 3       by all-to-all

A rank's gradient of its experts is a sum over the tokens of ep ranks, each with the loss of its own rank. So the mean
over all losses is the mean over edp, divided by ep. Each contribution is divided as it arrives, before it is
accumulated: the factor holds in every engine, for passes under no_sync, and on a single rank of edp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError
from .groups import checked, data_group
from .mesh import Mesh
from .placement import placement


def gradient_group(
    what: str, process_group: Communicator | None, mesh: Mesh | None, model: Any
) -> tuple[Communicator, int]:
    """The Communicator over which an engine averages a model's gradients, and the divisor of each contribution.

    That of edp and ep for a model of experts alone; else as `data_group`, and 1.

    what: whose arguments these are.
    """
    mesh = checked(what, process_group, mesh)
    if mesh is None or not isinstance(model, torch.nn.Module):
        return data_group(what, process_group, mesh), 1
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and all("ep" in placement(p).axes for p in trained):
        return mesh.along("edp"), mesh.size("ep")
    return data_group(what, None, mesh), 1


def refuse_experts(mesh: Mesh, divisor: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for parameters whose gradients are not averaged over dp x cp. divisor: as above."""
    for name, p in named:
        if divisor == 1 and mesh.size("ep") > 1 and "ep" in placement(p).axes:
            raise ConfigurationError(
                f"model: {name} is placed on ep, so its gradient is to be averaged over edp, and others are over dp x "
                "cp; needs an engine of its own for a module of experts alone, with the same mesh="
            )


def divide_contributions(parameters: Iterable[torch.Tensor], divisor: int) -> list[Any]:
    """Registers hooks that divide every gradient of the parameters, and returns their handles."""
    return [] if divisor == 1 else [_hooked(p, lambda gradient: gradient / divisor) for p in parameters]


def _hooked(p: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Registers a hook, on a parameter that is frozen as well, which may train later."""
    trains = p.requires_grad
    p.requires_grad_(True)
    try:
        return p.register_hook(hook)
    finally:
        p.requires_grad_(trains)
