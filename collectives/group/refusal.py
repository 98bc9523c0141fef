"""Refusal of a group's operations and messages once it cannot be used any more.

a failure      the other ranks may be anywhere in the operation, and write to its memory
a timeout      they may still come to what this rank has given up
an interrupt   has left a message of which no call knows
`close`        has freed the communicators of MPI
a fork         the child is no rank
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from ..errors import MismatchError, OperationError, OperationTimeout, WorkTimeout
from ..process.forked import is_forked, refusal_reason
from ..runtime import background_errors
from ..runtime.progress import Progress


class Refusal:
    """Refuses operations of one group once it cannot be used, and says why.

    progress: the group's.
    name: of the group, may be empty.
    when_dropped: the finalizer that hands a dropped group's communicators to `dropped`.

    why: the reason, in words; empty while the group can be used.
    failed: whether what is queued is refused, too.
    closed: whether the group has come to its end.
    error_class: of the error.
    """

    def __init__(self, progress: Progress, name: str, when_dropped: weakref.finalize[..., Any]) -> None:
        self._progress, self._name, self.when_dropped = progress, name, when_dropped
        self.why, self.failed, self.closed = "", False, False
        self.error_class: type[MismatchError | OperationError] = OperationError
        _alive.add(self)

    def check(self, operation: str, queued: bool = False) -> None:
        """Raises where the group cannot be used.

        queued: called in the progress thread; an earlier error in the background then stays noted until a call of the
            program raises it.
        """
        if self.why:
            if not queued:
                background_errors.clear(self._progress)  # the refusal says why
            group = f"communicator {self._name!r}" if self._name else "this communicator"
            raise self.error_class(f"{operation}: {group} cannot be used any more: {self.why}")

    def give_up(self, why: str) -> None:
        """Refuses every operation from here on, also those that are queued."""
        self.why, self.failed = why, True
        self.when_dropped.detach()  # MPI may still be at work in it

    def give_up_after_timeout(self, late: WorkTimeout) -> OperationTimeout:
        """Gives the group up after a wait that has timed out, and returns the error that says so."""
        self.give_up(f"{late}, its timeout")
        return OperationTimeout(f"{late}, its timeout; the communicator cannot be used any more")

    def give_up_after_interrupt(self, operation: str) -> None:
        """Gives the group up: an interrupt has left a message of which no call knows any more."""
        self.give_up(f"{operation} was interrupted, and its message may still come or go")

    def close(self, why: str) -> None:
        """Refuses every operation from here on, as the group has come to its end."""
        self.closed, self.why = True, why


_alive: weakref.WeakSet[Refusal] = weakref.WeakSet()


def _close_in_child() -> None:
    """Refuses operations in a forked child of a rank, which frees nothing."""
    if is_forked():
        for refusal in _alive:
            refusal.close(refusal_reason())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
