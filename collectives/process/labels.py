"""Names under which torch.profiler shows what runs here; they cost half a microsecond where no profiler is on.

A profiler sees the threads of the program and of autograd, not the progress thread: of an operation that is queued it
shows that it is issued, and the wait for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()
PROFILER = vars(torch.autograd.profiler)  # "_is_profiler_enabled" in it: whether one is on in any thread
is_profiled = torch.autograd._profiler_enabled  # in this thread


def label(name: str, detail: str | None = None) -> AbstractContextManager[Any]:
    """A context that the profiler of this thread, if it has one, shows as `name`, with `detail` as its argument."""
    return record_function(name, detail) if is_profiled() else _NOTHING
