"""Refuses a communication hook that cannot be called with a state and a bucket, by its signature and annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from ..errors import ConfigurationError, ConfigurationTypeError
from .grad_bucket import GradBucket


def check_hook(given: Any) -> None:
    """Refuses what cannot be called as `hook(state, bucket)`, or has annotations that do not fit."""
    if not callable(given):
        raise ConfigurationTypeError(f"register_comm_hook: got {given!r} as the hook; needs a callable")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # nothing is known of it
        return
    annotations = _annotations(given.func if isinstance(given, partial) else given)
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(given, "__name__", type(given).__name__)
        raise ConfigurationTypeError(
            f"register_comm_hook: the hook is {name}{signature}; needs one to call as hook(state, bucket)"
        ) from error
    names = list(signature.parameters)
    bucket: Any = annotations.get("bucket" if "bucket" in names else "".join(names[1:2]))
    if not _may_be(bucket, _takes_buckets):
        raise ConfigurationError(
            f"register_comm_hook: the hook's bucket is annotated as {_shown(bucket)}; needs mpidl.comm_hooks.GradBucket"
        )
    returned: Any = annotations.get("return")
    if not _may_be(returned, _is_handle):
        raise ConfigurationError(
            f"register_comm_hook: the hook is annotated to return {_shown(returned)}; needs a handle with wait(), as "
            "collectives.Work"
        )


def _annotations(called: Any) -> dict[str, Any]:
    """Returns the annotations of a callable by name, except those that cannot be evaluated."""
    function = called if inspect.isroutine(called) else type(called).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    found: dict[str, Any] = {}
    with suppress(Exception):  # it evaluates texts of the program's, from Python 3.14 on all of them at once
        for name, annotation in getattr(function, "__annotations__", {}).items():
            with suppress(Exception):
                one = SimpleNamespace(__annotations__={name: annotation})
                found |= get_type_hints(one, globalns=getattr(function, "__globals__", {}))
    return found


def _may_be(annotation: Any, fits: Callable[[type, Any], bool]) -> bool:
    """Returns whether an annotation is no class, or one that `fits`, or a union of which one does.

    fits: called with the class and the annotation, which is the class or has arguments besides.
    """
    if get_origin(annotation) in (Union, UnionType):
        return any(_may_be(one, fits) for one in get_args(annotation) if one is not type(None))
    kind = get_origin(annotation) or annotation
    return not isinstance(kind, type) or kind in (object, Any) or fits(kind, annotation)


def _takes_buckets(kind: type, _: Any) -> bool:
    return issubclass(GradBucket, kind) or kind.__name__ == GradBucket.__name__


def _is_handle(kind: type, annotation: Any) -> bool:
    """Returns whether values of the class have `wait`; of a Future, whether it may be one of tensors or None."""
    of = get_args(annotation)[:1] if issubclass(kind, torch.futures.Future) else ()
    return hasattr(kind, "wait") and all(one in (None, type(None)) or _may_be(one, _is_result) for one in of)


def _is_result(kind: type, _: Any) -> bool:
    return issubclass(kind, torch.Tensor | list)


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
