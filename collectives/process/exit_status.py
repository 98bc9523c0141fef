"""The status with which this process is about to exit, as far as it is known before Python ends."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, NoReturn

_status = 0


def note(status: int) -> None:
    """Says with which status the program is about to end."""
    global _status
    _status = status


def noted() -> int:
    """The status that was noted last; 0 if none was."""
    return _status


def watch_sys_exit() -> None:
    """Notes the status of `sys.exit`, if the main thread calls it."""
    leave = sys.exit
    if getattr(leave, "_notes_status", False):
        return

    @functools.wraps(leave)
    def exit(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            note(status & 0xFF if isinstance(status, int) else int(status is not None))
        raise leave(status)  # which has raised already

    exit._notes_status = True  # type: ignore[attr-defined]
    sys.exit = exit
