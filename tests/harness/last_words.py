"""What a rank says before mpidl ends the job from inside of a test, as its watchdog does: pytest has captured it."""

import sys
from typing import TextIO

_SPEAKERS = ("collectives.runtime.watchdog", "mpidl.job.ending")


def show_last_words(out: TextIO) -> None:
    """Makes mpidl say there too what is about its end; call it when the tests have imported what they test."""

    def say(text: str) -> None:
        sys.stderr.write(text)
        out.write(f"\n{text}")

    for module in filter(None, map(sys.modules.get, _SPEAKERS)):
        module.say = say  # type: ignore[attr-defined]
