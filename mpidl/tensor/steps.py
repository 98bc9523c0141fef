"""Refuses steps that need whole parameters on the parts that a rank of tp has, which would go wrong silently.

    AdamW, SGD, ...     a step on a parameter is one on its parts
    LARS, LAMB          add up their norms over tp: mpidl.optim, with mesh=
    Muon, Adafactor     refused; ZeroOptimizer brings the parts together for them
    LBFGS               refused: it depends on several parameters at once

Torch tells of every optimizer's step before it begins, and each optimizer is looked at in its first one. Of classes
that are not torch's nothing is known: they are tried out on a few elements.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError
from ..mesh import placement
from ..optimizer_trial import like, try_steps

_ON_WHOLES = ("Muon", "Adafactor")
_ON_ALL = ("LBFGS",)
_SEEN = "_mpidl_refused_no_parts"  # attribute of an optimizer: of how many parameters


@cache
def watch_steps() -> None:
    """Has every optimizer looked at before its first step, once and for all of the process."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: refuse_steps_on_parts(optimizer))


def refuse_steps_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError, the same on every rank of tp, if a step on its parameters would go wrong."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if vars(optimizer).get(_SEEN, -1) < count:
        _refuse(optimizer)
        setattr(optimizer, _SEEN, count)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    parts = (p for group in optimizer.param_groups for p in group["params"] if "tp" in placement(p).axes)
    part = next(parts, None)
    if part is None:
        return
    name, kinds = type(optimizer).__name__, {base.__name__ for base in type(optimizer).__mro__}
    package = type(optimizer).__module__.partition(".")[0]
    together, wholes = not kinds.isdisjoint(_ON_ALL), not kinds.isdisjoint(_ON_WHOLES)
    if package not in ("torch", __name__.partition(".")[0]):
        trial = try_steps(partial(like, optimizer), optimizer.param_groups)
        together, wholes = together or trial.together, wholes or (trial.wholes and not trial.failed)
    shape = tuple(part.shape)
    if together:
        raise ConfigurationError(
            f"{name}: a step on a parameter depends on others, and one of shape {shape} is a part, cut over tp; needs "
            "an optimizer that updates each element by itself, such as AdamW"
        )
    if wholes:
        raise ConfigurationError(
            f"{name}: a step needs whole parameters, and one of shape {shape} is a part, cut over tp; needs "
            f"mpidl.ZeroOptimizer(model, {name}, stage=1, mesh=mesh, ...), which brings the parts together"
        )
