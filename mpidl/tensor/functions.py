"""Autograd functions at the borders of a region, where what all ranks of tp compute meets what each computes a part of.

                          forward                          backward
    copy_to_region        identity                         all-reduce          f of Shoeybi et al. 2019
    sum_of_region         all-reduce                       identity            g of Shoeybi et al. 2019
    gather_to_region      all-gather of the pieces         reduce-scatter      f of Korthikanti et al. 2022
    column_product        f, or gather_to_region; product          product, then all-reduce or reduce-scatter
    row_product           product; g, or reduce-scatter            identity or all-gather, then products
    cut_sequence          this rank's piece                all-gather
    join_sequence         all-gather                       this rank's piece
    cut_features          this rank's features             all-gather
    join_features         all-gather of the features       this rank's features
    summed_gradients      identity, of parameters          all-reduce
    call_in_backward      identity                         identity, and calls a function of the program

The first five are used at the borders of a region, inside which each rank has a summand of the gradient; those that cut
and join are used where all ranks have the whole gradient. Every rank runs the functions in the same order, as
autograd runs the same graph on all. torch.compile leaves them out of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from .communication import TensorGroup
from .sizes import run_of


def _without_graph() -> bool:
    """Tells whether no graph is recorded; then the wrappers, which take as long as a short product, are skipped."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def copy_to_region(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Copies x into a region: [...] -> [...]. The gradient is the sum of the ranks' gradients."""
    if _without_graph():
        group.check_inputs(x)
        return x
    return _copy_to_region(x, group)


