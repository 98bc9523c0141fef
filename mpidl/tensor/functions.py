"""Functions of autograd at the borders between what all ranks of tp compute and what each computes a part of.

                          forward                          backward
    copy_to_region        identity                         all-reduce          f of Shoeybi et al. 2019
    sum_of_region         all-reduce                       identity            g of Shoeybi et al. 2019
    gather_to_region      all-gather of the pieces         reduce-scatter      f of Korthikanti et al. 2022
    column_product        f, or gather_to_region; product          product, then all-reduce or reduce-scatter
    row_product           product; g, or reduce-scatter            identity or all-gather, then products
    cut_sequence          this rank's piece                all-gather
    join_sequence         all-gather                       this rank's piece
    summed_gradients      identity, of parameters          all-reduce
    told_of_backward      identity                         identity

The first five stand at the ends of a region, in which each rank has a summand of the gradient; the next two where all
ranks have the whole gradient. The functions come in one order on every rank, as autograd runs the same graph there.
torch.compile leaves them out of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from .communication import Activations


@uncompiled
def copy_to_region(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """[...] -> the same. Its gradient is the sum of the ranks'."""
    return _Copy.apply(x, activations)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def sum_of_region(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """[...] -> the sum over the ranks."""
    return _Sum.apply(x, activations)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def gather_to_region(x: torch.Tensor, activations: Activations, length: int) -> torch.Tensor:
    """[batch, piece, width] -> [batch, length, width]. Its gradient is this rank's piece of the sum of the ranks'."""
    return _Gather.apply(x, activations, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def cut_sequence(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """[batch, length, width] -> [batch, piece, width]."""
    return _CutSequence.apply(x, activations)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def join_sequence(x: torch.Tensor, activations: Activations, length: int) -> torch.Tensor:
    """[batch, piece, width] -> [batch, length, width]."""
    return _JoinSequence.apply(x, activations, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def summed_gradients(parameters: Sequence[torch.Tensor], activations: Activations) -> Sequence[torch.Tensor]:
    """[...] each -> the same. Their gradients are the sums of the ranks', in one all-reduce.

    It is a part of the graph, so a gradient is summed where this graph makes it: once in each backward pass, and not
    where the same parameter is used otherwise.
    """
    return _SumOfGradients.apply(activations, *parameters)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def told_of_backward(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """[...] -> the same. A backward pass that comes here calls `call`."""
    return _Told.apply(x, call)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def column_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activations: Activations,
    *,
    out_in: bool,
    length: int | None,
) -> torch.Tensor:
    """[..., in] -> [..., out]: x @ weight + bias, of which this rank has the features of `out` that it holds.

    Backward, the sum over the ranks of the input's gradient begins before the weight's gradient is computed. out_in:
    whether the weight is [out, in], instead of [in, out]. length: of sequences of which `x` is a piece, which is
    gathered in either pass: [batch, piece, in] -> [batch, length, out]; None where x is whole.
    """
    return _ColumnProduct.apply(x, weight, bias, activations, out_in, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activations: Activations,
    *,
    out_in: bool,
    length: int | None,
    sums: Sums | None = None,
) -> torch.Tensor:
    """[..., in] -> [..., out]: x @ weight, summed over the ranks, plus the bias, which is added once.

    x, weight: this rank's features of `in`. out_in: whether the weight is [out, in], instead of [in, out]. length: of
    sequences of which the result is a piece: [batch, length, in] -> [batch, piece, out]; None for whole results.
    sums: keeps the result, or gives one that it has kept, which is the result without communication.
    """
    return _RowProduct.apply(x, weight, bias, activations, out_in, length, sums)  # type: ignore[no-any-return, no-untyped-call]


class Sums(Protocol):
    """Keeps results of row products for a second run, as `kept_sums` does."""

    def take(self) -> torch.Tensor | None:
        """The next result; None where it is to be computed."""

    def keep(self, y: torch.Tensor) -> None:
        """Keeps a result that was computed."""


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
        ctx.activations = activations
        activations.check_inputs(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.activations.sum(gradient, is_kept=False), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
        return activations.sum(x, is_kept=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Activations, length: int) -> torch.Tensor:
        ctx.activations = activations
        return activations.all_gather(x, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        batch, length, width = gradient.shape
        partial = ctx.activations.partial((gradient.numel(),), gradient)
        for part, piece in _by_piece(partial, gradient, ctx.activations, width):
            part.copy_(piece)
        return ctx.activations.reduce_scatter(partial, batch, length), None, None


class _CutSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
        ctx.activations, ctx.length = activations, x.shape[1]
        activations.check_inputs(x)
        return _own_piece(x, activations).clone()  # no view of the whole, into which the program may write

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.activations.all_gather(gradient, ctx.length), None


class _JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Activations, length: int) -> torch.Tensor:
        ctx.activations = activations
        return activations.all_gather(x, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_piece(gradient, ctx.activations).contiguous(), None, None


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Activations, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.activations = activations
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        partial = ctx.activations.partial((sum(g.numel() for g in gradients),), gradients[0])
        sizes = [g.numel() for g in gradients]
        for part, gradient in zip(partial.split(sizes), gradients, strict=True):
            part.copy_(gradient.reshape(-1))
        summed = ctx.activations.all_reduce(partial).split(sizes)
        return None, *(part.view(g.shape) for part, g in zip(summed, gradients, strict=True))


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activations: Activations,
        out_in: bool,
        length: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activations, ctx.out_in, ctx.length = activations, out_in, length
        if length is None:
            activations.check_inputs(x)
        matrix = weight.t() if out_in else weight
        if length is not None and activations.overlaps:
            return _product_by_chunks(x, matrix, bias, activations, length)
        if length is not None:
            x = activations.all_gather(x, length)
        y = x.new_empty(*x.shape[:-1], matrix.shape[1])  # no view, so that what follows may write into it
        if bias is None:
            torch.mm(rows_of(x), matrix, out=rows_of(y))
        else:
            torch.addmm(bias, rows_of(x), matrix, out=rows_of(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        activations, length = ctx.activations, ctx.length
        flat = rows_of(gradient)
        matrix = weight if ctx.out_in else weight.t()
        of_x = of_weight = of_bias = reduction = gather = None
        if ctx.needs_input_grad[1] and length is not None:
            gather = activations.begin_all_gather(x, length)
        if ctx.needs_input_grad[0] and length is None:
            partial = activations.partial((flat.shape[0], matrix.shape[1]), flat)
            torch.mm(flat, matrix, out=partial)
            reduction = activations.begin_all_reduce(partial)
        elif ctx.needs_input_grad[0]:
            of_x = _scattered_product(gradient, matrix, activations)
        if ctx.needs_input_grad[1]:
            inputs = rows_of(x if gather is None else gather())
            of_weight = flat.t().mm(inputs) if ctx.out_in else inputs.t().mm(flat)
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        if reduction is not None:
            of_x = activations.finish_all_reduce(partial, reduction).view(x.shape)
        return of_x, of_weight, of_bias, None, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activations: Activations,
        out_in: bool,
        length: int | None,
        sums: Sums | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activations, ctx.out_in, ctx.length = activations, out_in, length
        y = None if sums is None else sums.take()
        if y is not None:
            return y
        matrix = weight.t() if out_in else weight
        width = matrix.shape[1]
        if length is None:
            partial = activations.summand((*x.shape[:-1], width), x)
            torch.mm(rows_of(x), matrix, out=rows_of(partial))
            y = activations.all_reduce(partial)
        else:
            y = _scattered_product(x, matrix, activations)
        if bias is not None:
            y.add_(bias)
        if sums is not None:
            sums.keep(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.length is not None:
            gradient = ctx.activations.all_gather(gradient, ctx.length)
        flat, of_x, of_weight = rows_of(gradient), None, None
        of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None  # of whole sequences: it needs no sum over the ranks
        if ctx.needs_input_grad[0]:
            of_x = flat.mm(weight if ctx.out_in else weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = rows_of(x)
            of_weight = flat.t().mm(inputs) if ctx.out_in else inputs.t().mm(flat)
        return of_x, of_weight, of_bias, None, None, None, None


def _product_by_chunks(
    piece: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, activations: Activations, length: int
) -> torch.Tensor:
    """[batch, piece, in] -> [batch, length, out]: x @ matrix + bias of the gathered x, of which there is no copy."""
    y = piece.new_empty(piece.shape[0], length, matrix.shape[1])
    for start, tokens in activations.all_gather_by_chunks(piece, length):
        for sequence, target in zip(tokens, y, strict=True):
            rows = target[start : start + len(sequence)]
            if bias is None:
                torch.mm(sequence, matrix, out=rows)
            else:
                torch.addmm(bias, sequence, matrix, out=rows)
    return y


def _scattered_product(x: torch.Tensor, matrix: torch.Tensor, activations: Activations) -> torch.Tensor:
    """[batch, length, in] -> [batch, piece, out]: this rank's piece of the sum of x @ matrix over the ranks."""
    batch, length = x.shape[:2]
    partial = activations.partial((batch * length * matrix.shape[1],), x)
    for part, piece in _by_piece(partial, x, activations, matrix.shape[1]):
        torch.bmm(piece, matrix.expand(batch, *matrix.shape), out=part)
    return activations.reduce_scatter(partial, batch, length)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., width] -> [rows, width], also for a width of 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _own_piece(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    start, stop = activations.bounds(x.shape[1])
    return x[:, start:stop]


def _by_piece(
    partial: torch.Tensor, x: torch.Tensor, activations: Activations, width: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Lists for each rank the place of its [batch, piece, width] in `partial`, and its piece of x."""
    batch, length = x.shape[:2]
    pieces = activations.pieces(length)
    parts = partial.split([batch * n * width for n in pieces])
    return [
        (part.view(batch, n, width), piece) for part, n, piece in zip(parts, pieces, x.split(pieces, 1), strict=True)
    ]
