"""Base of LARS and LAMB, which scale each parameter's update by the ratio of the two norms.

    norms of all weights and updates, in one call -> a trust ratio a parameter -> weights -= lr * ratio * update

The one call, `squared_norms`, is all that sees whole parameters. An engine that holds slices of parameters replaces it
by one that adds up the squares over the ranks; the rest is elementwise and runs on slices as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError


def squared_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes the sum of squares of each tensor's elements: float64 [len(tensors)], on the CPU."""
    norms = []
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(tensor, dtype=wide).double())
    on_one_device = [norm.to(norms[0].device) for norm in norms]
    return torch.stack(on_one_device).cpu().square_() if norms else torch.zeros(0, dtype=torch.float64)


def squared_norms_over(comm: Communicator, slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes the sums of squares of tensors of which every rank holds a slice. Collective."""
    total = squared_norms(slices)
    comm.all_reduce(total)
    return total


class TrustRatioOptimizer(torch.optim.Optimizer):
    """Base of LARS and LAMB: checks of their settings, and the norms.

    squared_norms: takes tensors, returns their sums of squares as float64 on the CPU; called once a step with the same
        number of tensors on every rank, of which some may be empty. Engines that shard parameters replace it.
    """

    squared_norms: Callable[[Sequence[torch.Tensor]], torch.Tensor] = staticmethod(squared_norms)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after a check of its settings; settings that it lacks are the optimizer's."""
        settings = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            value = settings[name]
            fits = isinstance(value, float | int | torch.Tensor) and bool(value >= 0)
            require(name, value, fits, "a number of at least 0")
        require("trust", settings["trust"], isinstance(settings["trust"], bool), "True or False")
        self._check(settings)
        super().add_param_group(param_group)

    def _check(self, settings: dict[str, Any]) -> None:
        """Raises ConfigurationError for settings that the method cannot work with."""

    def _gradients(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the group's parameters with gradients, and these, negated under `maximize`."""
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if any(gradient.is_sparse for gradient in gradients):
            raise ConfigurationError(f"{type(self).__name__}: got a sparse gradient; needs dense ones")
        return parameters, list(torch._foreach_neg(gradients)) if group["maximize"] and gradients else gradients

    def _norms_of_pairs(
        self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
    ) -> list[tuple[float, float]]:
        """Computes the norms of two lists of equally many tensors, pair by pair."""
        if not first:
            return []
        squares = self.squared_norms([*first, *second]).tolist()
        norms = [math.sqrt(square) for square in squares]
        return list(zip(norms[: len(first)], norms[len(first) :], strict=True))


def require(name: str, value: Any, fits: bool, what: str) -> None:
    """Raises ConfigurationError unless `fits`."""
    if not fits:
        raise ConfigurationError(f"{name}: got {value!r}; needs {what}")


def integer(name: str, value: Any, least: int) -> int:
    """Converts a value to an int. Raises ConfigurationError for one that is no integer or below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    require(name, value, number >= least, f"an integer of at least {least}")
    return number
