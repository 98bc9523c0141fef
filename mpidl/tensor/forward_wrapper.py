"""Wraps a module's forward pass in another function, by a class derived from the module's.

    module.forward  ──  around(module, forward, args, kwargs)  ──  forward: the class's own

A hook would run outside an activation checkpoint of the module itself, and only once; this runs inside, both times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .tensor_parallel import TensorParallel

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run_around(module: nn.Module, tp: TensorParallel, kind: str, around: Around) -> None:
    """Lets `around(module, forward, args, kwargs)` run in place of the forward pass, until the cuts are undone.

    kind: a name for the derived class; a module has one of each.
    """
    attribute = f"_mpidl_{kind.lower()}"
    vars(module)[attribute] = around
    tp.changes.append(lambda: vars(module).pop(attribute))
    tp.set(module, "__class__", _derived(type(module), kind, attribute))


def has_own_forward(module: nn.Module) -> bool:
    """Tells whether a program has set a forward pass in the module itself, which hides what its class would do."""
    found: Any = vars(module).get("forward")
    while hasattr(found, "_before"):  # of sum_gradients, checkpoint_modules, DDP: they ask for the class's at each call
        found = found._before
    return found is not None


_DERIVED: dict[tuple[type, str], type] = {}


def _derived(cls: type[nn.Module], kind: str, attribute: str) -> type[nn.Module]:
    """Derives a class from a module's; one of each pair."""
    if (cls, kind) not in _DERIVED:

        @functools.wraps(cls.forward)  # its signature is looked at
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[attribute](self, functools.partial(cls.forward, self), args, kwargs)

        _DERIVED[cls, kind] = type(f"{kind}{cls.__name__}", (cls,), {"__module__": cls.__module__, "forward": forward})
    return _DERIVED[cls, kind]
