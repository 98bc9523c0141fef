"""Refuses to pickle or copy a model that is cut over the ranks, by hooks that cannot be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigurationError

_COPIES = ("__deepcopy__", "__reduce_ex__")


class UnpicklableHook:
    """Calls a function. Copies of a module have the same one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, _: Any) -> UnpicklableHook:
        return self

    def __reduce__(self) -> Any:
        return refuse_copy()


def refuse_copy(*_: Any) -> Any:
    """Raises ConfigurationError: neither the optimizer nor the model is copied or pickled."""
    raise ConfigurationError(
        "a model that a ZeroOptimizer trains, and the optimizer, can be neither copied nor pickled: a rank holds "
        "parts of them, tied to its communicator; load optimizer.model_state_dict() and state_dict() into new ones, "
        "and average the weights by mpidl.optim.EMA(model)"
    )


def refuse_copies(model: torch.nn.Module) -> None:
    """Lets copying and pickling the model raise `refuse_copy`'s error, until `allow_copies`."""
    for name in _COPIES:
        setattr(model, name, refuse_copy)


def allow_copies(model: torch.nn.Module) -> None:
    """Lets the model be copied and pickled again."""
    for name in _COPIES:
        delattr(model, name)
