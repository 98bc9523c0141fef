"""Cross-entropy over parts of the vocabulary, by two all-reduces of a few numbers a token.

    largest     max over the ranks                       so that no exp overflows
    sum         of exp, and the picked logit             whatever rank has it
    gradient    probabilities - 1 at the target          of this rank's tokens, without communication

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..compiling import uncompiled
from ..errors import TrainingError
from .communication import TensorGroup
from .functions import rows_of
from .sizes import run_of
from .vocab_logits import HANDLERS, VocabLogits


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of VocabLogits, as torch.nn.functional.cross_entropy of the whole logits.

    logits: [tokens, vocabulary], [vocabulary] or, as after a transpose, [batch, vocabulary, ...].
    target: int64 [tokens], [] or [batch, ...], of the whole vocabulary.
    weight: [vocabulary].

    Raises TrainingError for a target out of range that is not ignored. Two all-reduces forward, of 3 numbers a token
    together (4 with label smoothing), none backward; in fp32 for 16-bit logits.
    """
    if isinstance(logits, VocabLogits):
        logits.group.check_inputs(target, "the targets")
    if not isinstance(logits, VocabLogits) or not _computes_on_parts(
        logits, target, weight, reduction, label_smoothing
    ):
        whole = logits.whole() if isinstance(logits, VocabLogits) else logits
        return F.cross_entropy(
            whole, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    local = rows_of(logits.local.movedim(logits.vocab_dim, -1))
    flat = target.reshape(-1)
    counted = flat != ignore_index
    wrong = counted & ((flat < 0) | (flat >= logits.tokens))
    if bool(wrong.any()):
        raise TrainingError(
            f"cross_entropy: got the target {int(flat[wrong][0])} with a vocabulary of {logits.tokens}; needs targets "
            f"in it, or ignore_index={ignore_index} where none counts"
        )
    autocast = torch.is_autocast_enabled(local.device.type)
    dtype = torch.promote_types(local.dtype, torch.float32) if autocast else local.dtype
    losses, smooth = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local, flat, counted, logits.group, logits.tokens, weight, label_smoothing > 0.0
    )
    counts = factors = counted.to(losses.dtype)
    if weight is not None:
        factors = counts * weight.to(losses.dtype)[torch.where(counted, flat, 0)]
    terms = (1.0 - label_smoothing) * factors * losses
    if label_smoothing:
        terms = terms + (label_smoothing / logits.tokens) * counts * smooth
    if reduction == "none":
        return terms.view(target.shape).to(dtype)
    total = terms.sum() if reduction == "sum" else terms.sum() / factors.sum()
    return total.to(dtype)


def _computes_on_parts(
    logits: VocabLogits, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, label_smoothing: float
) -> bool:
    """Tells whether the loss can be computed on parts; otherwise torch gets the whole logits."""
    dim = min(1, logits.dim() - 1)  # where torch looks for the vocabulary
    return (
        logits.vocab_dim == dim
        and target.dtype == torch.int64
        and target.shape == logits.shape[:dim] + logits.shape[dim + 1 :]
        and (weight is None or weight.shape == (logits.tokens,))
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
        has_smoothing: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = run_of(tokens, group.ranks, group.rank)
        wide = logits.float() if logits.element_size() < 4 else logits
        rows = wide.shape[0]
        largest_logit = wide.new_full((rows,), -torch.inf)
        if stop > start:
            torch.amax(wide, 1, out=largest_logit)
        group.reduce_rows(largest_logit, "max")
        shifted = wide - largest_logit.unsqueeze(1)
        here = counted & (target >= start) & (target < stop)
        index = torch.where(here, target - start, 0)
        # Of exp; the picked logit; weight * logit, over all tokens.
        summed = wide.new_zeros(3 if has_smoothing else 2, rows)
        if stop > start:
            summed[1] = torch.where(here, shifted.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
        weights = None if weight is None else weight[start:stop].to(wide.dtype)
        total = tokens if weight is None else weight.to(wide.dtype).sum()
        if has_smoothing:
            summed[2] = shifted.sum(1) if weights is None else shifted @ weights
        probabilities = shifted.exp_()
        summed[0] = probabilities.sum(1)
        group.reduce_rows(summed)
        probabilities /= summed[0].unsqueeze(1)
        log_sum = summed[0].log()
        ctx.save_for_backward(probabilities, index, here, counted)
        ctx.dtype, ctx.weights, ctx.total, ctx.has_smoothing = logits.dtype, weights, total, has_smoothing
        zero = log_sum.new_zeros(())
        losses = torch.where(counted, log_sum - summed[1], zero)
        smooth = torch.where(counted, total * log_sum - summed[2], zero) if has_smoothing else torch.zeros_like(losses)
        return losses, smooth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor, grad_smooth: torch.Tensor) -> tuple[Any, ...]:
        probabilities, index, here, counted = ctx.saved_tensors
        # NaN if none counts.
        grad_losses, grad_smooth = (torch.where(counted, g, 0.0) for g in (grad_losses, grad_smooth))
        gradient = probabilities * (grad_losses + grad_smooth * ctx.total).unsqueeze(1)
        if gradient.shape[1]:
            gradient.scatter_add_(1, index.unsqueeze(1), torch.where(here, -grad_losses, 0.0).unsqueeze(1))
        if ctx.has_smoothing:
            one = 1.0 if ctx.weights is None else ctx.weights
            gradient -= grad_smooth.unsqueeze(1) * one
        return gradient.to(ctx.dtype), None, None, None, None, None, None


def _cross_entropy(logits: VocabLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    return cross_entropy(logits, **given)


HANDLERS[F.cross_entropy] = _cross_entropy
