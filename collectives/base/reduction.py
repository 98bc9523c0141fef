"""Reduction operators and their kernels. fp16 and bf16 accumulate in fp32 and are rounded once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, ArgumentTypeError
from .buffers import DTYPES, Buffer, DType, address, copy
from .scratch import Scratch

Array = np.ndarray[Any, Any]
BoundCall = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments
_WIDE = DTYPES["float32"]
_BLOCK_BYTES = 128 << 10  # of each array in a block: what is read and written of it stays in the cache
_WIDE_BLOCK_BYTES = 256 << 10  # of a block in fp32; a call of torch's costs more than one of numpy's
_DOT_ELEMENTS = 8192  # of which BLAS makes a dot product without threads of its own

KERNELS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "premul_sum": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
BITWISE = frozenset({"band", "bor", "bxor"})
OPERATIONS = frozenset({"all_reduce", "reduce_scatter", "reduce", "scan", "exscan"})  # that take an operator
PREFIXES = ("scan", "exscan")  # which reduce on each rank another number of inputs
_NAMES = "sum, avg, min, max, prod, band, bor, bxor, PremulSum(factor)"


@dataclass(frozen=True)
class PremulSum:
    """The operator that adds up factor * x; each rank has a factor of its own. For `op=`."""

    factor: float

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "factor", float(self.factor))
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"op: got PremulSum({self.factor!r}); needs a number as its factor") from None


@dataclass(frozen=True, eq=False)
class Reduction:
    """A checked operator, the same object for all calls that give the same.

    factor: what this rank's contribution is multiplied by before it is added.
    partial: whether more is still to be reduced, so that results stay in the accumulating dtype, neither averaged nor
        rounded; `finish` does that then.
    """

    name: str
    factor: float = 1.0
    partial: bool = False

    @property
    def averages(self) -> bool:
        """Returns whether what is accumulated is divided in the end."""
        return self.name == "avg" and not self.partial

    @property
    def premultiplied(self) -> bool:
        """Returns whether contributions are multiplied by factors first."""
        return self.name == "premul_sum"

    def combine_two(self, first: Array, second: Array, out: Array) -> None:
        """out = first (op) second, elementwise, all in the accumulating dtype; out may be either."""
        KERNELS[self.name](first, second, out=out)

    def start(self, data: Buffer, out: Array) -> None:
        """out = this rank's contribution, in the accumulating dtype."""
        if data.dtype.widened:
            Buffer(out, _WIDE).as_torch().copy_(data.as_torch())
        else:
            copy(data.flat, out)
        if self.premultiplied:
            np.multiply(out, out.dtype.type(self.factor), out=out)

    def finish(self, accumulated: Array, ranks: int, out: Buffer) -> None:
        """out = the complete reduction: divided by the number of ranks for avg, rounded to the element type."""
        if self.name == "avg" and ranks > 1:
            divide, by = mean_kernel(accumulated.dtype, ranks)
            divide(accumulated, by, accumulated)
        if out.dtype.widened:
            out.as_torch().copy_(Buffer(accumulated, _WIDE).as_torch())
        else:
            copy(accumulated, out.flat)

    def combine(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: DType,
        factors: Sequence[float],
        blocks: Scratch | None = None,
    ) -> None:
        """Each of outputs = inputs[0] (op) inputs[1] (op) ..., in this order, block by block; see `calls`."""
        for function, arguments in self.calls(inputs, outputs, dtype, factors, blocks or Scratch()):
            function(*arguments)

    def calls(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: DType,
        factors: Sequence[float],
        blocks: Scratch,
    ) -> list[BoundCall]:
        """The calls that make `combine`.

        An output may be the memory of an input, unless it has another dtype, as those of a partial reduction may.
        factors: of all inputs, for a premultiplied sum.
        blocks: memory that the calls may use while they run.
        """
        if dtype.widened:
            return self._widened_calls(inputs, outputs, dtype, factors, blocks)
        kernel, size = _NUMPY_KERNELS[self.name], _BLOCK_BYTES // dtype.itemsize
        block, other = (blocks.take(name, _BLOCK_BYTES).view(dtype.storage) for name in ("combined", "multiplied"))
        divide, by = mean_kernel(dtype.storage, len(inputs))
        calls: list[BoundCall] = []
        for start in range(0, inputs[0].size, size):
            parts = [array[start : start + size] for array in inputs]
            first, length = outputs[0][start : start + size], parts[0].size
            done, accumulated = parts[0], block[:length]
            if self.premultiplied:
                calls.append((np.multiply, (done, dtype.storage.type(factors[0]), accumulated)))
                done = accumulated
            for number, part in enumerate(parts[1:], 1):
                if self.premultiplied:
                    calls.append((np.multiply, (part, dtype.storage.type(factors[number]), other[:length])))
                    part = other[:length]
                # Not into `first` before the end, as it may be one of the inputs still to come.
                target = first if number == len(parts) - 1 else accumulated
                calls.append((kernel, (done, part, target)))
                done = target
            if address(done) != address(first):
                calls.append((np.copyto, (first, done)))
            if self.averages and len(parts) > 1:
                calls.append((divide, (first, by, first)))
            calls += [(np.copyto, (output[start : start + size], first)) for output in outputs[1:]]
        return calls

    def _widened_calls(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: DType,
        factors: Sequence[float],
        blocks: Scratch,
    ) -> list[BoundCall]:
        """The calls that compute in fp32; torch's kernels convert, as numpy's know no bf16 and are slow on fp16."""
        sources = [Buffer(a, dtype).as_torch() for a in inputs]
        target = Buffer(outputs[0], _WIDE if self.partial else dtype).as_torch()
        size = _WIDE_BLOCK_BYTES // 4
        block, other = (blocks.take(f"wide {name}", _WIDE_BLOCK_BYTES).view(np.float32) for name in range(2))
        kernel = _NUMPY_KERNELS[self.name]
        rounds_once = len(sources) == 2 and self.name in _TORCH_KERNELS and not self.partial
        divide, by = mean_kernel(_WIDE.storage, len(inputs))
        calls: list[BoundCall] = []
        for start in range(0, inputs[0].size, size):
            stop = min(start + size, inputs[0].size)
            accumulated, received = block[: stop - start], other[: stop - start]
            if rounds_once:  # torch's own adds two in fp32 and rounds once
                pair = (source[start:stop] for source in sources)
                calls.append((_TORCH_KERNELS[self.name], (*pair, target[start:stop])))
            else:
                for rank, source in enumerate(sources):
                    wide = received if rank else accumulated
                    calls.append((torch.Tensor.copy_, (torch.from_numpy(wide), source[start:stop])))
                    if self.premultiplied:
                        calls.append((np.multiply, (wide, np.float32(factors[rank]), wide)))
                    if rank:
                        calls.append((kernel, (accumulated, received, accumulated)))
                if self.averages and len(sources) > 1:
                    calls.append((divide, (accumulated, by, accumulated)))
                calls.append((torch.Tensor.copy_, (target[start:stop], torch.from_numpy(accumulated))))
            calls += [(np.copyto, (output[start:stop], outputs[0][start:stop])) for output in outputs[1:]]
        return calls


