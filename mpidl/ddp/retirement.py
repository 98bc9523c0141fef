"""Retirement of a wrapper as it is freed: removes its hooks from the parameters, frees its Communicator for others.

Nothing of the engine refers to the wrapper, so that its hooks are gone as soon as it is, on every rank. Where a
communication hook or the module does, the garbage collector frees them all.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ..job.communicator_pool import PooledCommunicator
from .reducer import Reducer


class Retirement:
    """Retires a wrapper's reducer, and gives its Communicator back, when the wrapper, its only owner, is freed.

    The garbage collector could not free them all if a `weakref.finalize` did this, which keeps its arguments as long as
    the wrapper lives: through the reducer, hook and module as well.
    """

    def __init__(self, pooled: PooledCommunicator) -> None:
        self.reducer: Reducer | None = None
        self._pooled = pooled

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            if self.reducer is not None:
                self.reducer.retire()
        finally:
            self._pooled.give_back()


def remove_with(wrapper: object, handles: list[Any]) -> None:
    """Has the hooks of these handles removed when the wrapper is freed."""
    if handles:
        weakref.finalize(wrapper, _remove, handles).atexit = False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
