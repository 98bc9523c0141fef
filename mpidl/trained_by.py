"""Attribute of each parameter that a ZeroOptimizer trains, by which other code finds that optimizer.

The optimizer alone holds the values and gradients of such a parameter, under whatever module it lies. Code that wraps,
compares or saves it, or clips or reads its gradient, looks it up here first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from .errors import ConfigurationError

_NOTE = "_mpidl_trained_by"


class Trainer:
    """A ZeroOptimizer, as noted on its parameters. A pickled parameter has none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._where = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer; None once it is gone, when the parameters' hooks and layout are still there."""
        return self._where()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def claim(parameter: torch.nn.Parameter, trainer: Trainer) -> None:
    """Notes that this ZeroOptimizer trains the parameter."""
    setattr(parameter, _NOTE, trainer)


def release(parameter: torch.nn.Parameter) -> None:
    """Notes that no ZeroOptimizer trains the parameter."""
    if hasattr(parameter, _NOTE):
        delattr(parameter, _NOTE)


def trainer_of(parameter: torch.Tensor) -> Trainer | None:
    """The ZeroOptimizer that trains a parameter."""
    found = getattr(parameter, _NOTE, None)
    return found if isinstance(found, Trainer) else None


def innermost(optimizer: Any) -> Any:
    """The optimizer whose groups a PostLocalSGDOptimizer or DiLoCo shares; another optimizer itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def trainer_of_model(model: torch.nn.Module) -> Trainer | None:
    """The ZeroOptimizer of the model; None for a part of another model that is trained, or for one that contains it."""
    _, trainer = _first_claimed(model)
    if trainer is not None and trainer.optimizer is not None and trainer.optimizer.model is not model:
        return None
    return trainer


def refuse_trained(what: str, model: torch.nn.Module) -> None:
    """Raises ConfigurationError if a ZeroOptimizer trains any part of the model. what: the argument that it is."""
    name, trainer = _first_claimed(model)
    if trainer is None:
        return
    if trainer.optimizer is not None:
        raise ConfigurationError(f"{what}: a ZeroOptimizer trains it already, or a part of it: {name}")
    raise ConfigurationError(
        f"{what}: {name} was laid out by a ZeroOptimizer that is gone, and its hooks are still there; call its "
        "unwrap() before it goes, or build the model anew and load what its model_state_dict() gave"
    )


def _first_claimed(model: torch.nn.Module) -> tuple[str, Trainer | None]:
    claimed = ((name, trainer_of(p)) for name, p in model.named_parameters())
    return next(((name, trainer) for name, trainer in claimed if trainer is not None), ("", None))
