"""Checks of the settings of optimizers and samplers: each raises a ConfigurationError that names what is needed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from .errors import ConfigurationError


def require(name: str, value: Any, fits: bool, what: str) -> None:
    """Raises ConfigurationError unless `fits`."""
    if not fits:
        raise ConfigurationError(f"{name}: got {value!r}; needs {what}")


def integer(name: str, value: Any, least: int = 0) -> int:
    """Converts a value to an int. Raises ConfigurationError for one that is no integer or below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    require(name, value, number >= least, f"an integer of at least {least}")
    return number


def require_not_negative(settings: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigurationError unless these settings are numbers, or tensors of one, of at least 0."""
    for name in names:
        value = settings[name]
        fits = isinstance(value, float | int | torch.Tensor) and bool(value >= 0)
        require(name, value, fits, "a number of at least 0")


def require_betas(betas: Any) -> None:
    """Raises ConfigurationError unless these are the two betas of Adam."""
    fits = isinstance(betas, tuple | list) and len(betas) == 2
    fits = fits and all(isinstance(beta, Real | torch.Tensor) and 0 <= float(beta) < 1 for beta in betas)
    require("betas", betas, fits, "two numbers of at least 0 and below 1")
