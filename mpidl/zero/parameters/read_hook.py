"""Tensor subclass that calls back before an operator reads a parameter, to wait for it or to gather it.

`watch` gives a parameter a class of its own, made of the class that it had, whose `__torch_function__` torch calls
instead of an operator. `unwatch` gives it its class back; a parameter that is not watched costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten

Repeat = Callable[[], None]
BeforeRead = Callable[[torch.nn.Parameter, str], Repeat | None]

_BEFORE_READ = "_mpidl_before_read"  # a parameter's attribute
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # attributes that are, or lead to, its values
METADATA_FUNCTIONS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"}
    | {"_has_compatible_shallow_copy_type"}
    | {"is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned", "is_inference"}
    | {"register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__len__", "__hash__"}
)
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "double", "float", "half", "bfloat16"})


class Watched:
    """The base of a watched parameter's class, before its own class in the order of methods.

    metadata_functions: names of the functions that need no values, and call nothing back.
    """

    metadata_functions: ClassVar[frozenset[str]] = METADATA_FUNCTIONS

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(function, "__self__", None), "__name__", "")
            computes = name in _VALUES and function.__name__ == "__get__"
        else:
            computes = name not in cls.metadata_functions and not _converts_nothing(name, function, args, kwargs)
        repeats: list[Repeat] = []
        for parameter in _watched_in(args, kwargs) if computes else ():
            where = getattr(parameter, _BEFORE_READ)  # None: another thread has just unwatched it
            before_read = where() if where is not None else None
            repeat = before_read(parameter, name) if before_read is not None else None
            if repeat is not None:
                repeats.append(repeat)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0] if repeats else ():
            if torch.is_tensor(tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_repeat_hook(repeats))
        return result


def watch(
    parameter: torch.nn.Parameter, before_read: Callable[[], BeforeRead | None], kind: type[Watched] = Watched
) -> None:
    """Lets `before_read()(parameter, name of the operator)` be called before an operator computes with the parameter.

    That may unwatch the parameter, raise, or return a function to be called again before the result's backward pass.

    before_read: a reference to the function, as weakref has them; it gives None when that is gone.
    kind: the base of the class that the parameter gets.
    """
    if not isinstance(parameter, Watched):
        parameter.__class__ = _watched_class(kind, type(parameter))  # type: ignore[arg-type]
    setattr(parameter, _BEFORE_READ, before_read)


def unwatch(parameter: torch.nn.Parameter) -> None:
    """Gives a parameter its own class back."""
    if isinstance(parameter, Watched):
        parameter.__class__ = type(parameter).__bases__[1]
        setattr(parameter, _BEFORE_READ, None)


def _repeat_hook(repeats: list[Repeat]) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        for call in repeats:
            call()

    return hook


@cache
def _watched_class(kind: type[Watched], own: type) -> type:
    return type(f"{kind.__name__}{own.__name__}", (kind, own), {})


def _converts_nothing(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Tells if it is a conversion that returns the parameter itself, as `model.to(device)` makes where it is there."""
    if name not in _CONVERSIONS:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        probe = args[0].new_empty(0)
        return function(probe, *args[1:], **(kwargs or {})) is probe


def _watched_in(*values: Any) -> Iterator[torch.nn.Parameter]:
    for leaf in tree_flatten(values)[0]:
        if isinstance(leaf, Watched):
            yield leaf  # type: ignore[misc]
