"""Checks of arguments that every engine takes, each with an error that says what was given and what is needed."""

from __future__ import annotations

from typing import Any

import torch

from collectives import Communicator

from .errors import ConfigurationError


def communicator(given: Any) -> Communicator | None:
    """Checks `process_group`; returns a Communicator, or None for the world."""
    if given is not None and not isinstance(given, Communicator):
        raise ConfigurationError(f"process_group: got {type(given).__name__}; needs a collectives.Communicator")
    return given


def refuse_lazy(what: str, model: torch.nn.Module) -> None:
    """Raises ConfigurationError if a parameter has no shape yet. what: the argument that the model is."""
    for name, p in model.named_parameters():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ConfigurationError(f"{what}: {name} has no shape yet; run a forward pass of the lazy module first")


def flag(name: str, value: Any) -> bool:
    """Returns the value as a bool, if it is one."""
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ConfigurationError(f"{name}: got {value!r}; needs True or False")
    return bool(value)
