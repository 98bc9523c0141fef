"""Reduction of expert gradients: summed over edp, divided by the number of all ranks of dp x cp.

    dp = 4, ep = 2    rank 0: experts A   rank 1: experts B   rank 2: experts A   rank 3: experts B
    tokens of         ranks 0, 1          ranks 0, 1          ranks 2, 3          ranks 2, 3       by all-to-all

A rank's gradient of its experts is a sum over the tokens of ep ranks, each with the loss of its own rank. So the mean
over all losses is the mean over edp, divided by ep. Each contribution is divided as it arrives, before it is
accumulated: the factor holds in every engine, for passes under no_sync, and on a single rank of edp.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..errors import ConfigurationError
from .groups import checked_mesh, data_group
from .mesh import Mesh
from .placement import placement

_engines: weakref.WeakKeyDictionary[Mesh, set[bool]] = weakref.WeakKeyDictionary()  # of experts, and of the rest


def gradient_group(
    what: str,
    process_group: Communicator | None,
    mesh: Mesh | None,
    model: Any,
    needed: str = "mesh= or process_group=",
) -> tuple[Communicator, int]:
    """The Communicator over which an engine averages a model's gradients, and the divisor of each contribution.

    That of edp and ep for a model whose parameters that train are all experts; else as `data_group`, and 1.

    what: whose arguments these are.
    needed: what to give in place of the world.

    Collective over dp x cp where the mesh has experts, and a ConfigurationError on every rank of it where the ranks'
    models call for different groups.
    """
    mesh = checked_mesh(what, process_group, mesh)
    if mesh is None or mesh.size("ep") == 1:
        return data_group(what, process_group, mesh, needed=needed), 1
    data, chosen = data_group(what, None, mesh), -1  # what is no module is an error of the engine's own checks
    if isinstance(model, torch.nn.Module):
        trained = [p for p in model.parameters() if p.requires_grad]
        chosen = bool(trained) and all("ep" in placement(p).axes for p in trained)
    choices = np.empty(data.size, np.int64)
    data.all_gather(choices, np.array([chosen], np.int64))
    if -1 not in choices and len(set(choices.tolist())) > 1:
        ranks = ", ".join(str(rank) for rank, each in enumerate(choices) if each)
        raise ConfigurationError(
            f"{what}: model: on rank {ranks} of dp x cp all parameters that train are placed on ep, and on the others "
            "not; needs the same placements on every rank"
        )
    return (mesh.along("edp"), mesh.size("ep")) if (choices == 1).all() else (data, 1)


def refuse_experts(mesh: Mesh, divisor: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for experts in an engine that works over dp x cp.

    divisor: as above.
    named: all parameters of the engine, those that are frozen too, as it makes them the same on its ranks.
    """
    for name, p in named:
        if divisor == 1 and mesh.size("ep") > 1 and "ep" in placement(p).axes:
            why = "its gradient is to be averaged over edp, and others are over dp x cp"
            if not p.requires_grad:
                why = "each rank of ep has another one, which rank 0's would replace"
            raise ConfigurationError(
                f"model: {name} is placed on ep, so {why}; needs an engine of its own for a module of experts alone, "
                "with the same mesh="
            )


def problem_of_others(divisor: int, named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Says which parameter is none of experts, in an engine that averages over edp. named: those that train."""
    for name, p in named if divisor > 1 else ():
        if "ep" not in placement(p).axes:
            return (
                f"model: {name} is not placed on ep, and trains in an engine of experts, which averages over edp and "
                f"divides by ep={divisor}; needs an engine of its own for the rest of the model, with the same mesh="
            )
    return None


def refuse_others(divisor: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for that. The arguments are those of `problem_of_others`."""
    problem = problem_of_others(divisor, named)
    if problem is not None:
        raise ConfigurationError(problem)


def note_engine(mesh: Mesh | None, divisor: int) -> None:
    """Notes that an engine was made over the mesh, as on all its ranks. divisor: as above."""
    if mesh is not None and mesh.size("ep") > 1:
        _engines.setdefault(mesh, set()).add(divisor > 1)


def refuse_norm_of_one(mesh: Mesh, divisor: int) -> None:
    """Raises ConfigurationError where engines of experts and of the rest were made, for the norm of one of them."""
    if len(_engines.get(mesh, ())) > 1:
        own, other = ("experts", "the rest") if divisor > 1 else ("the part that is no expert", "experts")
        raise ConfigurationError(
            f"clip_grad_norm_: this ZeroOptimizer has {own} of the model alone, and another engine {other}; needs "
            "mpidl.clip_grad_norm_(parameters, max_norm, mesh=mesh), with the parameters of both"
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
