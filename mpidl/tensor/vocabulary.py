"""Embeddings, output layers and cross-entropy of which each rank of tp holds some rows of the vocabulary.

    tokens -> rows of this rank, zeros for the others -> sum over the ranks
    hidden -> logits of this rank's tokens (`VocabLogits`) -> cross-entropy, by two all-reduces of a few numbers a token

`VocabLogits` behaves as the whole logits: it has their shape, `torch.nn.functional.cross_entropy` computes its loss
from the ranks' parts, and whatever else needs them all gathers them, as sampling does. So a model that computes its own
loss needs no change. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from ..errors import ConfigurationError, TrainingError
from ..mesh import Mesh
from .assigned import keep_placements
from .communication import TensorGroup
from .functions import rows_of, sum_of_region
from .linear import cut_parameter, make_column, sizes_of
from .saving import refuse_to_save_parts
from .sizes import Run, run_of
from .tensor_parallel import TensorParallel


def make_vocabulary(name: str, layer: nn.Module, tp: TensorParallel) -> None:
    """Keeps this rank's rows of an embedding, or its tokens of an output layer."""
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise ConfigurationError(
                f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse needs all of its rows on a rank"
            )
        start, stop = run = run_of(layer.num_embeddings, tp.ranks, tp.rank)
        cut_parameter(layer.weight, 0, [run], tp)
        padding = layer.padding_idx
        tp.set(layer, "forward", _Embedding(layer, tp, run))
        tp.set(layer, "padding_idx", None if padding is None or not start <= padding < stop else padding - start)
        return
    _, tokens = sizes_of(name, layer)
    make_column(layer, tp, [run_of(tokens, tp.ranks, tp.rank)], copies_input=True)
    tp.keep(layer.register_forward_hook(_AsLogits(tp.group, tokens)))


