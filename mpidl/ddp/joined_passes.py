"""Passes of a reducer in a `Join`: the count of ranks that contribute, and the pass of a rank without batches.

    rank with batches      begin_backward: tells the others | fills its buckets | end_backward: tells them
    rank without           begin_shadow, take_gradients:    | contributes zeros | end_shadow: `.grad` is that
                           `.grad` put aside                                      of before

The mean is over all ranks, or over those with batches (`divide_by_initial_world_size=False`); the order of buckets is
that of a rank with batches. Both make the same collectives, in the order of `reducer`. Outside of a `Join` this does
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol

import torch

from .uneven_inputs import JoinTurns, Turn


class Joining(Protocol):
    """A `Join` block around the passes, as the reducer uses it (`join_hook.WrapperJoinHook`)."""

    turns: JoinTurns

    @property
    def mean_correction(self) -> float:
        """The factor of the mean over all ranks."""

    def announce_turn(self, turn: Turn) -> None:
        """Tells the ranks without batches which operation this one begins."""


class JoinedPasses:
    """The state of a reducer in a `Join`, or outside of one.

    joining: the block; None outside.
    is_shadow: this rank has no batches left, and contributes zeros to a pass of the others.
    mean_correction: factor of the mean over all ranks.
    order_root: the rank whose order of arrival counts.
    """

    def __init__(self) -> None:
        self.joining: Joining | None = None
        self.is_shadow = False
        self.mean_correction, self.order_root = 1.0, 0
        self._own_gradients: dict[torch.nn.Parameter, torch.Tensor | None] = {}  # in a shadow pass

    def begin_forward(self) -> None:
        """Tells the others of a forward pass in training mode, where the first rank that ends is an error."""
        if self.joining is not None and self.joining.turns.throw:
            self.joining.announce_turn(Turn.FORWARD)

    def begin_backward(self) -> None:
        """Tells the ranks without batches that a backward pass begins, and notes how many ranks have batches."""
        if self.joining is not None:
            self.joining.announce_turn(Turn.BACKWARD)
            self._read_turns(self.joining)

    def end_backward(self) -> None:
        """Tells the ranks without batches that the buckets of a backward pass are complete."""
        if self.joining is not None and not self.is_shadow:
            self.joining.announce_turn(Turn.END_OF_BACKWARD)

    def begin_shadow(self) -> None:
        """Begins a shadow pass, as the others have told."""
        assert self.joining is not None
        self._read_turns(self.joining)
        self.is_shadow = True

    def take_gradients(self, parameters: Iterable[torch.nn.Parameter], accumulated: Container[torch.Tensor]) -> None:
        """Puts this rank's gradients aside until the shadow pass ends.

        accumulated: those with gradients that no pass has averaged, of which copies are put aside: they may lie in
            buckets, which the pass overwrites.
        """
        for p in parameters:
            self._own_gradients[p] = p.grad if p.grad is None or p not in accumulated else p.grad.clone()
            p.grad = None

    def end_shadow(self) -> None:
        """Ends the shadow pass: `.grad` is that of before.

        One that was averaged, and is a view of a bucket, holds the mean of the others' pass.
        """
        self.is_shadow = False
        self._own_gradients, own = {}, self._own_gradients
        for p, gradient in own.items():
            p.grad = gradient

    def leave(self) -> None:
        """Ends the block: passes are those of all ranks again."""
        self.joining = None
        self.mean_correction, self.order_root = 1.0, 0

    def _read_turns(self, joining: Joining) -> None:
        self.mean_correction, self.order_root = joining.mean_correction, joining.turns.root
