"""Sends Python objects over a given Communicator, with mpidl's errors; `objects` adds the world as default."""

from __future__ import annotations

from typing import Any

from collectives import ArgumentTypeError, Communicator

from ..errors import ConfigurationError


def gather_pickled(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective.

    Raises ConfigurationError on every rank if one's value cannot be pickled.
    """
    try:
        return comm.all_gather_object(value)
    except ArgumentTypeError as error:
        raise ConfigurationError(f"objects: {error}") from error


def broadcast_pickled(comm: Communicator, value: Any, root: int = 0) -> Any:
    """The root's `value` on every rank; what the others give is ignored. Collective.

    Raises ConfigurationError on every rank if it cannot be pickled.
    """
    try:
        return comm.broadcast_object(value, root)
    except ArgumentTypeError as error:
        raise ConfigurationError(f"objects: {error}") from error
