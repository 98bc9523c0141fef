"""The wrapper's `forward`, with the signature of the module inside.

Programs read it to learn what a model takes: Hugging Face's Trainer leaves out the columns of a dataset that
`inspect.signature(model.forward)` does not name, which for (*args, **kwargs) are all of them.

The class holds it, and no wrapper does: so wrappers are pickled and copied without it, and a program may still set
`wrapper.forward`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..compiling import uncompiled


class ForwardSignature:
    """A descriptor of a method `function(self, *args, **kwargs)` that calls `self.module`. To decorate it with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @uncompiled
    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self._function if wrapper is None else _BoundForward(self._function, wrapper)


class _BoundForward(functools.partial):  # type: ignore[type-arg]  # as a call of it has no frame of Python's
    """The function bound to a wrapper, as a bound method is."""

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __name__(self) -> str:
        return self.func.__name__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.module.forward)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BoundForward) and self.__self__ is other.__self__ and self.func is other.func

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.func))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, "forward")
