"""Column-parallel layers of a region on pieces of sequences, which share one gathered input and do not keep it.

    forward    piece ── all-gather ──┬─ q         each layer keeps the piece
                                     ├─ k
                                     └─ v
    backward   piece ── all-gather ──┬─ q's weight        once for all of them, released after the last
                                     ├─ k's
                                     └─ v's

So a region keeps 1/tp of its input, for one more all-gather. Source: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2.

Who runs what: the thread of the backward pass. Every rank of tp runs the same graph in the same order, so the ranks
begin the all-gathers in the same order; each is waited for before the next one begins. With `overlaps` the progress
thread of tp's Communicator carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from .communication import TensorGroup
from .functions import gather_to_region


class GatheredInput:
    """The input of a region.

    x: [batch, length, width], gathered.
    piece: this rank's, which backward gathers again.
    """

    def __init__(self, piece: torch.Tensor, group: TensorGroup, length: int) -> None:
        self.x, self.piece = gather_to_region(piece, group, length), piece.detach()
        self._second_gather = _SecondGather(group, length)

    @uncompiled
    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out_in: bool
    ) -> torch.Tensor:
        """[batch, length, in] -> [batch, length, this rank's features]. x: `self.x`, in the weight's dtype.

        out_in: whether the weight is [out, in], instead of [in, out].
        """
        return _Product.apply(x, self.piece, weight, bias, self._second_gather, out_in)  # type: ignore[no-any-return, no-untyped-call]


class _SecondGather:
    """Gathers a piece again in a backward pass, once for all layers that need it. It holds nothing in between."""

    def __init__(self, group: TensorGroup, length: int) -> None:
        self._group, self._length = group, length
        self._gather: Callable[[], torch.Tensor] | None = None
        self._whole: torch.Tensor | None = None
        self.layers = self._layers_left = 0

    def begin(self, piece: torch.Tensor) -> None:
        """Begins to gather, if no layer has in this pass. Collective. piece: [batch, piece, width]."""
        if self._whole is None:
            self._gather = self._group.begin_all_gather(piece, self._length)

    def take_gathered(self) -> torch.Tensor:
        """Returns what was gathered, [batch, length, width]. Collective; after `begin`."""
        if self._gather is not None:
            self._whole, self._layers_left, self._gather = self._gather(), self.layers, None
        whole = self._whole
        assert whole is not None
        self._layers_left -= 1
        if self._layers_left == 0:
            self._whole = None
        return whole


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        piece: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        second_gather: _SecondGather,
        out_in: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(piece, weight)
        ctx.second_gather, ctx.out_in = second_gather, out_in
        second_gather.layers += ctx.needs_input_grad[2]
        matrix, flat = weight.t() if out_in else weight, x.reshape(-1, x.shape[-1])
        y = flat.mm(matrix) if bias is None else torch.addmm(bias, flat, matrix)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        piece, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[2]:
            ctx.second_gather.begin(piece)
        if ctx.needs_input_grad[0]:
            matrix = weight if ctx.out_in else weight.t()
            grad_x = flat.mm(matrix).view(*gradient.shape[:-1], matrix.shape[1])
        if ctx.needs_input_grad[2]:
            whole = ctx.second_gather.take_gathered()
            inputs = whole.reshape(-1, whole.shape[-1]).to(flat.dtype)
            grad_weight = flat.t().mm(inputs) if ctx.out_in else inputs.t().mm(flat)
        grad_bias = flat.sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, None, grad_weight, grad_bias, None, None
