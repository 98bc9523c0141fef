"""Forward passes that run now, also after an exception after which torch calls no hook.

    model(x)               begin(model)
        encoder(x)         begin(encoder)
                           end(encoder)       torch calls the last hooks after an Exception, too
    KeyboardInterrupt                         but not after this one, and in compiled code after none

A pass is noted with the frame in which torch calls its hooks and its forward method. It is over when that frame is no
longer among the calls of its thread. This distinguishes a model that calls itself, or that backward recomputes, from
one that an interrupt has ended. Of the latter the frame, and with it what it has computed, is kept until the next
check.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import get_ident
from types import FrameType

import torch

from ...compiling import uncompiled

_TORCH = vars(torch.nn.modules.module)  # the globals of the functions that run a module


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass of a module.

    frame: in which torch runs it.
    thread: its number.
    """

    module: torch.nn.Module
    frame: FrameType
    thread: int

    def runs(self) -> bool:
        """Tells if the frame is among the calls of this thread, or may be among those of another one."""
        if self.thread != get_ident():
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class ForwardPasses:
    """The passes of some modules, the innermost one last. Hooks before and after each pass call `begin` and `end`.

    trained_since_step: bool; whether one with gradients has begun since the last step, which sets it to False.
    """

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self.trained_since_step = False

    @uncompiled
    def any_runs(self) -> bool:
        """Tells if the caller runs within a pass."""
        while self._passes and not self._passes[-1].runs():
            self._passes.pop()
        return bool(self._passes)

    def begin(self, module: torch.nn.Module) -> None:
        """Notes a pass; called from a hook of torch's."""
        self.any_runs()
        frame = sys._getframe(1)
        while frame.f_globals is not _TORCH and frame.f_back is not None:
            frame = frame.f_back
        self._passes.append(_Pass(module, frame, get_ident()))
        self.trained_since_step |= torch.is_grad_enabled()

    def end(self, module: torch.nn.Module) -> None:
        """Forgets a module's innermost pass and those inside; none if an exception has kept it from being noted."""
        for place in reversed(range(len(self._passes))):
            if self._passes[place].module is module:
                del self._passes[place:]
                return
