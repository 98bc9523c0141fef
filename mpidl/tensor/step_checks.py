"""Refuses optimizers whose step needs whole parameters if a rank of tp holds parts: they would go wrong silently.

    AdamW, SGD, ...     a step on a parameter is one on its parts
    LARS, LAMB          add up their norms over tp: mpidl.optim, with mesh=
    Muon, Adafactor     refused; ZeroOptimizer brings the parts together for them
    LBFGS               refused: it depends on several parameters at once
    1-bit optimizers    refused: a rank would freeze v, and scale what it sends, by its parts

Torch tells of every optimizer's step before it begins, and each optimizer is checked in its first one:
`optimizer_trial.needs_of` knows what the step needs. Then its gradients are compared over tp (`same_gradients`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError
from ..job.phase import follow_steps
from ..mesh import Mesh, placement
from ..mesh.mesh import open_meshes
from ..optimizer_trial import needs_of, try_steps_of
from ..partial_steps import is_partial
from ..trained_by import trainer_of
from .same_gradients import SameGradients

_CHECKED_COUNT = "_mpidl_refused_no_parts"  # attribute of an optimizer: the number of parameters already checked
_GRADIENT_COMPARISON = "_mpidl_compared_over_tp"  # attribute of an optimizer: of how many parameters, and SameGradients

_tensor_parallels_alive: weakref.WeakSet[Any] = weakref.WeakSet()  # each a TensorParallel


def watch_steps(tp: Any) -> None:
    """Checks every optimizer of the process as its steps begin. tp: the TensorParallel of a cut model."""
    _tensor_parallels_alive.add(tp)
    _install_hooks()
    follow_steps()


@cache
def _install_hooks() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(optimizer))


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    refuse_steps_on_parts(optimizer)
    if is_partial(optimizer):  # within a backward pass, in which nothing can be clipped
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    seen, compared = vars(optimizer).get(_GRADIENT_COMPARISON, (-1, None))
    if seen < count:
        compared = _comparison_of(optimizer)
        setattr(optimizer, _GRADIENT_COMPARISON, (count, compared))
    if compared is not None:
        compared.compare(optimizer)


def _comparison_of(optimizer: torch.optim.Optimizer) -> SameGradients | None:
    """Finds the mesh over which the optimizer's parameters are cut; None if there is none, or several."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    meshes = [mesh for mesh in open_meshes() if mesh.size("tp") > 1]
    models: dict[Mesh, set[torch.Tensor]] = {}  # parameters of the cut models that the optimizer trains
    for tp in _tensor_parallels_alive:
        model = tp.model()
        if model is not None and tp.mesh in meshes and not own.isdisjoint(model.parameters()):
            models.setdefault(tp.mesh, set()).update(model.parameters())
    if not models and len(meshes) == 1:
        models = {meshes[0]: set()}
    # Over several meshes the ranks would have to compare in one order, and the order of `_tensor_parallels_alive` is
    # another one on each rank.
    return SameGradients(optimizer, *models.popitem()) if len(models) == 1 else None


def refuse_steps_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError, the same on every rank of tp, if a step on its parameters would go wrong."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if vars(optimizer).get(_CHECKED_COUNT, -1) < count:
        _refuse(optimizer)
        setattr(optimizer, _CHECKED_COUNT, count)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    if next(_cut_parameters_of(optimizer, optimizer.param_groups), None) is None:
        return
    needs = needs_of(type(optimizer), lambda: try_steps_of(optimizer))
    groups = [group for group in optimizer.param_groups if group.get("rule") not in needs.elementwise]
    part = next(_cut_parameters_of(optimizer, groups), None)
    if part is None:
        return
    name, shape = type(optimizer).__name__, tuple(part.shape)
    if needs.dependent:
        raise ConfigurationError(
            f"{name}: a step on a parameter depends on others, and one of shape {shape} is a part, cut over tp; needs "
            "an optimizer that updates each element by itself, such as AdamW"
        )
    if needs.wholes and needs.averages:  # ZeroOptimizer does not join parts for a step that sends by itself
        raise ConfigurationError(
            f"{name}: a step needs whole parameters, and one of shape {shape} is a part, cut over tp; needs a mesh "
            "without tp"
        )
    if needs.wholes:
        raise ConfigurationError(
            f"{name}: a step needs whole parameters, and one of shape {shape} is a part, cut over tp; needs "
            f"mpidl.ZeroOptimizer(model, {name}, stage=1, mesh=mesh, ...), which brings the parts together"
        )


def _cut_parameters_of(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """Yields the groups' parameters that are cut over tp, except those that a ZeroOptimizer joins itself."""
    for group in groups:
        for p in group["params"]:
            if "tp" in placement(p).axes:
                trainer = trainer_of(p)
                if trainer is None or trainer.optimizer is not optimizer:
                    yield p
