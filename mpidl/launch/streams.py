"""Passes on the output of a command, at once and unchanged, and keeps its last lines.

Where this output is a terminal, the command writes to a pseudo-terminal, as programs choose buffering and colours by
it; else to a pipe. A thread for each stream reads it, and ends when no process has the other end open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import termios
import threading
from collections import deque

_KEPT = 400  # lines
_READ_BYTES = 1 << 16  # bytes
_WINSIZE_BYTES = 8  # bytes of a struct winsize
_OUTPUT = 1  # index of the output flags in termios' attributes


class OutputStream:
    """Passes on to the descriptor `target`, in a thread. write_end: the descriptor for the command to write to.

    To be followed by `begin`, once the command has the write end.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._partial_line = b""  # a line of which the end is still to come
        self._read_end, self.write_end = _terminal(target) if os.isatty(target) else os.pipe()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def begin(self) -> None:
        """Starts to pass on; ends by itself when no process has the write end any more."""
        os.close(self.write_end)
        self._thread.start()

    def close(self) -> None:
        """Closes both ends, in place of `begin`, if the command could not be started."""
        os.close(self.write_end)
        os.close(self._read_end)

    def join(self, seconds: float) -> None:
        """Waits for the end, at most so long."""
        self._thread.join(seconds)

    @property
    def lines(self) -> list[str]:
        """Last lines of the output."""
        return [*self._lines, self._partial_line.decode(errors="replace")] if self._partial_line else list(self._lines)

    def _pass_on(self) -> None:
        # Reading fails where a terminal has no writer left. Writing fails where the reader is gone: then the read end
        # is closed, so that the command gets the error that it would get without this process.
        with contextlib.suppress(OSError):
            while piece := os.read(self._read_end, _READ_BYTES):
                *whole, begun = (self._partial_line + piece).split(b"\n")
                self._lines.extend(line.decode(errors="replace").rstrip("\r") for line in whole)
                self._partial_line = begun[begun.rfind(b"\r", 0, -1) + 1 :]  # progress bars write the same line anew
                self._write(piece)
        os.close(self._read_end)

    def _write(self, piece: bytes) -> None:
        """Writes to the target. Drops output to a closed terminal, so that the job goes on, to save and to stop."""
        try:
            while piece:
                try:
                    piece = piece[os.write(self._target, piece) :]
                except BlockingIOError:  # another process that has the target has made it non-blocking
                    select.select([], [self._target], [])
        except OSError as error:
            if error.errno != errno.EIO:
                raise


def _terminal(like: int) -> tuple[int, int]:
    """Opens a terminal of the same size that does not change its output, and returns both ends."""
    leader, follower = pty.openpty()
    settings = termios.tcgetattr(follower)
    settings[_OUTPUT] &= ~termios.OPOST
    termios.tcsetattr(follower, termios.TCSANOW, settings)
    fcntl.ioctl(follower, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(_WINSIZE_BYTES)))
    return leader, follower
