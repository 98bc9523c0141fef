"""Counts what a rank of tp holds and sends: a model's parts, without other ranks, memory for exchange, and traffic."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..mesh import placement
from .communication import Traffic
from .parallelize import apply_styles, chosen_plan, tensor_parallels
from .plans import Plan, styled_modules
from .tensor_parallel import TensorParallel


@dataclass(frozen=True)
class _RankOfMesh:
    """Stands for a mesh and for its Communicator of tp, of which only the numbers are known."""

    rank: int
    size: int
    is_debugging: bool = False

    def __getitem__(self, axis: str) -> _RankOfMesh:
        return self

    def split_axis(self, axis: str, division: str, color: int) -> _RankOfMesh:
        """Returns a group of ranks, which is not asked for anything."""
        return self


def cut_on_meta(model: nn.Module, ranks: int, rank: int, plan: Plan | str | None = None) -> nn.Module:
    """Copies a whole model to the meta device, cut as for a rank of tp. Not collective.

    ranks, rank: of tp.
    plan: as for `parallelize`.

    Raises ConfigurationError for a plan or a number of ranks that does not fit, and for a model that is cut already.
    """
    if any(placement(p).cut is not None for p in model.parameters()):
        raise ConfigurationError("model: is cut over tp already; needs a whole one")
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    outlined = copy.deepcopy(model, memo)
    tp = TensorParallel(_RankOfMesh(rank, ranks))  # type: ignore[arg-type]
    chosen, _ = chosen_plan(outlined, plan, ranks, sequence_parallel=False)
    apply_styles(outlined, styled_modules(chosen, outlined), tp)
    return outlined


def exchange_bytes(model: nn.Module) -> int:
    """Bytes of the memory by which the cut layers of a model exchange activations, as far as there is any yet."""
    return sum(group.nbytes for tp in tensor_parallels(model) for group in tp.groups)


def traffic(model: nn.Module) -> Traffic:
    """Counts what the cut layers of a model have exchanged so far among all ranks of tp. Not collective.

    Layers that models are written with, such as ColumnParallelLinear, share one count over a mesh.
    """
    total = Traffic()
    for tp in tensor_parallels(model):
        for name, count in vars(tp.group.traffic).items():
            setattr(total, name, getattr(total, name) + count)
    return total
