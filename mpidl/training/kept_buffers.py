"""Keeps a model's buffers as they were before a step, and puts them back if the step is not taken.

    forward      keeps copies of them, then the pass changes them      running mean 0.3 -> NaN
    restore()    the step is not taken: they are as before             running mean 0.3
    forget()     it is taken                                           the next pass in training begins another step

Torch's count of changes in place does not know of batch normalizations: so each step copies all buffers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compiling import uncompiled


class KeptBuffers:
    """Buffers of a model as they were before a step, which begins with the first forward pass in training."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []  # the buffer, and its values
        self._in_a_step = False
        self._hook = model.register_forward_pre_hook(self._before)

    @uncompiled
    @torch.no_grad()
    def restore(self) -> None:
        """Puts back, in place, what has been changed since the step began. On this rank."""
        for module, name, buffer, values in self._kept if self._in_a_step else ():
            buffer.copy_(values)
            module._buffers[name] = buffer
        self._in_a_step = False

    def forget(self) -> None:
        """Leaves what the step has changed."""
        self._in_a_step = False

    def remove(self) -> None:
        """Keeps no more."""
        self._hook.remove()
        self._kept.clear()

    @uncompiled
    @torch.no_grad()
    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._in_a_step or not module.training:
            return
        self._in_a_step = True
        self._kept = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in self._model.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()  # which nothing can change
        ]
