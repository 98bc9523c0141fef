"""Parameters that notice when somebody touches them, before torch computes with them.

A watched parameter is of a class of its own, made of the one that it had, which torch asks first. Unwatched it is what
it was, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten

Again = Callable[[], None]
Touched = Callable[[torch.nn.Parameter, str], Again | None]

_TOUCHED = "_mpidl_touched"  # a parameter's attribute
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # attributes that are, or lead to, its values
ABOUT = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"}
    | {"_has_compatible_shallow_copy_type"}
    | {"is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned", "is_inference"}
    | {"register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__len__", "__hash__"}
)
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "double", "float", "half", "bfloat16"})


class Watched:
    """Stands before the parameter's own class in the order of methods. about: functions that need no values."""

    about: ClassVar[frozenset[str]] = ABOUT

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(function, "__self__", None), "__name__", "")
            computes = name in _VALUES and function.__name__ == "__get__"
        else:
            computes = name not in cls.about and not _converts_nothing(name, function, args, kwargs)
        again: list[Again] = []
        for parameter in _watched_in(args, kwargs) if computes else ():
            where = getattr(parameter, _TOUCHED)  # None: another thread has just unwatched it
            touched = where() if where is not None else None
            once_more = touched(parameter, name) if touched is not None else None
            if once_more is not None:
                again.append(once_more)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0] if again else ():
            if torch.is_tensor(tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_calls(again))
        return result


def watch(parameter: torch.nn.Parameter, touched: Callable[[], Touched | None], kind: type[Watched] = Watched) -> None:
    """From now on a function that computes with the parameter calls touched()(parameter, name of the function) before.

    That may unwatch the parameter, raise, or return what is to be called once more before the result's backward pass.
    touched: a reference to it, as weakref has them; None: to nothing any more.
    """
    if not isinstance(parameter, Watched):
        parameter.__class__ = _of(kind, type(parameter))  # type: ignore[arg-type]
    setattr(parameter, _TOUCHED, touched)


def unwatch(parameter: torch.nn.Parameter) -> None:
    """Makes it what it was."""
    if isinstance(parameter, Watched):
        parameter.__class__ = type(parameter).__bases__[1]
        setattr(parameter, _TOUCHED, None)


def _calls(again: list[Again]) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        for call in again:
            call()

    return hook


@cache
def _of(kind: type[Watched], own: type) -> type:
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
