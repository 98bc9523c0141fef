"""Refuses torch's GradScaler for parameters of which ranks hold different parts, as it decides on each rank alone.

    parts over tp, stages of pp, experts of ep     one rank skips a step, and halves its scale, and the others do not
    the `.grad` of a ZeroOptimizer                 answers for all ranks of dp, cp and tp, but not of pp and ep

The placement tells which parameters these are. Without a declared placement, as in a stage that declares nothing, a
parameter is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from ..errors import ConfigurationError
from ..trained_by import trainer_of
from .placement import part_axes


@cache
def refuse_torchs_scaler(open_axes: Callable[[], frozenset[str]]) -> None:
    """Has every step of torch's GradScaler checked. open_axes: returns the axes over which there are parts now."""
    torch.amp.GradScaler.step = _checked(torch.amp.GradScaler.step, open_axes)  # type: ignore[method-assign]


def _checked(step: Any, open_axes: Callable[[], frozenset[str]]) -> Any:
    """Wraps GradScaler.step: when it skips an optimizer's step, no hook runs."""

    @wraps(step)
    def checked(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if type(scaler).__module__.startswith("torch.") and scaler.is_enabled():
            axes = open_axes()
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            for axis in sorted(set().union(*(_decided_by_parts(p) & axes for p in parameters))):
                raise ConfigurationError(
                    f"GradScaler: torch's decides on each rank by its gradients, and {type(optimizer).__name__} has "
                    f"parameters of which each rank of {axis} holds other elements; needs mpidl.GradScaler(mesh=mesh)"
                )
        return step(scaler, optimizer, *args, **kwargs)

    return checked


def _decided_by_parts(p: torch.Tensor) -> frozenset[str]:
    """The axes along which the answer of the parameter's gradient is that of a part."""
    return part_axes(p) if trainer_of(p) is None else part_axes(p) - {"tp"}
