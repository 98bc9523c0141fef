"""Column-parallel layers of a region on whole sequences, which share one input and one sum of its gradient.

    forward    x ──┬─ q       backward   v   begins this rank's summand of x's gradient
                   ├─ k                  k   adds to it
                   └─ v                  q   adds to it, into symmetric memory; the ranks begin to sum it over tp;
                                             q's weight's gradient is computed; the sum is there

So there is one all-reduce, beside a product. What else in the region uses x, in a way that these layers do not see, has
its gradient summed by another. A backward pass that leaves some of the layers out sums what the others gave when it
comes to x. All of that is decided by the graph, which is the same on every rank of tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from .communication import TensorGroup
from .functions import CutProduct, rows_of


class SharedInput:
    """The input of a region. x: the tensor that was given, the same on all ranks, whose gradient is the ranks' sum."""

    def __init__(self, x: torch.Tensor, group: TensorGroup) -> None:
        self._group, self._sum = group, _GradientSum(group)
        self.x: torch.Tensor = _Share.apply(x, self._sum)  # type: ignore[no-untyped-call]

    @uncompiled
    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out_in: bool
    ) -> torch.Tensor:
        """[..., in] -> [..., this rank's features]. x: `self.x`, in the weight's dtype.

        out_in: whether the weight is [out, in], instead of [in, out].
        """
        setting = CutProduct(self._group, out_in, None)
        return _Product.apply(self.x, x.detach(), weight, bias, self._sum, setting)  # type: ignore[no-any-return, no-untyped-call]


class _GradientSum:
    """The gradient of a shared input in one backward pass: a summand, [rows, width], that becomes the ranks' sum.

    layers: of the forward pass, all of which give to it.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self.layers = 0
        self._pass = -1
        self._given = 0  # layers that have, in this pass
        self._summand: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def begin(self, gradient: torch.Tensor, matrix: torch.Tensor) -> Any:
        """Adds gradient @ matrix. The last layer begins the sum over the ranks: what it returns is for `finish`."""
        self._enter_pass()
        self._given += 1
        before, self._summand = self._summand, None
        if self._given < self.layers:
            self._summand = gradient.mm(matrix) if before is None else before.addmm_(gradient, matrix)
            return None
        partial = self._group.partial((len(gradient), matrix.shape[1]), gradient)
        if before is None:
            torch.mm(gradient, matrix, out=partial)
        else:
            torch.addmm(before, gradient, matrix, out=partial)
        return partial, self._group.begin_all_reduce(partial)

    def finish(self, begun: Any) -> None:
        """Waits for the sum."""
        self._total = self._group.finish_all_reduce(*begun)

    def take(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the sum of what the layers gave, and of a gradient, [..., width], that the ranks have besides."""
        self._enter_pass()
        total, summand = self._total, self._summand
        self._total = self._summand = None
        self._given = 0
        if summand is not None:  # some layers had no part in the pass
            gradient = summand if gradient is None else gradient + summand.view(gradient.shape)
        if gradient is None:
            return total
        besides = self._group.sum(gradient, is_kept=False)
        return besides if total is None else besides + total.view(besides.shape)

    def _enter_pass(self) -> None:
        """Forgets what an earlier pass has left, which came to some of the layers alone."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass, self._given, self._summand, self._total = current, 0, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient_sum: _GradientSum) -> torch.Tensor:
        ctx.gradient_sum, ctx.shape, ctx.dtype = gradient_sum, x.shape, x.dtype
        ctx.set_materialize_grads(False)
        gradient_sum._group.check_inputs(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        total = ctx.gradient_sum.take(gradient)
        return None if total is None else total.view(ctx.shape).to(ctx.dtype), None


class _Product(torch.autograd.Function):
    """The product of a layer. Its input's gradient goes by the sum, and not along the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        shared: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_sum: _GradientSum,
        setting: CutProduct,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_sum, ctx.setting = gradient_sum, setting
        gradient_sum.layers += ctx.needs_input_grad[0]
        matrix, flat = setting.matrix(weight), rows_of(x)
        y = x.new_empty(*x.shape[:-1], matrix.shape[1])
        if bias is None:
            torch.mm(flat, matrix, out=rows_of(y))
        else:
            torch.addmm(bias, flat, matrix, out=rows_of(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = rows_of(gradient)
        begun = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            begun = ctx.gradient_sum.begin(flat, ctx.setting.matrix(weight).t())
        if ctx.needs_input_grad[2]:
            of_weight = ctx.setting.of_weight(rows_of(x), flat)
        if ctx.needs_input_grad[3]:
            of_bias = flat.sum(0)
        if begun is not None:
            ctx.gradient_sum.finish(begun)
        return None, None, of_weight, of_bias, None, None
