"""Clips gradients by their global norm or by value, as `torch.nn.utils` does.

Of replicated gradients (DDP's) every rank computes the same, so nothing is sent. The `.grad` of a parameter that a
ZeroOptimizer trains is cut over the ranks and answers for all of them (`zero.gradients.sharded_gradient`);
ZeroOptimizer has methods of the same names, for its shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from collectives import Communicator

from ..errors import ConfigurationError, TrainingError
from ..mesh import Mesh
from ..mesh.groups import checked_mesh, refuse_world
from ..mesh.norm import norm_over_mesh
from ..mesh.placement import refuse_other_mesh
from .scalars import values_of

Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: Mesh | None = None,
) -> float:
    """Scales gradients in place so that their norm is at most `max_norm`; returns their norm.

    parameters: a module's, one or many; those without a gradient are left out.
    norm_type: above 0, also infinity.
    error_if_nonfinite: TrainingError, with the gradients as they were, where the norm is infinite or no number;
        otherwise an infinite norm makes finite gradients 0, and one that is no number makes all so.
    mesh: needed while a mesh is open whose ranks hold different parameters: the norm is that of the whole model
        (`mesh.norm`), and the call collective over the mesh.
    """
    mesh = checked_mesh("clip_grad_norm_", None, mesh)
    if mesh is None:
        refuse_world("clip_grad_norm_", "mesh=")
    with_gradients = _with_gradients(parameters, "clip_grad_norm_")
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    if mesh is not None:
        refuse_other_mesh("clip_grad_norm_", mesh.layout, ((None, p) for p in with_gradients))
    if mesh is None or not mesh.layout.model_axes:
        norm = norm_over_shards(gradients, norm_type, None)
    else:
        norms = local_norms(gradients, check_norm_type(norm_type))
        joined = [getattr(gradient, "norm_is_over_tp", False) for gradient in gradients]  # those of a ZeroOptimizer
        norm = norm_over_mesh(norms, with_gradients, check_norm_type(norm_type), mesh, shards=False, joined=joined)
    scale_(gradients, max_norm, norm, error_if_nonfinite)
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Brings every element of gradients into -clip_value .. clip_value, in place; a NaN stays.

    parameters: a module's, one or many; those without a gradient are left out.
    """
    found = _with_gradients(parameters, "clip_grad_value_")
    clamp_([p.grad for p in found if p.grad is not None], clip_value)


def _with_gradients(parameters: Parameters, function: str) -> list[torch.Tensor]:
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for p in listed:
        if not isinstance(p, torch.Tensor):
            raise ConfigurationError(
                f"{function}: got {type(p).__name__} among the parameters; needs tensors, or a module"
            )
    return [p for p in listed if p.grad is not None]


@torch.no_grad()
def norm_over_shards(shards: Sequence[torch.Tensor], norm_type: float, comm: Communicator | None) -> float:
    """The norm of all elements of all tensors; with a Communicator, of all ranks' tensors. Collective then."""
    norm_type = check_norm_type(norm_type)
    norms = local_norms(shards, norm_type)
    infinite = math.isinf(norm_type)
    with np.errstate(all="ignore"):
        local = norms.max(initial=0.0) if infinite else (norms**norm_type).sum()
        if comm is not None:
            total = np.array([local])
            comm.all_reduce(total, "max" if infinite else "sum")
            local = total[0]
        return float(local if infinite else local ** (1.0 / norm_type))


def local_norms(tensors: Sequence[torch.Tensor], norm_type: float) -> np.ndarray:
    """The norm of each tensor, in double precision, and 0 of an empty one."""
    of_each = [
        torch.linalg.vector_norm(t, norm_type, dtype=torch.promote_types(t.dtype, torch.float32)).double()
        for t in tensors
        if t.numel()
    ]
    norms = np.zeros(len(tensors))
    norms[[t.numel() > 0 for t in tensors]] = values_of(of_each)
    return norms


@torch.no_grad()
def scale_(gradients: Sequence[torch.Tensor], max_norm: float, norm: float, error_if_nonfinite: bool = False) -> None:
    """Multiplies by max_norm / norm where that is below 1 (a norm that is not a number makes all so)."""
    if error_if_nonfinite and not math.isfinite(norm):
        raise TrainingError(f"clip_grad_norm_: the norm of the gradients is {norm}, and error_if_nonfinite is set")
    factor = _bound("max_norm", max_norm) / (norm + 1e-6)
    if not factor >= 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


@torch.no_grad()
def clamp_(gradients: Sequence[torch.Tensor], clip_value: float) -> None:
    """Brings every element into -clip_value .. clip_value."""
    bound = _bound("clip_value", clip_value)
    for gradient in gradients:
        gradient.clamp_(-bound, bound)


def check_norm_type(given: float) -> float:
    """Checks a norm's type, a number above 0, and returns it."""
    norm_type = _number(given)
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type: got {given!r}; needs a number above 0, or infinity")
    return norm_type


def _bound(name: str, given: float) -> float:
    number = _number(given)
    if not number >= 0:
        raise ConfigurationError(f"{name}: got {given!r}; needs a number of 0 or more")
    return number


def _number(given: object) -> float:
    """Converts to a float; NaN for anything else."""
    try:
        return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
