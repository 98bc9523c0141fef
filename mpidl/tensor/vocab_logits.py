"""Logits of which each rank of tp has those of some tokens, and which behave as the whole ones.

    shape, view, transpose, indices of leading dimensions, factors ...    work on the parts
    torch.nn.functional.cross_entropy                                     by `cross_entropy`, from the parts
    softmax, argmax, topk, a sum ...                                      gather them first, on every rank

So a model that computes its own loss needs no change.

Who runs what: the caller's thread gathers, at the first operation that needs whole logits. Every rank of tp must call
the same operations on them in the same order: one that rank 0 alone calls, such as a print of logits.argmax(), hangs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch

from ..errors import TrainingError
from .communication import TensorGroup
from .functions import join_features
from .sizes import run_of


class VocabLogits(torch.Tensor):
    """Logits [..., vocabulary], of which this rank has those of some tokens. `local` are these, as a plain tensor.

    The vocabulary may lie in dimension 1 as well, where torch's cross-entropy looks for it. An operation that is not
    known to work on parts gathers them first, so every rank of tp must come to it. Printing and copying take the part
    alone.

    group: the ranks of tp, among which the vocabulary is cut.
    tokens: how many the whole vocabulary has.
    vocab_dim: the dimension in which the vocabulary lies, 0 or more.
    """

    group: TensorGroup
    tokens: int
    vocab_dim: int
    _gathered: torch.Tensor | None = None

    @classmethod
    def of(cls, local: torch.Tensor, group: TensorGroup, tokens: int, dim: int = -1) -> VocabLogits:
        """Makes logits of a rank's part. local: [..., this rank's run of `tokens`], or these in dimension `dim`."""
        made = local.as_subclass(cls)
        made.group, made.tokens, made.vocab_dim = group, tokens, dim % made.dim()
        return made

    @property
    def local(self) -> torch.Tensor:
        """This rank's part: [..., own tokens]."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def whole(self) -> torch.Tensor:
        """Gathers the logits of all ranks: [..., vocabulary]. Collective."""
        last = self.local if _is_last(self) else self.local.movedim(self.vocab_dim, -1)
        gathered = join_features(last, self.group, self.tokens)
        return gathered if _is_last(self) else gathered.movedim(-1, self.vocab_dim)

    def _gathered_whole(self) -> torch.Tensor:
        """Gathers them; without gradients once for all operations, as sampling takes several."""
        if torch.is_grad_enabled():
            return self.whole()
        if self._gathered is None:
            self._gathered = self.whole()
        return self._gathered

    def with_local(self, local: torch.Tensor) -> VocabLogits:
        """Makes logits of other values of the same tokens, in the same dimension."""
        return VocabLogits.of(local, self.group, self.tokens, self.vocab_dim)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        start, stop = run_of(self.tokens, self.group.ranks, self.group.rank)
        return f"VocabLogits(shape={tuple(self.shape)}, tokens {start}..{stop} here:\n{self.local!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabLogits:
        return self.with_local(copy.deepcopy(self.local, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TrainingError(
            "VocabLogits: got a part of the logits to pickle; needs .whole() before, on every rank of tp"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        others = dict(kwargs)
        first = args[0] if args else others.pop("input", None)
        handler = HANDLERS.get(function)
        is_only = not any(isinstance(a, VocabLogits) for a in (*args[1:], *others.values()))
        if isinstance(first, VocabLogits) and is_only and handler is not None:
            result = handler(first, function, args[1:], others)
            if result is not NotImplemented:
                return result
        if function is torch.autograd.grad:
            return _gradients(function, args, kwargs)
        if _changes_in_place(function) and isinstance(first, VocabLogits):
            raise TrainingError(
                f"VocabLogits: got {function.__name__} of the logits in place, of which each rank of tp has a part; "
                "needs one that is not in place, or .whole() before"
            )
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = torch.utils._pytree.tree_map_only(VocabLogits, VocabLogits._gathered_whole, (args, kwargs))
            return function(*args, **kwargs)


# ---- operations on parts -------------------------------------------------------------------------------------------


def _gradients(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch.autograd.grad on parts: inputs and results are this rank's parts."""
    given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
    outputs, inputs = given.pop("outputs"), given.pop("inputs")
    several = [inputs] if torch.is_tensor(inputs) else list(inputs)
    outputs = torch.utils._pytree.tree_map_only(VocabLogits, VocabLogits.whole, outputs)
    with torch._C.DisableTorchFunctionSubclass():
        found = function(outputs, several, *args[2:], **given)
    return tuple(
        x.with_local(g) if isinstance(x, VocabLogits) and g is not None else g
        for g, x in zip(found, several, strict=True)
    )


def _changes_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return _IN_PLACE.fullmatch(name) is not None or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = re.compile("__(?:setitem|i(?:add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift))__")


def _on_part(keep: Callable[[VocabLogits, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
    """Makes a handler that runs a function on the parts. keep: the arguments for that, or None to gather."""

    def handler(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = keep(logits, args, kwargs)
        if changed is None:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = function(logits.local, *changed, **kwargs)
        if not torch.is_tensor(result):
            return result
        dim = logits.vocab_dim if result.dim() == logits.dim() else -1
        return VocabLogits.of(result, logits.group, logits.tokens, dim)

    return handler


def _reordered(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function that changes the order of dimensions. Those whose vocabulary comes elsewhere are gathered."""
    with torch._C.DisableTorchFunctionSubclass():
        sizes = torch.empty(*range(1, logits.dim() + 1), device="meta")  # each size tells which dimension it is of
        dim = function(sizes, *args, **kwargs).shape.index(1 + logits.vocab_dim)
        if dim not in (1, logits.dim() - 1):
            return NotImplemented
        return VocabLogits.of(function(logits.local, *args, **kwargs), logits.group, logits.tokens, dim)


def _is_last(logits: VocabLogits) -> bool:
    """Returns whether the vocabulary lies in the last dimension."""
    return logits.vocab_dim == logits.dim() - 1


def _any_arguments(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args


def _scalar_arguments(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Numbers, and tensors of one; not those that train, whose gradient is of all tokens."""
    numbers = all(
        isinstance(a, int | float | str | None) or (torch.is_tensor(a) and a.dim() == 0 and not a.requires_grad)
        for a in (*args, *kwargs.values())
    )
    return args if numbers else None


def _view_arguments(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The shape of view and reshape, whose last size is that of the vocabulary."""
    shape = args if len(args) != 1 or not isinstance(args[0], list | tuple) else tuple(args[0])
    if kwargs or not shape or not all(isinstance(n, int) for n in shape) or not _is_last(logits):
        return None
    leading = logits.shape[:-1].numel()
    if shape[-1] == -1 and torch.Size(shape[:-1]).numel() == leading:
        shape = (*shape[:-1], logits.tokens)
    if shape[-1] != logits.tokens:
        return None
    known = -torch.Size(shape[:-1]).numel()  # without the -1, if there is one
    if known > 0 and leading % known == 0:  # the part may be empty, of which torch finds no size
        shape = tuple(leading // known if n == -1 else n for n in shape)
    return ((*shape[:-1], logits.local.shape[-1]),)


def _flatten_arguments(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
    return args if _is_last(logits) and end not in (-1, logits.dim() - 1) else None


def _index_arguments(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The index of leading dimensions; a last one of `:` takes the whole vocabulary."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    is_mask = (torch.is_tensor(part) and part.dtype == torch.bool and part.dim() > 1 for part in index)
    if not _is_last(logits) or any(part is None for part in index) or any(is_mask):
        return None
    if any(part is Ellipsis for part in index):
        return args if isinstance(index[-1], slice) and index[-1] == slice(None) else None
    whole = len(index) < logits.dim() or (isinstance(index[-1], slice) and index[-1] == slice(None))
    return args if whole else None


def _shape(logits: VocabLogits, *_: Any) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        sizes = list(logits.local.shape)
    sizes[logits.vocab_dim] = logits.tokens
    return torch.Size(sizes)


def _size(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[0] if args else kwargs.get("dim")
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _ask_part(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function whose result is equal for the part and the whole: dtype, device, ..."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, *args, **kwargs)


def _grad(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _ask_part(logits, function, args, kwargs)
    return None if found is None else logits.with_local(found)


_T = torch.Tensor

# What works on parts; `cross_entropy` adds itself.
HANDLERS: dict[Any, Callable[..., Any]] = {
    _T.shape.__get__: _shape,  # type: ignore[attr-defined]
    _T.size: _size,
    _T.__len__: lambda logits, *_: _shape(logits)[0],
    _T.numel: lambda logits, *_: _shape(logits).numel(),
    _T.__repr__: lambda logits, *_: VocabLogits.__repr__(logits),
    _T.grad.__get__: _grad,  # type: ignore[union-attr]
    _T.view: _on_part(_view_arguments),
    _T.reshape: _on_part(_view_arguments),
    _T.flatten: _on_part(_flatten_arguments),
    torch.flatten: _on_part(_flatten_arguments),
    _T.__getitem__: _on_part(_index_arguments),
    **dict.fromkeys(
        (
            _T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes, _T.swapdims, torch.swapdims, _T.permute,
            torch.permute, _T.movedim, torch.movedim, _T.moveaxis, torch.moveaxis,
            _T.mT.__get__,  # type: ignore[attr-defined]
        ),
        _reordered,
    ),
    **dict.fromkeys(
        (
            _T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous, _T.clone, _T.detach, _T.cpu,
            _T.tanh, torch.tanh, _T.neg, _T.__neg__,
        ),
        _on_part(_any_arguments),
    ),
    **dict.fromkeys(
        (
            _T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.div, _T.__truediv__, torch.div, _T.add, _T.__add__,
            _T.__radd__, _T.sub, _T.__sub__,
        ),
        _on_part(_scalar_arguments),
    ),
    **dict.fromkeys(
        (
            _T.requires_grad_, _T.dim, _T.is_floating_point, _T.element_size, _T.register_hook, _T.retain_grad,
            _T.is_contiguous,
            *(
                getattr(_T, name).__get__
                for name in ("dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout", "is_cuda",
                             "is_nested", "is_sparse", "is_quantized", "is_meta")
            ),
        ),
        _ask_part,
    ),
}  # fmt: skip
