"""Shows each forward pass of a model that a ZeroOptimizer trains to torch.profiler, under one name."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from collectives.diagnostics import label

from ..compiling import uncompiled

NAME = "ZeroOptimizer.forward"


class _Open(threading.local):
    """The labels of the passes that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.labels: list[AbstractContextManager[Any]] = []


@uncompiled
def _begin(opened: _Open) -> None:
    opened.labels.append(label(NAME))
    opened.labels[-1].__enter__()


@uncompiled
def _end(opened: _Open) -> None:
    if opened.labels:  # another hook may have failed before the label's
        opened.labels.pop().__exit__(None, None, None)


def label_forward(model: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Puts hooks on the model that begin and end the label, also where the pass fails."""
    opened = _Open()
    return [
        model.register_forward_pre_hook(lambda *_: _begin(opened), prepend=True),
        model.register_forward_hook(lambda *_: _end(opened), always_call=True),
    ]
