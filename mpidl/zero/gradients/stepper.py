"""`Stepper`: interface of the steps within the backward pass, which `stepping.backward_steps` implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Stepper(Protocol):
    """Steps on each bucket's shard when its reduction has been waited for. No gradient is kept. The same on all ranks.

    A reduction is waited for when another bucket needs the buffer, at the latest at the end of the pass.
    """

    def begin(self) -> None:
        """Begins a pass that communicates."""

    def launched(self, number: int) -> None:
        """Notes that all gradients of a bucket are there on this rank."""

    def step(self, number: int, gradient: torch.Tensor, reached: Sequence[bool]) -> None:
        """Steps on a reduced bucket.

        gradient: this rank's shard.
        reached: for each parameter, by any rank.
        """

    def end(self) -> None:
        """Ends a pass of which all buckets have been reduced."""
