"""Operations of engines that some ranks have begun and others have not yet joined, and may join late.

exempt_from_watchdog    the watchdog does not count this rank's waits: the other ranks may come late
register_drain_hook     at the end of a Communicator, completes operations that some ranks have begun and others not
"""

from __future__ import annotations

from collections.abc import Callable

from .communicator import Communicator

__all__ = ["exempt_from_watchdog", "register_drain_hook"]


def exempt_from_watchdog(comm: Communicator, on: bool = True) -> None:
    """Exempts this rank's waits in `comm` from the watchdog: the other ranks may come late without an error.

    on: False: no more.
    """
    comm._issuer.exempt_from_watchdog(on)


def register_drain_hook(comm: Communicator, task: Callable[[], None] | None) -> None:
    """Registers a task to run before the last wait for what is queued in `comm`; to be called on every rank.

    That is in `close`, or at the end of the program. There it comes after the end of all groups that have no such task,
    which the other ranks are told of: they may still be in the middle of their program.

    task: None for none.
    """
    comm._end.register_drain_hook(task)
