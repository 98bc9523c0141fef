"""Compares the ranks' models and settings, and names what differs on which rank."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..digest import code
from ..errors import ModelMismatch
from ..job.objects import all_gather_object


def check_settings_agree(comm: Communicator, of: str, settings: Mapping[str, Any]) -> None:
    """Raises ModelMismatch on every rank unless all give equal settings. Collective.

    of: whose settings these are, for the message.
    """
    everyone = all_gather_object(comm, {name: repr(value) for name, value in settings.items()})
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            of_rank_0, of_rank = everyone[0].get(name, "(nothing)"), other.get(name, "(nothing)")
            if of_rank_0 != of_rank:
                raise ModelMismatch(f"{of}: rank 0 has {name}={of_rank_0}, rank {rank} has {name}={of_rank}")


def _order(p: torch.Tensor) -> str:
    """The order of the elements in memory, where that is not the usual one."""
    return "" if p.is_contiguous() else f", strides {p.stride()}"


def check_models_agree(comm: Communicator, model: torch.nn.Module, ignored: Container[str] = ()) -> None:
    """Raises ModelMismatch on every rank unless all have parameters and buffers of the same names, shapes, dtypes.

    Collective. Also compares which parameters train, and which are one under several names.

    ignored: names not to look at.
    """
    lines = []
    first: dict[torch.Tensor, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in ignored:
            tied = f", the same as {first[p]}" if p in first else ""
            frozen = ("" if p.requires_grad else ", frozen") + (", on meta" if p.is_meta else "")
            lines.append(f"parameter {name}: {tuple(p.shape)} {p.dtype}{_order(p)}{frozen}{tied}")
            first.setdefault(p, name)
    for name, b in model.named_buffers(remove_duplicate=False):
        if name not in ignored:
            tied = f", the same as {first[b]}" if b in first else ""
            lines.append(f"buffer {name}: {tuple(b.shape)} {b.dtype}{', on meta' if b.is_meta else ''}{tied}")
            first.setdefault(b, name)
    digests = np.empty(comm.size, np.int64)
    comm.all_gather(digests, np.array([code("\n".join(lines))]))
    if (digests == digests[0]).all():
        return
    models = all_gather_object(comm, lines)
    for rank, other in enumerate(models):
        if other == models[0]:
            continue
        for of_rank_0, of_rank in zip([*models[0], "nothing more"], [*other, "nothing more"], strict=False):
            if of_rank_0 != of_rank:
                raise ModelMismatch(f"the ranks' models differ: rank 0 has {of_rank_0}, rank {rank} has {of_rank}")
