"""The norm of a whole model's gradients over a mesh: every element of the plain model counts once.

Each rank sums the powers of its gradients, by placement; one all-gather gives every rank the table

    rank (pp, dp x cp, tp)    none  tp  pp  pp+tp
    0    (0, 0, 0)             a    b
    1    (0, 0, 1)             a    c                from which all compute the same norm: a + b + c

A last column has the norm's type, which must be the same on all ranks. Along an axis of their placement the ranks' sums
are added; along the others they must be equal, and one of them counts.
Where they are not, a gradient was not summed over tp, or a placement was not declared: an error, as the ranks' weights
would diverge silently. The table is ranks x (placements + 1), 8 bytes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, combinations

import numpy as np
import torch

from ..errors import ModelMismatch, TrainingError
from .mesh import Mesh
from .placement import Placement, placement

_TOLERANCE = 1e-3  # of sums of powers that should be equal; a shard's norm is in fp32
_FIRST, _EVERY = 10, 10  # compared in the first 10 steps, then in every 10th


def norm_over_mesh(
    local_norms: Iterable[float],
    parameters: Iterable[torch.Tensor],
    norm_type: float,
    mesh: Mesh,
    *,
    shards: bool,
    counted: bool = True,
    joined: Iterable[bool] | None = None,
) -> float:
    """Computes the norm of all gradients of the model. Collective over the mesh, also for ranks without gradients.

    local_norms: of each parameter's gradient on this rank.
    shards: these are of parts, cut over dp x cp; else every rank of dp x cp (of edp, for experts) has the whole
        gradient.
    counted: False for shards that other ranks hold too.
    joined: of each parameter, whether its norm is that of all parts over tp already.
    """
    axes = mesh.layout.model_axes
    placements = [frozenset(some) for some in chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1))]
    infinite = math.isinf(norm_type)
    row = np.array([*np.zeros(len(placements)), norm_type])
    with np.errstate(all="ignore"):
        listed = list(parameters)
        for norm, p, whole in zip(local_norms, listed, joined or [False] * len(listed), strict=True):
            declared = placement(p)
            if whole:
                others = declared.axes - {"tp"}
                declared = Placement(others, declared.counted or not others)
            if declared.counted and counted:
                column = placements.index(declared.axes & set(axes))
                row[column] = max_or_nan(row[column], norm) if infinite else row[column] + norm**norm_type
        table = np.empty((mesh.comm.size, len(row)))
        mesh.comm.all_gather(table, row)
        _refuse_different_types(table[:, -1])
        total = _total(table[:, :-1], placements, mesh, shards=shards, infinite=infinite)
        return total if infinite else float(total ** (1.0 / norm_type))


def _refuse_different_types(types: np.ndarray) -> None:
    """Raises ModelMismatch, on every rank, if the ranks ask for norms of different types."""
    differing = np.flatnonzero(types != types[0])
    if differing.size:
        rank = int(differing[0])
        raise ModelMismatch(
            f"clip_grad_norm_: rank 0 has norm_type={types[0]:g}, rank {rank} has norm_type={types[rank]:g}; needs the "
            "same on all ranks of the mesh"
        )


def max_or_nan(a: float, b: float) -> float:
    """Returns the larger one; NaN if either is."""
    return float(np.maximum(a, b))


def _total(table: np.ndarray, placements: list[frozenset[str]], mesh: Mesh, *, shards: bool, infinite: bool) -> float:
    layout = mesh.layout
    join = np.max if infinite else np.sum
    grid = table[list(layout.ranks)].reshape(layout.pp, layout.edp, layout.ep, layout.tp, len(placements))
    total = 0.0
    for number, axes in enumerate(placements):
        column = grid[..., number]
        if shards:
            points = join(column, axis=(1, 2))
        elif "ep" in axes:
            points = join(column[:, 0], axis=1)
        else:
            points = column[:, 0, 0]
        for index, axis in enumerate(("pp", "tp")):
            if axis in axes:
                points = join(points, axis=index, keepdims=True)
            else:
                check_equal(points, points.take([0], index), axis, mesh, "clip_grad_norm_")
                points = np.max(points, axis=index, keepdims=True)  # infinite, or NaN, if one is
        total = max_or_nan(total, points.item()) if infinite else total + points.item()
    return float(total)


def is_compared(step: int) -> bool:
    """Returns whether replicated gradients are compared before an optimizer's step, counted from 1."""
    return step <= _FIRST or step % _EVERY == 0


def differ(points: np.ndarray, first: np.ndarray, tolerance: float = _TOLERANCE) -> bool:
    """Returns whether sums of powers, which should be equal, differ; one that is not finite differs from none."""
    both = np.isfinite(points) & np.isfinite(first)
    with np.errstate(invalid="ignore"):
        return bool((both & ~np.isclose(points, first, rtol=tolerance, atol=0.0)).any())


def check_equal(points: np.ndarray, first: np.ndarray, axis: str, mesh: Mesh, what: str) -> None:
    """Raises TrainingError, in the name of `what`, if sums differ over an axis on which gradients must be equal."""
    if differ(points, first):
        raise TrainingError(
            f"{what}: gradients of parameters that are not cut over {axis} differ over its "
            f"{mesh.size(axis)} ranks; sum them over {axis}, or declare where the parameters are cut "
            f"(mpidl.mesh.place(p, {axis!r}))"
        )
