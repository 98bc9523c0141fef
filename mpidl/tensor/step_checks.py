"""Refuses steps that need whole parameters on the parts that a rank of tp has, which would go wrong silently.

    AdamW, SGD, ...     a step on a parameter is one on its parts
    LARS, LAMB          add up their norms over tp: mpidl.optim, with mesh=
    Muon, Adafactor     refused; ZeroOptimizer brings the parts together for them
    LBFGS               refused: it depends on several parameters at once
    1-bit optimizers    refused: a rank would freeze v, and scale what it sends, by its parts
    torch's GradScaler  refused: a rank would skip a step by itself, by its parts

Torch tells of every optimizer's step before it begins, and each optimizer is checked in its first one:
`optimizer_trial.needs_of` knows what the step needs. Then its gradients are compared over tp (`same_gradients`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError
from ..job.phase import follow_steps
from ..mesh import placement
from ..mesh.mesh import open_meshes
from ..optimizer_trial import needs_of, try_steps_of
from ..partial_steps import is_partial
from ..trained_by import trainer_of
from .same_gradients import SameGradients

_SEEN = "_mpidl_refused_no_parts"  # attribute of an optimizer: of how many parameters
_COMPARED = "_mpidl_compared_over_tp"  # attribute of an optimizer: of how many parameters, and SameGradients

_live: weakref.WeakSet[Any] = weakref.WeakSet()  # each a TensorParallel


def watch_steps(tp: Any) -> None:
    """Has every optimizer looked at as its steps begin. tp: a TensorParallel, over whose mesh a model is cut."""
    _live.add(tp)
    _hook()
    follow_steps()


@cache
def _hook() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(optimizer))
    torch.amp.GradScaler.step = _checked(torch.amp.GradScaler.step)  # type: ignore[method-assign]


def _checked(step: Any) -> Any:
    """Wraps a GradScaler's step, which tells no hook that it skips an optimizer's."""

    @wraps(step)
    def checked(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if type(scaler).__module__.startswith("torch.") and scaler.is_enabled():
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            if any("tp" in placement(p).axes and trainer_of(p) is None for p in parameters):
                raise ConfigurationError(
                    f"GradScaler: torch's decides on each rank by its gradients, and {type(optimizer).__name__} has "
                    "parts of them, cut over tp; needs mpidl.GradScaler(mesh=mesh)"
                )
        return step(scaler, optimizer, *args, **kwargs)

    return checked


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    refuse_steps_on_parts(optimizer)
    if is_partial(optimizer):  # within a backward pass, in which nothing can be clipped
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    seen, compared = vars(optimizer).get(_COMPARED, (-1, None))
    if seen < count:
        compared = _compared(optimizer)
        setattr(optimizer, _COMPARED, (count, compared))
    if compared is not None:
        compared.compare(optimizer)


def _compared(optimizer: torch.optim.Optimizer) -> SameGradients | None:
    """Finds the mesh over which the optimizer's parameters are cut; None if there is none, or several."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    meshes = [mesh for mesh in open_meshes() if mesh.size("tp") > 1]
    for tp in _live:
        model = tp.model()
        if model is not None and tp.mesh in meshes and not own.isdisjoint(model.parameters()):
            return SameGradients(optimizer, tp.mesh, model.parameters())
    return SameGradients(optimizer, meshes[0], ()) if len(meshes) == 1 else None


def refuse_steps_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError, the same on every rank of tp, if a step on its parameters would go wrong."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if vars(optimizer).get(_SEEN, -1) < count:
        _refuse(optimizer)
        setattr(optimizer, _SEEN, count)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    if next(_parts(optimizer, optimizer.param_groups), None) is None:
        return
    needs = needs_of(type(optimizer), lambda: try_steps_of(optimizer))
    groups = [group for group in optimizer.param_groups if group.get("rule") not in needs.elementwise]
    part = next(_parts(optimizer, groups), None)
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


def _parts(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """The groups' parameters that are cut over tp, but those that the optimizer, a ZeroOptimizer, joins itself."""
    for group in groups:
        for p in group["params"]:
            if "tp" in placement(p).axes:
                trainer = trainer_of(p)
                if trainer is None or trainer.optimizer is not optimizer:
                    yield p
