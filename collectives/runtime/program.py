"""Descriptions of what the program of this process does, for the watchdog's reports.

    place   the coordinates of this rank, such as "dp=1, tp=0"
    phase   where the program is in its work, such as "in the backward pass of step 7"

Both texts are the program's own words, which are only passed on. The watchdog asks whenever it looks, in its own
thread, so that the program itself does nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable

Words = Callable[[], str]
_asked: dict[str, Words] = {}


def describe_program(*, place: Words | None = None, phase: Words | None = None) -> None:
    """Registers functions that describe this process; the watchdog's thread calls them.

    What is not given stays as it is.
    """
    _asked.update({name: call for name, call in (("place", place), ("phase", phase)) if call is not None})


def described() -> tuple[str, str]:
    """The place and the phase; empty where the program has given none, or its function raises."""
    return _words_of("place"), _words_of("phase")


def _words_of(name: str) -> str:
    try:
        return str(_asked[name]()) if name in _asked else ""
    except Exception:  # the watchdog goes on, whatever the program's function does
        return ""