@uncompiled
def _copy_to_region(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    return _Copy.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def sum_of_region(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Sums a region's results over the ranks: [...] -> [...]."""
    return _Sum.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def gather_to_region(x: torch.Tensor, group: TensorGroup, length: int) -> torch.Tensor:
    """Gathers pieces: [batch, piece, width] -> [batch, length, width]. Backward reduce-scatters the gradient."""
    return _Gather.apply(x, group, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def cut_sequence(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Cuts sequences to this rank's piece: [batch, length, width] -> [batch, piece, width]."""
    return _CutSequence.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def join_sequence(x: torch.Tensor, group: TensorGroup, length: int) -> torch.Tensor:
    """Joins the ranks' pieces of sequences: [batch, piece, width] -> [batch, length, width]."""
    return _JoinSequence.apply(x, group, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def cut_features(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Cuts x to this rank's features: [..., features] -> [..., own features]."""
    return _CutFeatures.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def join_features(x: torch.Tensor, group: TensorGroup, size: int) -> torch.Tensor:
    """Joins the ranks' features: [..., own features] -> [..., features]. size: number of all features."""
    return _JoinFeatures.apply(x, group, size)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def summed_gradients(parameters: Sequence[torch.Tensor], group: TensorGroup) -> Sequence[torch.Tensor]:
    """Returns the parameters as they are; backward sums their gradients over the ranks, in one all-reduce.

    It is a part of the graph, so a gradient is summed where this graph makes it: once in each backward pass, and not
    where the same parameter is used otherwise.
    """
    return _SumOfGradients.apply(group, *parameters)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def call_in_backward(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """Returns x as it is; a backward pass that reaches it calls `call`."""
    return _CallInBackward.apply(x, call)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class CutProduct:
    """The setting of a product of which each rank computes a part.

    group: the ranks.
    out_in: whether the weight is [out, in], instead of [in, out].
    length: of the sequences that are in pieces outside of the region; None where they are whole.
    """

    group: TensorGroup
    out_in: bool
    length: int | None

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight as [in, out]."""
        return weight.t() if self.out_in else weight

    def weight_gradient(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Computes the weight's gradient.

        x: [rows, in].
        gradient: of the product, [rows, out].
        """
        return gradient.t().mm(x) if self.out_in else x.t().mm(gradient)


def column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: CutProduct
) -> torch.Tensor:
    """Computes this rank's features of x @ weight + bias: [..., in] -> [..., own out].

    With sequences in pieces: [batch, piece, in] -> [batch, length, own out]; forward and backward gather the pieces.
    Backward starts to sum the input's gradient over the ranks before it computes the weight's gradient.
    """
    if _without_graph():
        return _column_product(x, weight, bias, setting)
    return _column_product_in_graph(x, weight, bias, setting)


@uncompiled
def _column_product_in_graph(*arguments: Any) -> torch.Tensor:
    return _ColumnProduct.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    setting: CutProduct,
    sums: KeepsRowSums | None = None,
) -> torch.Tensor:
    """Sums x @ weight over the ranks and adds the bias once: [..., own in] -> [..., out].

    x, weight: this rank's features of `in`. In pieces of sequences [batch, length, in] -> [batch, piece, out].
    sums: stores the result in the first run; in a second run gives it back, without communication.
    """
    if _without_graph():
        return _row_product(x, weight, bias, setting, sums)
    return _row_product_in_graph(x, weight, bias, setting, sums)


@uncompiled
def _row_product_in_graph(*arguments: Any) -> torch.Tensor:
    return _RowProduct.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class KeepsRowSums(Protocol):
    """Keeps results of row products for a second run, as `kept_sums` does."""

    def take(self) -> torch.Tensor | None:
        """The next result; None where it is to be computed."""

    def keep(self, y: torch.Tensor) -> None:
        """Keeps a result that was computed."""


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        group.check_inputs(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum(gradient, is_kept=False), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.sum(x, is_kept=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, length: int) -> torch.Tensor:
        ctx.group = group
        return group.all_gather(x, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        batch, length, width = gradient.shape
        partial = ctx.group.partial((gradient.numel(),), gradient)
        for part, piece in _by_piece(partial, gradient, ctx.group, width):
            part.copy_(piece)
        return ctx.group.reduce_scatter(partial, batch, length, width), None, None


class _CutSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        group.check_inputs(x)
        return _own_piece(x, group).clone()  # no view of the whole, into which the program may write

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_gather(gradient, ctx.length), None


class _JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, length: int) -> torch.Tensor:
        ctx.group = group
        return group.all_gather(x, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_piece(gradient, ctx.group).contiguous(), None, None


class _CutFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group, ctx.size = group, x.shape[-1]
        group.check_inputs(x)
        start, stop = run_of(x.shape[-1], group.ranks, group.rank)
        return x[..., start:stop].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather_features(gradient, ctx.group, ctx.size), None


class _JoinFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, size: int) -> torch.Tensor:
        ctx.run = run_of(size, group.ranks, group.rank)
        return _gather_features(x, group, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., ctx.run[0] : ctx.run[1]], None, None


def _gather_features(x: torch.Tensor, group: TensorGroup, size: int) -> torch.Tensor:
    rows = rows_of(x)
    whole = x.new_empty(size, rows.shape[0])
    runs = (run_of(size, group.ranks, rank) for rank in range(group.ranks))
    counts = [(stop - start) * rows.shape[0] for start, stop in runs]
    group.traffic.count_all_gather(whole)
    group.comm.all_gather(whole.view(-1), rows.t().contiguous().view(-1), counts=counts)
    return whole.t().contiguous().view(*x.shape[:-1], size)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        partial = ctx.group.partial((sum(g.numel() for g in gradients),), gradients[0])
        sizes = [g.numel() for g in gradients]
        for part, gradient in zip(partial.split(sizes), gradients, strict=True):
            part.copy_(gradient.reshape(-1))
        summed = ctx.group.all_reduce(partial).split(sizes)
        return None, *(part.view(g.shape) for part, g in zip(summed, gradients, strict=True))


class _CallInBackward(torch.autograd.Function):
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
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: CutProduct
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting = setting
        return _column_product(x, weight, bias, setting)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, length = ctx.setting.group, ctx.setting.length
        flat = rows_of(gradient)
        matrix = ctx.setting.matrix(weight).t()
        grad_x = grad_weight = grad_bias = reduction = gather = None
        if ctx.needs_input_grad[1] and length is not None:
            gather = group.begin_all_gather(x, length)
        if ctx.needs_input_grad[0] and length is None:
            partial = group.partial((flat.shape[0], matrix.shape[1]), flat)
            torch.mm(flat, matrix, out=partial)
            reduction = group.begin_all_reduce(partial)
        elif ctx.needs_input_grad[0]:
            grad_x = _scattered_product(gradient, matrix, group)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.setting.weight_gradient(rows_of(x if gather is None else gather()), flat)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        if reduction is not None:
            grad_x = group.finish_all_reduce(partial, reduction).view(x.shape)
        return grad_x, grad_weight, grad_bias, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        setting: CutProduct,
        sums: KeepsRowSums | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting = setting
        return _row_product(x, weight, bias, setting, sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        setting = ctx.setting
        if setting.length is not None:
            gradient = setting.group.all_gather(gradient, setting.length)
        flat, grad_x, grad_weight = rows_of(gradient), None, None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None  # of whole sequences: needs no sum over the ranks
        if ctx.needs_input_grad[0]:
            grad_x = flat.mm(setting.matrix(weight).t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = setting.weight_gradient(rows_of(x), flat)
        return grad_x, grad_weight, grad_bias, None, None


def _column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: CutProduct
) -> torch.Tensor:
    group, length, matrix = setting.group, setting.length, setting.matrix(weight)
    if length is None:
        group.check_inputs(x)
    if length is not None and group.overlaps:
        return _product_by_chunks(x, matrix, bias, group, length)
    if length is not None:
        x = group.all_gather(x, length)
    y = x.new_empty(*x.shape[:-1], matrix.shape[1])  # no view, so that what follows may write into it
    if bias is None:
        torch.mm(rows_of(x), matrix, out=rows_of(y))
    else:
        torch.addmm(bias, rows_of(x), matrix, out=rows_of(y))
    return y


def _row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: CutProduct, sums: KeepsRowSums | None
) -> torch.Tensor:
    y = None if sums is None else sums.take()
    if y is not None:
        return y
    group, matrix = setting.group, setting.matrix(weight)
    if setting.length is None:
        partial = group.summand((*x.shape[:-1], matrix.shape[1]), x)
        torch.mm(rows_of(x), matrix, out=rows_of(partial))
        y = group.all_reduce(partial)
    else:
        y = _scattered_product(x, matrix, group)
    if bias is not None:
        y.add_(bias)
    if sums is not None:
        sums.keep(y)
    return y


def _product_by_chunks(
    piece: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: TensorGroup, length: int
) -> torch.Tensor:
    """Computes gathered x @ matrix + bias by chunks, without a copy of the gathered x: -> [batch, length, out]."""
    y = piece.new_empty(piece.shape[0], length, matrix.shape[1])
    for start, tokens in group.all_gather_by_chunks(piece, length):
        for sequence, target in zip(tokens, y, strict=True):
            rows = target[start : start + len(sequence)]
            if bias is None:
                torch.mm(sequence, matrix, out=rows)
            else:
                torch.addmm(bias, sequence, matrix, out=rows)
    return y


def _scattered_product(x: torch.Tensor, matrix: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Sums x @ matrix over the ranks and returns this rank's piece: [batch, length, in] -> [batch, piece, out]."""
    batch, length = x.shape[:2]
    partial = group.partial((batch * length * matrix.shape[1],), x)
    for part, piece in _by_piece(partial, x, group, matrix.shape[1]):
        torch.bmm(piece, matrix.expand(batch, *matrix.shape), out=part)
    return group.reduce_scatter(partial, batch, length, matrix.shape[1])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Flattens to rows: [..., width] -> [rows, width], also for a width of 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _own_piece(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    start, stop = group.piece_bounds(x.shape[1])
    return x[:, start:stop]


def _by_piece(
    partial: torch.Tensor, x: torch.Tensor, group: TensorGroup, width: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Lists for each rank the place of its [batch, piece, width] in `partial`, and its piece of x."""
    batch, length = x.shape[:2]
    pieces = group.piece_lengths(length)
    parts = partial.split([batch * n * width for n in pieces])
    return [
        (part.view(batch, n, width), piece) for part, n, piece in zip(parts, pieces, x.split(pieces, 1), strict=True)
    ]
