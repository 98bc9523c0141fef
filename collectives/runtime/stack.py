"""The calls that the main thread is in, for another thread, at any time.

faulthandler reads them and makes no objects. `sys._current_frames` makes frame objects of functions that go on, and
CPython 3.11 loses track of one that is made while its function ends: its `f_back` then is any object, or none.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import traceback
from functools import cache
from typing import NamedTuple

_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_reading = threading.Lock()  # held while the file is of one thread


class StackFrame(NamedTuple):
    """A call under way. file: of its code. Characters that are not ASCII are escaped, as by "backslashreplace"."""

    file: str
    line: int
    function: str


def calls_of_main_thread() -> list[StackFrame]:
    """Returns at most a hundred calls, the innermost first; none where there is no room to write them down."""
    try:
        with _reading:
            file = _file()
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            faulthandler.dump_traceback(file, all_threads=True)
            said = os.pread(file, os.fstat(file).st_size, 0).decode("ascii", "replace")
    except OSError:
        return []
    head = f"hread 0x{threading.main_thread().ident or 0:016x} "  # after "T", or "Current t"
    calls: list[StackFrame] = []
    for line in said.partition(head)[2].splitlines()[1:]:
        found = _CALL.fullmatch(line)
        if found is None:
            break
        calls.append(StackFrame(found["file"], int(found["line"]), found["function"]))
    return calls


def stack_of_main_thread() -> str:
    """Returns the calls as a traceback shows them, with the lines of the program, the innermost last."""
    calls = [(call.file, call.line, call.function, None) for call in reversed(calls_of_main_thread())]
    return "".join(traceback.StackSummary.from_list(calls).format())


@cache
def _file() -> int:
    return os.memfd_create("mpidl-calls") if hasattr(os, "memfd_create") else os.dup(tempfile.TemporaryFile().fileno())
