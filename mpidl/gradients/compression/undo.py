"""Undoes what a skipped step leaves: remainders and compressor states become those of before its passes.

    window    pass (or several, whose gradients add up)  ->  the optimizer steps     its end: the former values go
                                                         ->  the step is skipped     its end: they come back

In a window's first pass a section's new remainder is written to a second buffer, and the two change roles: no copy,
but twice the memory of the remainders. So it is done only while a step may be skipped: from the start until the first
step, and after that only if a GradScaler or a NonfiniteGuard has announced that it may skip steps.

A window ends when the next pass begins, if the optimizer has stepped or has skipped its step since. A hook of torch
reports every optimizer's step; this package's GradScaler and NonfiniteGuard report the steps that all ranks skip.
Torch's own GradScaler does not: with `Compression(undo=True)` a pass that begins with no gradients left, and no step
made, counts the one before as skipped.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_NOTE = "_mpidl_compressed_by"


class Undoable(Protocol):
    """A reduction that keeps what a skipped step needs."""

    def announce_skips(self, scaled: bool = False) -> None:
        """Keeps the values before each step from now on, as steps may be skipped.

        scaled: gradients are of a loss times a scale. Raises ConfigurationError where this cannot be.
        """

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigurationError for an optimizer that must not step on the gradients."""

    def stepped(self) -> None:
        """Notes that the optimizer has stepped on the gradients."""

    def undo(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Takes the passes since the last step back, for these parameters, or all."""

    def rescale(self, factor: float) -> None:
        """Multiplies what is in the gradients' unit, as the loss scale has changed by this factor."""


class _Note:
    """The reduction of a parameter's gradients, as noted on it. A pickled parameter has none."""

    def __init__(self, reduction: Undoable) -> None:
        self.where = weakref.ref(reduction)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def note(reduction: Undoable, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Notes on parameters which reduction compresses their gradients, and listens to optimizers' steps."""
    made = _Note(reduction)
    for p in parameters:
        setattr(p, _NOTE, made)
    _listen()


def reductions_of(optimizer: torch.optim.Optimizer) -> list[Undoable]:
    """The compressing reductions of an optimizer's parameters, in their order."""
    found: dict[int, Undoable] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            noted = getattr(p, _NOTE, None)
            reduction = noted.where() if isinstance(noted, _Note) else None
            if reduction is not None:
                found.setdefault(id(reduction), reduction)
    return list(found.values())


def undo_step(optimizer: torch.optim.Optimizer) -> None:
    """Takes back the passes whose step an optimizer skips, for its parameters. Every rank skips it."""
    for reduction in reductions_of(optimizer):
        reduction.undo([p for group in optimizer.param_groups for p in group["params"]])


@cache
def _listen() -> None:
    """Registers a hook for every optimizer's step, once in the process."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for reduction in reductions_of(optimizer):
            reduction.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for reduction in reductions_of(optimizer):
            reduction.stepped()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


class Window:
    """The passes since the last step, and whether they can be undone.

    setting: `Compression.undo`; None: values are kept until the first step, and after `announce`.

    number: int; of the window, by which a section knows whether it has kept its former remainder in it.
    keeps: bool; former values are kept.
    """

    def __init__(self, setting: bool | None) -> None:
        self._setting, self._announced = setting, False
        self.keeps, self.number = setting is not False, 0
        self._is_over = True

    def begin_pass(self) -> bool:
        """Begins a window if the one before is over; returns whether it does."""
        if not self._is_over:
            return False
        self._is_over = False
        self.number += 1
        return True

    def announce(self) -> None:
        """Notes that steps may be skipped from now on."""
        self._announced = True
        self.keeps = self._setting is not False

    def end(self, stepped: bool) -> None:
        """Ends the window. stepped: the optimizer stepped, else the passes were undone."""
        self._is_over = True
        if stepped and self._setting is None and not self._announced:
            self.keeps = False

    @property
    def is_open(self) -> bool:
        """Returns whether passes wait for a step."""
        return not self._is_over
