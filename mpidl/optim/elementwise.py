"""Which parts of an optimizer's state have an element for each of the parameter's, and so are cut as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})  # that torch's optimizers keep, one for a whole parameter

_ALIKE = "_mpidl_alike"


def elementwise(states: Iterable[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
    """Their names. states: of each parameter its shape and what is kept of it.

    A parameter of no dimensions cannot tell a number, such as the count of steps, from its one element. The others
    tell; where all are of none, what torch calls its numbers.
    """
    found: dict[str, bool] = {}
    unsure: set[str] = set()
    for shape, entry in states:
        for key, value in entry.items():
            if not shape:
                unsure.add(key)
            elif torch.is_tensor(value):
                found[key] = found.get(key, False) or tuple(value.shape) == tuple(shape)
    return {key for key, cut in found.items() if cut} | (unsure - found.keys() - _NUMBERS)


def alike(value: Any) -> Any:
    """A state that is whole on every rank, marked, as a tensor may have the shape of a slice by accident."""
    if torch.is_tensor(value):
        setattr(value, _ALIKE, True)
    return value


def is_slice(value: Any, of: torch.Tensor) -> bool:
    """Whether a state is cut as the slice `of` is, or, if that is whole, has an element for each of its."""
    return torch.is_tensor(value) and value.shape == of.shape and not hasattr(value, _ALIKE)
