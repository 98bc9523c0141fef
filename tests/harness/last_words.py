"""Shows what mpidl writes when it ends the job in the middle of a test. Otherwise pytest would have captured it."""

import sys
from collections.abc import Callable
from typing import TextIO

_SPEAKERS = ("collectives.runtime.watchdog", "mpidl.job.ending")


def show_last_words(out: TextIO) -> None:
    """Makes mpidl write its last words to `out` too. Call it when the tests have imported what they test."""

    def twice(say: Callable[[str], None]) -> Callable[[str], None]:
        def say_twice(text: str) -> None:
            say(text)
            out.write(f"\n{text}")

        return say_twice

    for module in filter(None, map(sys.modules.get, _SPEAKERS)):
        module.print_to_stderr = twice(module.print_to_stderr)  # type: ignore[attr-defined]