class _Embedding:
    """The forward pass of an embedding of which this rank has a run of rows.

    A derived class may do with each row what it wants, such as scale it.
    """

    def __init__(self, layer: nn.Embedding, tp: TensorParallel, run: Run) -> None:
        self._layer, self._tp, self._run = layer, tp, run

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Integers [...] -> [..., width], the same on every rank."""
        start, stop = self._run
        self._tp.group.check_inputs(tokens)
        if tokens.device.type == "cpu":  # a GPU would wait
            _refuse_out_of_range(tokens, self._layer.num_embeddings)
        elsewhere = (tokens < start) | (tokens >= stop)
        weight = self._layer.weight
        if start == stop:
            rows = weight.sum() * weight.new_zeros(*tokens.shape, weight.shape[1])  # a gradient, also of no rows
        else:
            rows = type(self._layer).forward(self._layer, torch.where(elsewhere, 0, tokens - start))
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return sum_of_region(rows, self._tp.group)


@uncompiled
def _refuse_out_of_range(tokens: torch.Tensor, count: int) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= count)]
    if len(wrong):
        raise TrainingError(
            f"embedding: got the token {int(wrong[0])} with a vocabulary of {count}; needs tokens in it"
        )


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank of tp holds some rows; its output is the same on all.

    num_embeddings, embedding_dim: of the whole embedding; the rest as in torch.nn.Embedding. mesh: has the ranks of tp.
    Integers [...] -> [..., embedding_dim]
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, mesh: Mesh, **kwargs: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **kwargs)
        self._tensor_parallel = TensorParallel.of_layers(mesh)
        make_vocabulary("VocabParallelEmbedding", self, self._tensor_parallel)
        refuse_to_save_parts(self, self._tensor_parallel)
        keep_placements(self, self._tensor_parallel)


class _AsLogits:
    """A forward hook that makes an output layer's result VocabLogits. tokens: of the whole vocabulary."""

    def __init__(self, group: TensorGroup, tokens: int) -> None:
        self._group, self._tokens = group, tokens

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return VocabLogits.of(output, self._group, self._tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsLogits:
        return self


class VocabLogits(torch.Tensor):
    """Logits [..., vocabulary], of which this rank has those of some tokens. `local` are these, as a plain tensor.

    An operation that is not known to work on parts gathers them first, so every rank of tp must come to it. Printing
    and copying take the part alone.
    """

    _group: TensorGroup
    _tokens: int

    @classmethod
    def of(cls, local: torch.Tensor, group: TensorGroup, tokens: int) -> VocabLogits:
        """local: [..., this rank's run of `tokens`]."""
        made = local.as_subclass(cls)
        made._group, made._tokens = group, tokens
        return made

    @property
    def local(self) -> torch.Tensor:
        """[..., this rank's tokens]"""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def whole(self) -> torch.Tensor:
        """[..., vocabulary], gathered. Collective."""
        return _GatherLast.apply(self.local, self._group, self._tokens)  # type: ignore[no-any-return, no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        start, stop = run_of(self._tokens, self._group.ranks, self._group.rank)
        return f"VocabLogits(shape={tuple(self.shape)}, tokens {start}..{stop} here:\n{self.local!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabLogits:
        return VocabLogits.of(copy.deepcopy(self.local, memo), self._group, self._tokens)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TrainingError(
            "VocabLogits: got a part of the logits to pickle; needs .whole() before, on every rank of tp"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, VocabLogits) and not any(
            isinstance(a, VocabLogits) for a in (*args[1:], *kwargs.values())
        ):
            handler = _HANDLERS.get(function)
            if handler is not None:
                result = handler(first, function, args[1:], kwargs)
                if result is not NotImplemented:
                    return result
        elif function is F.cross_entropy and isinstance(kwargs.get("input"), VocabLogits) and not args:
            return _cross_entropy(kwargs.pop("input"), function, (), kwargs)
        elif function is torch.autograd.grad:
            return _gradients(function, args, kwargs)
        if _changes_in_place(function) and isinstance(first, VocabLogits):
            raise TrainingError(
                f"VocabLogits: got {function.__name__} of the logits in place, of which each rank of tp has a part; "
                "needs one that is not in place, or .whole() before"
            )
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = torch.utils._pytree.tree_map_only(VocabLogits, VocabLogits.whole, (args, kwargs))
            return function(*args, **kwargs)


# ---- operations on parts -------------------------------------------------------------------------------------------


def _cross_entropy(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    return cross_entropy(logits, **given)


def _gradients(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad, whose inputs are the parts themselves, and its results as well."""
    given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
    outputs, inputs = given.pop("outputs"), given.pop("inputs")
    several = [inputs] if torch.is_tensor(inputs) else list(inputs)
    outputs = torch.utils._pytree.tree_map_only(VocabLogits, VocabLogits.whole, outputs)
    with torch._C.DisableTorchFunctionSubclass():
        found = function(outputs, several, *args[2:], **given)
    return tuple(
        VocabLogits.of(g, x._group, x._tokens) if isinstance(x, VocabLogits) and g is not None else g
        for g, x in zip(found, several, strict=True)
    )


def _changes_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _local(keep: Callable[[VocabLogits, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
    """Makes a handler that runs a function on the parts. keep: the arguments for that, or None to gather."""

    def handler(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = keep(logits, args, kwargs)
        if changed is None:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = function(logits.local, *changed, **kwargs)
        return VocabLogits.of(result, logits._group, logits._tokens) if torch.is_tensor(result) else result

    return handler


def _as_given(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args


def _numbers_only(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Numbers, and tensors of one; not those that train, whose gradient is of all tokens."""
    numbers = all(
        isinstance(a, int | float | str | None) or (torch.is_tensor(a) and a.dim() == 0 and not a.requires_grad)
        for a in (*args, *kwargs.values())
    )
    return args if numbers else None


def _in_shape(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The shape of view and reshape, whose last size is that of the vocabulary."""
    shape = args if len(args) != 1 or not isinstance(args[0], list | tuple) else tuple(args[0])
    if kwargs or not shape or not all(isinstance(n, int) for n in shape):
        return None
    leading = logits.shape[:-1].numel()
    if shape[-1] == -1 and torch.Size(shape[:-1]).numel() == leading:
        shape = (*shape[:-1], logits._tokens)
    if shape[-1] != logits._tokens:
        return None
    known = -torch.Size(shape[:-1]).numel()  # without the -1, if there is one
    if known > 0 and leading % known == 0:  # the part may be empty, of which torch finds no size
        shape = tuple(leading // known if n == -1 else n for n in shape)
    return ((*shape[:-1], logits.local.shape[-1]),)


def _in_flatten(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
    return args if end not in (-1, logits.dim() - 1) else None


def _in_index(logits: VocabLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The index of leading dimensions; a last one of `:` takes the whole vocabulary."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(part is None or (torch.is_tensor(part) and part.dtype == torch.bool and part.dim() > 1) for part in index):
        return None
    if Ellipsis in [part for part in index if not torch.is_tensor(part)]:
        return args if isinstance(index[-1], slice) and index[-1] == slice(None) else None
    whole = len(index) < logits.dim() or (isinstance(index[-1], slice) and index[-1] == slice(None))
    return args if whole else None


def _shape(logits: VocabLogits, *_: Any) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Size((*logits.local.shape[:-1], logits._tokens))


def _size(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[0] if args else kwargs.get("dim")
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _plain(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks the part, whose answer is that of the whole: dtype, device, ..."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, *args, **kwargs)


def _grad(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _plain(logits, function, args, kwargs)
    return None if found is None else VocabLogits.of(found, logits._group, logits._tokens)


_T = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    _T.shape.__get__: _shape,  # type: ignore[attr-defined]
    _T.size: _size,
    _T.__len__: lambda logits, *_: _shape(logits)[0],
    _T.numel: lambda logits, *_: _shape(logits).numel(),
    _T.__repr__: lambda logits, *_: VocabLogits.__repr__(logits),
    _T.grad.__get__: _grad,  # type: ignore[union-attr]
    _T.view: _local(_in_shape),
    _T.reshape: _local(_in_shape),
    _T.flatten: _local(_in_flatten),
    torch.flatten: _local(_in_flatten),
    _T.__getitem__: _local(_in_index),
    **dict.fromkeys(
        (
            _T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous, _T.clone, _T.detach, _T.cpu,
            _T.tanh, torch.tanh, _T.neg, _T.__neg__,
        ),
        _local(_as_given),
    ),
    **dict.fromkeys(
        (
            _T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.div, _T.__truediv__, torch.div, _T.add, _T.__add__,
            _T.__radd__, _T.sub, _T.__sub__,
        ),
        _local(_numbers_only),
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
        _plain,
    ),
}  # fmt: skip


# ---- cross-entropy -------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of VocabLogits, as torch.nn.functional.cross_entropy of the whole logits.

    logits: [tokens, vocabulary] or [vocabulary]. target: int64 [tokens] or [], of the whole vocabulary. weight:
    [vocabulary]. Raises TrainingError for a target out of range that is not ignored. Two all-reduces forward, of 3
    numbers a token together (4 with label smoothing), none backward; in fp32 for 16-bit logits.
    """
    if isinstance(logits, VocabLogits):
        logits._group.check_inputs(target, "the targets")
    if not isinstance(logits, VocabLogits) or not _has_losses(logits, target, weight, reduction, label_smoothing):
        whole = logits.whole() if isinstance(logits, VocabLogits) else logits
        return F.cross_entropy(
            whole, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    local = rows_of(logits.local)
    flat = target.reshape(-1)
    counted = flat != ignore_index
    wrong = counted & ((flat < 0) | (flat >= logits._tokens))
    if bool(wrong.any()):
        raise TrainingError(
            f"cross_entropy: got the target {int(flat[wrong][0])} with a vocabulary of {logits._tokens}; needs targets "
            f"in it, or ignore_index={ignore_index} where none counts"
        )
    autocast = torch.is_autocast_enabled(local.device.type)
    dtype = torch.promote_types(local.dtype, torch.float32) if autocast else local.dtype
    losses, smooth = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local, flat, counted, logits._group, logits._tokens, weight, label_smoothing > 0.0
    )
    counts = factors = counted.to(losses.dtype)
    if weight is not None:
        factors = counts * weight.to(losses.dtype)[torch.where(counted, flat, 0)]
    terms = (1.0 - label_smoothing) * factors * losses
    if label_smoothing:
        terms = terms + (label_smoothing / logits._tokens) * counts * smooth
    if reduction == "none":
        return terms.view(target.shape).to(dtype)
    total = terms.sum() if reduction == "sum" else terms.sum() / factors.sum()
    return total.to(dtype)


def _has_losses(
    logits: VocabLogits, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, label_smoothing: float
) -> bool:
    """Returns whether the arguments are as for parts; torch computes with others, or refuses them, on whole logits."""
    return (
        logits.dim() <= 2
        and target.dtype == torch.int64
        and target.shape == logits.shape[:-1]
        and (weight is None or weight.shape == (logits._tokens,))
        and reduction in ("none", "mean", "sum")
        and 0.0 <= label_smoothing <= 1.0
    )


class _TokenLosses(torch.autograd.Function):
    """-log p of each target, and the sum of -weight * log p over the vocabulary; 0 where a target does not count."""

    @staticmethod
    @uncompiled
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        counted: torch.Tensor,
        group: TensorGroup,
        tokens: int,
        weight: torch.Tensor | None,
        smooths: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = run_of(tokens, group.ranks, group.rank)
        wide = logits.float() if logits.element_size() < 4 else logits
        rows = wide.shape[0]
        most = wide.new_full((rows,), -torch.inf)
        if stop > start:
            torch.amax(wide, 1, out=most)
        group.reduce_rows(most, "max")
        shifted = wide - most.unsqueeze(1)
        here = counted & (target >= start) & (target < stop)
        index = torch.where(here, target - start, 0)
        summed = wide.new_zeros(3 if smooths else 2, rows)  # of exp; the picked logit; weight * logit, over all tokens
        if stop > start:
            summed[1] = torch.where(here, shifted.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
        weights = None if weight is None else weight[start:stop].to(wide.dtype)
        total = tokens if weight is None else weight.to(wide.dtype).sum()
        if smooths:
            summed[2] = shifted.sum(1) if weights is None else shifted @ weights
        probabilities = shifted.exp_()
        summed[0] = probabilities.sum(1)
        group.reduce_rows(summed)
        probabilities /= summed[0].unsqueeze(1)
        log_sum = summed[0].log()
        ctx.save_for_backward(probabilities, index, here, counted)
        ctx.dtype, ctx.weights, ctx.total, ctx.smooths = logits.dtype, weights, total, smooths
        zero = log_sum.new_zeros(())
        losses = torch.where(counted, log_sum - summed[1], zero)
        smooth = torch.where(counted, total * log_sum - summed[2], zero) if smooths else torch.zeros_like(losses)
        return losses, smooth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor, of_smooth: torch.Tensor) -> tuple[Any, ...]:
        probabilities, index, here, counted = ctx.saved_tensors
        of_losses, of_smooth = (torch.where(counted, g, 0.0) for g in (of_losses, of_smooth))  # NaN if none counts
        gradient = probabilities * (of_losses + of_smooth * ctx.total).unsqueeze(1)
        if gradient.shape[1]:
            gradient.scatter_add_(1, index.unsqueeze(1), torch.where(here, -of_losses, 0.0).unsqueeze(1))
        if ctx.smooths:
            one = 1.0 if ctx.weights is None else ctx.weights
            gradient -= of_smooth.unsqueeze(1) * one
        return gradient.to(ctx.dtype), None, None, None, None, None, None


class _GatherLast(torch.autograd.Function):
    """[..., this rank's tokens] -> [..., vocabulary]; every rank has the whole gradient."""

    @staticmethod
    @uncompiled
    def forward(ctx: Any, local: torch.Tensor, group: TensorGroup, tokens: int) -> torch.Tensor:
        ranks = group.ranks
        ctx.run = run_of(tokens, ranks, group.rank)
        rows = rows_of(local)
        whole = local.new_empty(tokens, rows.shape[0])
        counts = [(stop - start) * rows.shape[0] for start, stop in (run_of(tokens, ranks, r) for r in range(ranks))]
        group.traffic.count_all_gather(whole)
        group.comm.all_gather(whole.view(-1), rows.t().contiguous().view(-1), counts=counts)
        return whole.t().contiguous().view(*local.shape[:-1], tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., ctx.run[0] : ctx.run[1]], None, None