def unify_nans(x: Array) -> None:
    """Makes every NaN of x the same bits; for results that several ranks compute, each for itself.

    Which of two NaNs a sum or product gives depends on the order in which compilers put the operands of an instruction.
    No number's square is NaN, so that the dot product of x with itself shows in one quick pass whether x holds one.

    x: one-dimensional and contiguous; where its elements are no floating-point numbers nothing is done.
    """
    if x.dtype.kind == "c":
        x = x.view(x.real.dtype)
    elif x.dtype.kind != "f":
        return
    if x.size <= _DOT_ELEMENTS:
        found = x.dot(x)
        if found != found:
            x[np.isnan(x)] = np.nan
        return
    for start in range(0, x.size, _DOT_ELEMENTS):
        unify_nans(x[start : start + _DOT_ELEMENTS])


def mean_kernel(dtype: np.dtype[Any], ranks: int) -> tuple[Callable[..., Any], Any]:
    """The kernel that makes a sum a mean, and its second argument: to multiply is faster, and exact for powers of 2."""
    if dtype.kind == "f" and ranks & (ranks - 1) == 0:
        return np.multiply, dtype.type(1 / ranks)
    return np.divide, ranks


def _into(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with its output as the third argument, as most of numpy's have it."""
    return lambda first, second, out: kernel(first, second, out=out)


_NUMPY_KERNELS = {**KERNELS, "min": _into(np.minimum), "max": _into(np.maximum)}


_TORCH_KERNELS: dict[str, Callable[..., Any]] = {
    "sum": _into(torch.add),
    "min": _into(torch.minimum),
    "max": _into(torch.maximum),
    "prod": _into(torch.mul),
}


def check(op: Any, dtype: DType) -> Reduction:
    """The operator, if it is one and makes sense on the element type.

    avg and PremulSum need floating-point or complex numbers; min and max need numbers with an order; band, bor and bxor
    (and, or, exclusive or of each bit) need integers or bool. On bool, sum and max are "or", prod and min are "and". A
    NaN in any contribution to min or max gives NaN.
    """
    if isinstance(op, str):
        return _check(op, dtype)
    if isinstance(op, PremulSum):
        if dtype.kind not in "fc":
            raise ArgumentTypeError(f"op: got {op} on {dtype.name}; a premultiplied sum needs a floating-point dtype")
        return _premultiplied(op.factor)
    raise ArgumentTypeError(f"op: got {op!r}; needs one of {_NAMES}")


@lru_cache
def partial_of(op: Reduction) -> Reduction:
    """The operator for a part of a larger reduction; see Reduction."""
    return Reduction(op.name, op.factor, partial=True)


def operator_on_partials(op: Reduction) -> Reduction:
    """The operator that is left for the results of the partial one, in the accumulating dtype."""
    return _check("sum", _WIDE) if op.name in ("avg", "premul_sum") else op


@lru_cache
def _check(op: str, dtype: DType) -> Reduction:
    if op not in KERNELS or op == "premul_sum":
        raise ArgumentError(f"op: got {op!r}; needs one of {_NAMES}")
    if op == "avg" and dtype.kind not in "fc":
        raise ArgumentTypeError(
            f"op: got 'avg' on {dtype.name}; an average needs a floating-point dtype, or op='sum' and then a division "
            "by the number of ranks, such as x // comm.size"
        )
    if op in BITWISE and dtype.kind not in "iub":
        raise ArgumentTypeError(f"op: got {op!r} on {dtype.name}; an operator on bits needs integers or bool")
    if op in ("min", "max") and dtype.kind == "c":
        raise ArgumentTypeError(f"op: got {op!r} on {dtype.name}; complex numbers have no order")
    return Reduction(op)


@lru_cache
def _premultiplied(factor: float) -> Reduction:
    return Reduction("premul_sum", factor)
