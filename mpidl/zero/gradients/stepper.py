"""`Stepper`: interface of the steps within the backward pass, which `stepping.backward_steps` implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Stepper(Protocol):
    """Steps on each bucket's shard as soon as it is reduced, so that no gradient is kept. Alike on all ranks."""

    def begin(self) -> None:
        """A pass that communicates begins."""

    def launched(self, number: int) -> None:
        """All gradients of a bucket are there on this rank."""

    def step(self, number: int, gradient: torch.Tensor, reached: Sequence[bool]) -> None:
        """A bucket has been reduced, to this rank's shard of the gradient; its parameters that any rank has reached."""

    def end(self) -> None:
        """All buckets have been."""
