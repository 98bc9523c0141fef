"""Clips, unscales, searches and clears a ZeroOptimizer's reduced gradients, between backward passes and the step.

Every rank holds its shards of the mean over the ranks. A norm is a sum over all shards. A rank makes a change on its
own shards. Clipping is noted by `GradAttributes`, so that the step refuses clipping that differs over the ranks;
unscaling is not.

Where the optimizer updates whole parameters (OneBitAdam), every rank has whole buckets, of means or of its own
gradients. Norms and changes are then of what it has.
"""

from __future__ import annotations

import numpy as np
import torch

from ...errors import TrainingError
from ...gradients.clip import check_norm_type, clamp_, local_norms, norm_over_shards, scale_
from ...gradients.nonfinite import NonfiniteWatch, are_finite
from ...mesh.experts import refuse_norm_of_one
from ...mesh.norm import norm_over_mesh
from ...module_tensors import parameters_in
from ..optimizer_parts import Parts
from ..slices import Slice


def clear(parts: Parts, nonfinite: NonfiniteWatch | None, set_to_none: bool) -> None:
    """Forgets the gradients; set_to_none=False: makes them zeros. nonfinite: what watches their values."""
    kept = {} if set_to_none else parts.grad_attributes.with_gradient()
    parts.reduced_gradients.clear()
    parts.grad_attributes.clear()
    if parts.compressed is not None:
        parts.compressed.forget_gradients()
    if nonfinite is not None:
        nonfinite.clear()
    for part in parts.slices.values():
        part.values.grad = None
    for p in parameters_in(parts.model) if set_to_none else parts.slices:
        p.grad = None
    if not set_to_none:
        parts.grad_attributes.show_zeros(kept)


def clip_norm(parts: Parts, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
    """Scales the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
    refuse_consumed(parts, "clip_grad_norm_")
    if parts.mesh is not None:
        refuse_norm_of_one(parts.mesh, parts.divisor)
    parts.parameters.release()
    parts.reduced_gradients.promote_to_fp32()
    shards = _own_gradients(parts)
    if parts.inner.updates_wholes:
        norm = norm_over_shards(shards, norm_type, None)
    elif parts.mesh is None or not parts.mesh.layout.model_axes:
        counted = shards
        if parts.shard_reducer.hook is not None:  # between parameters there may be other values than zeros then
            counted = [part.view_in(shards[part.number]) for part in _reached(parts).values()]
        norm = norm_over_shards(counted, norm_type, parts.shard_group.shard_comm)
    else:
        power, reached = check_norm_type(norm_type), _reached(parts)
        norms = local_norms([part.view_in(shards[part.number]) for part in reached.values()], power)
        norm = norm_over_mesh(norms, reached, power, parts.mesh, shards=True, counted=parts.shard_group.has_root)
    scale_(shards, max_norm, norm, error_if_nonfinite)
    parts.grad_attributes.note(f"clip_grad_norm_(max_norm={float(max_norm)}, norm_type={float(norm_type)})")
    return norm


def clip_value(parts: Parts, limit: float) -> None:
    """Brings every element of the gradients into -limit .. limit."""
    refuse_consumed(parts, "clip_grad_value_")
    parts.reduced_gradients.promote_to_fp32()
    clamp_(_own_gradients(parts), limit)
    parts.grad_attributes.note(f"clip_grad_value_({float(limit)})")


def unscale(parts: Parts, inverse_scale: float) -> bool:
    """Multiplies the gradients, 16-bit ones in fp32 from here on; returns whether one of this rank was not finite."""
    refuse_consumed(parts, "unscale_")
    parts.parameters.release()
    parts.reduced_gradients.promote_to_fp32()
    shards = _own_gradients(parts)
    for shard in shards:
        shard.mul_(inverse_scale)
    return not all(are_finite(shards))


def find_nonfinite(parts: Parts, nonfinite: NonfiniteWatch | None) -> list[tuple[str, int | None]] | None:
    """Names the parameters whose gradients are not finite, with the rank if `nonfinite` has seen it. Collective."""
    parts.parameters.release()
    watched = None if nonfinite is None else nonfinite.find(parts.comm)
    if watched is not None or parts.backward_steps is not None:
        return None if watched is None else [*watched]
    reduced = _own_gradients(parts)
    if parts.inner.updates_wholes:
        views: dict[torch.nn.Parameter, torch.Tensor] = {}
        for shard, flat in zip(parts.shards, reduced, strict=True):
            shapes = [p.shape for p in shard.parameters]
            views |= dict(zip(shard.parameters, shard.layout.views(flat, shapes), strict=True))
        fine = are_finite(views[p] for p in parts.slices)
    else:
        fine = are_finite(part.view_in(reduced[part.number]) for part in parts.slices.values())
    flags = np.array([not each for each in fine], np.uint8)
    parts.comm.all_reduce(flags, "max")
    found = [p for p, flag in zip(parts.slices, flags, strict=True) if flag]
    return [(name, None if parts.comm.size > 1 else 0) for name in parts.names_of(found)] or None


def refuse_consumed(parts: Parts, what: str) -> None:
    """Raises TrainingError where the backward pass has used the gradients up, which `what` would see."""
    if parts.backward_steps is not None:
        raise TrainingError(
            f"{what}: with step_in_backward the backward pass has made the step, and no gradient is left that "
            f"{what} could see; make the ZeroOptimizer without it"
        )


def _reached(parts: Parts) -> dict[torch.nn.Parameter, Slice]:
    """The slices of parameters that have a gradient; in others a hook may leave what compression had not sent."""
    flags = {
        p: flag
        for number, shard in enumerate(parts.shards)
        for p, flag in zip(shard.parameters, parts.reduced_gradients.reached(number), strict=True)
    }
    return {p: part for p, part in parts.slices.items() if flags[p]}


def _own_gradients(parts: Parts) -> list[torch.Tensor]:
    """The gradients on which this rank acts: its shards, or whole buckets where its step updates whole parameters."""
    parts.grad_attributes.update()
    take = parts.reduced_gradients.whole if parts.inner.updates_wholes else parts.reduced_gradients.shard
    return [take(number) for number in range(len(parts.shards))]
