"""Checks that all ranks of tp have the same model (`parallelize`), and the same inputs (with MPIDL_DEBUG=1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from collectives import Communicator

from ..errors import ModelMismatch, TrainingError
from ..job.objects import all_gather_object


def refuse_different_inputs(comm: Communicator, x: torch.Tensor, what: str) -> None:
    """Raises TrainingError on every rank if `x` is not the same on all. what: names it. Collective."""
    everyone = all_gather_object(comm, (tuple(x.shape), *sums_of(x)))
    for rank, other in enumerate(everyone):
        if repr(other) != repr(everyone[0]):  # NaN equals NaN there
            raise TrainingError(
                f"tensor parallelism: {what} of rank {rank} of tp, of shape {other[0]}, differ from those of rank "
                f"0, of shape {everyone[0][0]}; needs the same on all: give `mesh=` to the sampler or loader"
            )


def refuse_different_arguments(comm: Communicator, arguments: Mapping[str, Any]) -> None:
    """Raises ModelMismatch on every rank if a rank has given other arguments to `parallelize`. Collective.

    arguments: by name; equal ones print in the same way.
    """
    everyone = all_gather_object(comm, {name: repr(value) for name, value in arguments.items()})
    for rank, theirs in enumerate(everyone):
        for name, given in theirs.items():
            if given != everyone[0][name]:
                raise ModelMismatch(
                    f"parallelize: {name}: got {everyone[0][name]} on rank 0 of tp and {given} on rank {rank}; needs "
                    "the same on all"
                )


def refuse_different_models(comm: Communicator, model: nn.Module, styles: Any) -> None:
    """Raises ModelMismatch on every rank if a rank has another model, or styles for it. Collective.

    Names, shapes, dtypes and what is frozen are compared, and with MPIDL_DEBUG=1 values as well.
    """
    values = comm.is_debugging
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = {
        name: (tuple(t.shape), str(t.dtype), t.requires_grad, *(sums_of(t) if values and not t.is_meta else ()))
        for name, t in tensors
    }
    for rank, (theirs, _) in enumerate(everyone := all_gather_object(comm, (own, styles))):
        first = everyone[0][0]
        name = next((n for n in {**first, **theirs} if repr(first.get(n)) != repr(theirs.get(n))), None)
        if name is not None:
            raise ModelMismatch(
                f"parallelize: {name} of rank {rank} of tp {_describe_tensor(theirs.get(name))}, that of rank 0 "
                f"{_describe_tensor(first.get(name))}; needs the same model on all: use one seed on all ranks of tp"
            )
        if everyone[rank][1] != everyone[0][1]:
            raise ModelMismatch(f"parallelize: plan: that of rank {rank} of tp differs from that of rank 0")


def _describe_tensor(known: tuple[Any, ...] | None) -> str:
    if known is None:
        return "is missing"
    shape, dtype, trains, *sums = known
    frozen, total = "" if trains else ", frozen", f" with the sum {sums[0]:.17g}" if sums else ""
    return f"is {dtype.removeprefix('torch.')} of shape {shape}{total}{frozen}"


def sums_of(x: torch.Tensor) -> tuple[float, float]:
    """Returns the sum of all elements, and their sum weighted by position."""
    flat = x.detach() if not x.is_complex() else torch.view_as_real(x.detach())
    flat = flat.double().reshape(-1)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return float(flat.sum()), float(flat @ weights)
