"""Sends small Python objects between ranks, pickled: what users call, with or without a Communicator."""

from __future__ import annotations

from typing import Any, overload

from collectives import Communicator

from ..errors import ConfigurationError
from .pickled import broadcast_pickled, gather_pickled
from .runtime import init

_WORLD: Any = object()  # in place of a value, where the first argument is the value and none a Communicator


@overload
def all_gather_object(value: Any, /) -> list[Any]: ...
@overload
def all_gather_object(comm: Communicator, value: Any) -> list[Any]: ...


def all_gather_object(comm: Any, value: Any = _WORLD) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective.

    comm: may be left out, `all_gather_object(value)`; it is the world then.
    """
    comm, value = _given(comm, value)
    return gather_pickled(comm, value)


@overload
def broadcast_object(value: Any, /, *, root: int = 0) -> Any: ...
@overload
def broadcast_object(comm: Communicator, value: Any, root: int = 0) -> Any: ...


def broadcast_object(comm: Any, value: Any = _WORLD, root: int = 0) -> Any:
    """The root's `value` on every rank; what the others give is ignored. Collective.

    comm: may be left out, `broadcast_object(value)`; it is the world then.
    """
    comm, value = _given(comm, value)
    return broadcast_pickled(comm, value, root)


def _given(comm: Any, value: Any) -> tuple[Communicator, Any]:
    """The Communicator and the value of a call with one or two arguments."""
    if value is not _WORLD and isinstance(comm, Communicator):
        return comm, value
    if value is not _WORLD or isinstance(comm, Communicator):
        raise ConfigurationError(
            f"objects: got {type(comm).__name__}{'' if value is _WORLD else ' first'}; "
            "needs a value, or a Communicator and a value"
        )
    return init(), comm
