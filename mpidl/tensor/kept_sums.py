"""Keeps the outputs of row-parallel layers in an activation checkpoint, so that its second run communicates less.

    forward     x -> column -> row -> sum over tp -> y        x is kept by the checkpoint, and y here
    backward    x -> column -> row -----------------> y       again, without the product of the row-parallel layer

Each output is kept as long as the graph of the call: [batch, sequence, width] a row-parallel layer, or this rank's
piece of it under sequence parallelism. One that something has written into since is computed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .tensor_parallel import TensorParallel


class KeptSums:
    """The outputs of the row-parallel layers in one call of a module, in the order of the layers."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, int]] = []
        self._next: int | None = None  # None in the first run
        self._ran = False

    @contextlib.contextmanager
    def run(self, module: nn.Module) -> Iterator[None]:
        """Context of one run of the module: in the first its layers keep their outputs, in later ones take them."""
        self._next = 0 if self._ran else None
        self._ran = True
        before = [(tp, tp.kept_sums) for tp in _tensor_parallels(module)]
        for tp, _ in before:
            tp.kept_sums = self
        try:
            yield
        finally:
            for tp, kept in before:
                tp.kept_sums = kept

    def take(self) -> torch.Tensor | None:
        """The next output; None in the first run, and for one that was changed."""
        if self._next is None or self._next == len(self._kept):
            return None
        y, version = self._kept[self._next]
        self._next += 1
        return y.clone() if y._version == version else None

    def keep(self, y: torch.Tensor) -> None:
        """Keeps an output, in the first run."""
        if self._next is None:
            self._kept.append((y.detach(), y._version))


def _tensor_parallels(module: nn.Module) -> list[TensorParallel]:
    found = (vars(inner).get("_tensor_parallel") for inner in module.modules())
    return list({id(tp): tp for tp in found if isinstance(tp, TensorParallel)}.values())
