"""Operations that single ranks leave to the others, for engines: exempt from the watchdog, completed before the end.

exempt_from_watchdog    the other ranks may come late to what this rank waits for
register_drain_hook     completes, at the end of a Communicator, what some ranks have begun and others have left
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
