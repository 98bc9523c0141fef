"""Dropout by index: which elements are dropped does not depend on how a tensor is cut over the ranks of tp.

    seed             drawn from the default generator, one for each dropout; the same on every rank
    index            of an element in the whole tensor: heads 4..7 of [batch, 7, q, k] on rank 1, and so on
    kept             mix(seed, index) >= p * 2^64

So tp = 1, 2, 3 and 4, and sequences whole or in pieces, drop the same elements, and losses can be compared with dropout
on. The generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a number is a
function of its index. The function is SplitMix64's (Steele et al. 2014, "Fast splittable pseudorandom number
generators").

A mode of torch's functions replaces dropout and attentions with dropout while a module of the model runs,
also where an activation checkpoint runs it again in backward: `IndexedForward` runs around each module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import TrainingError
from ..mesh import Cut
from .forward_wrapper import run_around
from .tensor_parallel import TensorParallel

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as int64


def kept_elements(cut: Cut, p: float, seed: int, device: torch.device) -> torch.Tensor:
    """Draws which elements of a rank's part a dropout keeps: bool of the part's shape. p: the share that it drops."""
    mixed = _indices(cut, device).mul_(_GOLDEN).add_(seed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
    mixed.bitwise_xor_(_shifted(mixed, 31))
    return mixed >= int(p * 2**64) - 2**63 if p < 1.0 else torch.zeros_like(mixed, dtype=torch.bool)


def _indices(cut: Cut, device: torch.device) -> torch.Tensor:
    """Indices of a part's elements in the whole tensor, int64 of the part's shape."""
    total = torch.zeros(cut.part_shape, dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(cut.shape))):
        line = torch.cat([torch.arange(start, stop, device=device) for start, stop in cut.runs[dim]])
        total += (line * stride).view(-1, *[1] * (len(cut.shape) - dim - 1))
        stride *= cut.shape[dim]
    return total


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right as if unsigned: torch's shift of int64 repeats the sign."""
    return x.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _next_seed() -> int:
    return int(torch.randint(0, 1 << 62, (), device="cpu"))


class IndexedDropout(TorchFunctionMode):
    """Takes the place of torch's dropout. inside: the region of which only a part runs, without its begin."""

    def __init__(self, tp: TensorParallel, inside: str | None = None) -> None:
        super().__init__()
        self._tp, self._inside = tp, inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch, or what takes its place."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **(kwargs or {}))
        if func in _REFUSED and _REFUSED[func](args, kwargs or {}):
            raise TrainingError(
                f"dropout='by_index': got {func.__name__} with random numbers; needs torch.nn.functional.dropout or "
                "scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))

    def drop(self, x: torch.Tensor, p: float, dim: int | None = None, inplace: bool = False) -> torch.Tensor:
        """Drops a share p of the elements. dim: that of heads, if it is known."""
        if self._inside is not None:
            raise TrainingError(
                f"dropout='by_index': a part of {self._inside} runs by itself, as in an activation checkpoint "
                "within it; needs one around all of it"
            )
        kept = kept_elements(self._tp.cut_of(x, dim), p, _next_seed(), x.device)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        if inplace:
            return x.mul_(scale).masked_fill_(~kept, 0.0)
        return torch.where(kept, x * scale, 0.0)


def _dropout(
    mode: IndexedDropout, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: got the probability {p}; needs one between 0 and 1")
    if not training or p == 0.0:
        return F.dropout(input, p, training, inplace)
    return mode.drop(input, p, inplace=inplace)


def _attention(
    mode: IndexedDropout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes an attention with dropout step by step, in fp32 for 16-bit inputs."""
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = (query.to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.to(wide).mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
        shares = torch._safe_softmax(scores, -1)  # zeros for a query that sees no key
        return (mode.drop(shares, dropout_p, dim=-3) @ value.to(wide)).to(query.dtype)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda mode, input, p, train: _dropout(mode, input, p, train),
    torch.dropout_: lambda mode, input, p, train: _dropout(mode, input, p, train, inplace=True),
    F.scaled_dot_product_attention: _attention,
}

# Functions that draw random numbers otherwise, and when they do.
_REFUSED: dict[Any, Callable[[Any, Any], bool]] = {
    **{
        function: lambda args, kwargs: bool(kwargs.get("training", True)) and kwargs.get("p", 0.5) > 0.0
        for function in (
            F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
        )
    },
    F.multi_head_attention_forward: lambda args, kwargs: kwargs.get("training", True) and args[10] > 0.0,
    F.rrelu: lambda args, kwargs: bool(kwargs.get("training", args[3] if len(args) > 3 else False)),
}  # fmt: skip


class _Running(threading.local):
    """Tells whether a module of a model with dropout by index runs in this thread."""

    now = False


_RUNNING = _Running()


class IndexedForward:
    """Runs around the forward pass of a module, with dropout by index. inside: the region that the module is part of.

    Each module begins the mode if none has: autograd may run it again, in a thread of its own.
    """

    def __init__(self, tp: TensorParallel, inside: str | None) -> None:
        self._tp, self._inside = tp, inside

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the module with the mode."""
        if _RUNNING.now:
            return forward(*args, **kwargs)
        _RUNNING.now = True
        try:
            with IndexedDropout(self._tp, self._inside):
                return forward(*args, **kwargs)
        finally:
            _RUNNING.now = False


def drop_by_index(model: nn.Module, tp: TensorParallel) -> None:
    """Replaces all dropout of a model by dropout by index; call it after all cuts."""
    for name, module in model.named_modules():
        inside = next((region for region in tp.regions if name.startswith(f"{region}.")), None)
        run_around(module, tp, "Indexed", IndexedForward(tp, inside))
