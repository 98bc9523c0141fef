"""Operations and messages that have failed in the background, and whose errors no `wait` has raised yet.

`Communicator.close` raises such an error; one that is left at the end of the program ends the job (`progress`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol


class Failed(Protocol):
    """The handle of an operation that has failed. source: where the errors after the first one follow from it."""

    source: Any

    def wait(self) -> None:
        """Raises the error, and calls `clear`."""


_failed: dict[Any, Failed] = {}  # of each source the first


def note(work: Failed) -> None:
    """Notes a failure, unless one of the same source is noted already."""
    _failed.setdefault(work.source, work)


def clear(source: Any) -> None:
    """Forgets the failure of a source: the program has been told of it, or of what follows from it."""
    _failed.pop(source, None)


def find(belongs: Callable[[Failed], bool] = lambda work: True) -> list[Failed]:
    """The failures that are noted, in their order. belongs: selects some."""
    return [work for work in list(_failed.values()) if belongs(work)]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_failed.clear)  # they are the parent's
