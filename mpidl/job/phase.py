"""The phase of training that this process is in, for the watchdog's reports: "in the backward pass of step 7".

The watchdog's thread reads it off the main thread's calls whenever it looks, so that passes of any engine, or of none,
are seen and do nothing for it. The innermost of these calls tells:

    torch.autograd.backward, grad      in the backward pass      also where a checkpoint runs a forward pass again
    a step of an optimizer             in the optimizer's step
    a call of a module                 in the forward pass
    none of them                       in the step               nothing until the first step has ended

Steps are counted from 1, as the main thread completes them: those of all optimizers, without steps inside others, as an
engine's on its slices, or inside a backward pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from collectives.diagnostics import calls_of_main_thread, describe_program

_BACKWARD: set[CodeType] = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
_STEP: CodeType = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__  # what torch puts around each step


def _name(code: CodeType) -> tuple[str, str]:
    """Returns the file and the function as a StackFrame has them."""
    return code.co_filename.encode("ascii", "backslashreplace").decode(), code.co_name


_NAMES_OF_BACKWARD = {_name(code) for code in _BACKWARD}
_NAME_OF_STEP, _NAME_OF_MODULE = _name(_STEP), _name(torch.nn.Module.__call__.__code__)


class _StepCounter:
    """Counts the steps of the main thread. completed: their number."""

    def __init__(self) -> None:
        self.completed = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.current_thread() is not threading.main_thread():
            return
        around = (code for code in _codes(sys._getframe()) if code is _STEP or code in _BACKWARD)
        next(around, None)  # the step that ends
        if next(around, None) is None:
            self.completed += 1

    def phase(self) -> str:
        """Describes where the main thread is; empty outside of calls until the first step has ended."""
        step, found = self.completed + 1, ""
        for call in calls_of_main_thread():
            code = call.file, call.function
            if code in _NAMES_OF_BACKWARD:
                return f"in the backward pass of step {step}"
            if code == _NAME_OF_STEP:
                return f"in the optimizer's step {step}"
            if code == _NAME_OF_MODULE:
                found = f"in the forward pass of step {step}"
        return found or (f"in step {step}" if self.completed else "")


@cache
def follow_steps() -> None:
    """Adds the phase and the step of this process to the watchdog's reports from now on."""
    describe_program(phase=_StepCounter().phase)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """Yields what runs in a frame, and in those around it, the innermost first."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
