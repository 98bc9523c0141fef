"""Activation checkpointing in segments: memory for activations against a second forward pass.

    forward     x -> [blocks 0-8] -> x1 -> [blocks 9-16] -> x2 -> ...      only x, x1, x2, ... are kept
    backward    the last segment runs again from its input and keeps all, its gradients are computed; then the one
                before it, and so on

With k segments of n blocks, k inputs and the insides of one segment are in memory at a time; k = sqrt(n) needs the
least. Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

Running a module a second time would also update its running statistics a second time. While a segment is recomputed
its modules therefore hold copies of their buffers: what they write there is thrown away. Scripted modules keep their
buffers, which get their values back. That holds for every module, however it updates them, and autograd sees tensors of
the same shapes in both runs, as checkpoints require.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigurationError


def split_blocks(blocks: Sequence[nn.Module], segments: int) -> list[Sequence[nn.Module]]:
    """Splits the blocks into `segments` runs whose lengths differ by at most one, longer ones first."""
    if not 1 <= segments <= len(blocks):
        raise ConfigurationError(f"segments: got {segments}; needs 1 to {len(blocks)}, the number of blocks")
    length, longer = divmod(len(blocks), segments)
    ends = [length * (i + 1) + min(i + 1, longer) for i in range(segments)]
    return [blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def run_in_segments(
    blocks: Sequence[nn.Module], x: torch.Tensor, segments: int, use_reentrant: bool = False
) -> torch.Tensor:
    """Runs the blocks one after another, of which only the segments' inputs keep their memory until backward.

    blocks: modules that take and return one tensor.
    use_reentrant: which of torch's two checkpoints; the re-entrant one gives gradients only if `x` requires them.
    """
    for part in split_blocks(blocks, segments):
        x = checkpoint(_Segment(part), x, use_reentrant=use_reentrant)
    return x


class _Segment:
    """Some blocks in a row; every run after the first one is a recomputation."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks, self._ran = blocks, False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        again, self._ran = self._ran, True
        with buffers_left_alone(self._blocks) if again else contextlib.nullcontext():
            for block in self._blocks:
                x = block(x)
        return x


@contextlib.contextmanager
def buffers_left_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which modules and their submodules use copies of their buffers; its end restores the originals.

    Scripted modules, whose buffers cannot be replaced, use the originals, whose values are restored at the end.
    """
    owners = {owner for module in modules for owner in module.modules()}
    scripted = [owner for owner in owners if not isinstance(owner._buffers, dict)]
    values = [(b, b.detach().clone()) for owner in scripted for _, b in owner.named_buffers(recurse=False)]
    own = [(owner, dict(owner._buffers)) for owner in owners if isinstance(owner._buffers, dict) and owner._buffers]
    for owner, buffers in own:
        owner._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for owner, buffers in own:
            owner._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
