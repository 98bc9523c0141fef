"""The short way to an operation that was made before with the same arguments (`native/shortcut.c`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

from ..native import compiled
from ..prepared import NOT_YET

Method = TypeVar("Method", bound=Callable[..., Any])


def shortcut(method: Method) -> Method:
    """A method that prepares and issues an operation, as one that finds it again; itself where there is no C.

    Its arguments but for `async_op` and `timeout` are arrays or what an operation depends on.
    """
    if compiled is None:
        return method
    given = [p for p in inspect.signature(method).parameters.values() if p.name not in ("self", "async_op", "timeout")]
    made: Any = compiled.Shortcut(
        method=method,
        name=method.__name__,
        parameters=tuple(p.name for p in given),
        defaults=tuple(... if p.default is p.empty else p.default for p in given),
        by_position=sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in given),
        not_yet=NOT_YET,
    )
    update_wrapper(made, method)
    found: Method = made
    return found
