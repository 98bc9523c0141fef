"""Checks that saved optimizer states fit the optimizer, by comparison with its states of a small parameter.

Optimizers make their states in the first step, so that a new one has none to compare with. They use any value
that they find: a text in place of a moment would be loaded without an error and fail in a later step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from ..optim.elementwise_state import saved_state
from . import json_encoding
from .engine import Engine
from .held_tensor import HeldTensor
from .index import Index
from .json_encoding import Malformed, check_at
from .schema import SLICES
from .stateful_checks import count_check


class KeptStates:
    """The states that the optimizer keeps of each parameter, as far as that is known.

    settings: the saved ones of its groups, encoded.
    """

    def __init__(self, engine: Engine, index: Index, settings: list[Any]) -> None:
        self._engine, self._index = engine, index
        assert engine.optimizer is not None
        self._class = engine.optimizer_type
        kinds = [kind for kind in self._class.__mro__ if kind is not torch.optim.Optimizer]
        self._counts_steps = any(kind.__module__.startswith(("torch.optim.", "mpidl.")) for kind in kinds)
        self._can_be_tried = _can_be_tried(self._class)
        self._settings: dict[torch.Tensor, tuple[int, Any]] = {}
        for number, group in enumerate(engine.optimizer.param_groups):
            kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            kept |= _plain(settings[number])
            self._refuse_settings(number, kept)
            self._settings |= dict.fromkeys(group["params"], (number, kept))
        self._tried: dict[tuple[int, int], dict[str, Any]] = {}

    def _refuse_settings(self, number: int, settings: Mapping[str, Any]) -> None:
        """Raises CheckpointError for settings of a group that the class refuses."""
        if not self._can_be_tried:
            return
        accepted = inspect.signature(self._class).parameters
        given = {key: value for key, value in settings.items() if key in accepted}
        try:
            self._class([torch.nn.Parameter(torch.zeros(2))], **given)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._index.file}: optimizer.groups.{number}: {error}") from None

    def check(self, held: HeldTensor, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError for saved states of a parameter that the optimizer does not keep."""
        wanted = self._of_a_step(held)
        problem = next((f"lacks {key}" for key in wanted if key not in saved), None)
        for key, value in (wanted or self._there(held)).items():
            if key in saved and not self._fits(held, saved[key], value):
                problem = f"{key} is {json_encoding.shown(saved[key])}, which {self._class.__name__} does not keep"
        if problem is None and self._counts_steps and json_encoding.kind_of(saved.get("step", 0)) == "number":
            try:
                check_at("step", count_check, saved.get("step", 0))
            except Malformed as error:
                problem = str(error)
        if problem:
            raise CheckpointError(f"{self._index.file}: optimizer.state of {held.name}: {problem}")

    def _of_a_step(self, held: HeldTensor) -> dict[str, Any]:
        """Returns the states that the class keeps after a step; none if it cannot be tried, or if the step fails."""
        if held.parameter is None or not self._can_be_tried:
            return {}
        number, settings = self._settings[held.parameter]
        dims = len(held.shape)
        if (number, dims) not in self._tried:
            self._tried[number, dims] = _kept(self._class, settings, dims)
        return self._tried[number, dims]

    def _there(self, held: HeldTensor) -> dict[str, Any]:
        """Returns the states that the optimizer holds of the parameter now."""
        kept: Any = self._engine.optimizer
        return dict(saved_state(kept).get(held.key, {}))

    def _fits(self, held: HeldTensor, saved: Any, value: Any) -> bool:
        tag = json_encoding.tag_of(saved)
        if isinstance(value, torch.Tensor):
            if tag == "$tensor" and value.dim() and tuple(value.shape) == _small(len(held.shape)):
                return self._index.tensors[saved[tag]].shape == held.shape
            return saved == SLICES or tag in ("$tensor", "$scalar")
        return value is None or isinstance(saved, int | float) or not isinstance(value, int | float)


def _can_be_tried(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Returns whether a step here shows what the class keeps: torch's and this package's without a process group."""
    known = optimizer_class.__module__.startswith(("torch.optim.", "mpidl.optim."))
    return known and "process_group" not in inspect.signature(optimizer_class).parameters


def _kept(optimizer_class: Any, settings: Mapping[str, Any], dims: int) -> dict[str, Any]:
    p = torch.nn.Parameter(torch.zeros(_small(dims)))
    p.grad = torch.ones_like(p)
    try:
        made = optimizer_class([{**settings, "params": [p]}])
        made.step()
    except Exception:  # it needs more than a gradient, such as a closure
        return {}
    return dict(saved_state(made)[p])


def _small(dims: int) -> tuple[int, ...]:
    """Returns a shape whose sizes all differ, so that a transposed state is recognised."""
    return tuple(range(2, 2 + dims))


def _plain(settings: Any) -> dict[str, Any]:
    """Decodes a group's settings, except those that are tensors in files."""
    return {
        key: json_encoding.decode(value, _none) for key, value in settings.items() if not json_encoding.names_in(value)
    }


def _none(name: str) -> torch.Tensor:
    raise KeyError(name)
