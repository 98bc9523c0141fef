"""Finds the gradients of a plain model or a DistributedDataParallel that are infinite or NaN, on all ranks."""

from __future__ import annotations

import torch

from collectives import Communicator

from ..ddp.plain_model import plain_model
from ..errors import ConfigurationError
from ..gradients.nonfinite import Found, are_finite, of_all_ranks
from ..job.runtime import default_communicator
from ..trained_by import trainer_of_model


def find_nonfinite_gradients(model: torch.nn.Module, process_group: Communicator | None = None) -> Found | None:
    """Lists (parameter, rank) of every `.grad` that is not finite, the model's last parameters first; None if all are.

    Collective.

    model: a plain one or a DistributedDataParallel; for another's gradients see `ZeroOptimizer.find_nonfinite`.
    process_group: the Communicator; by default that of a DistributedDataParallel, else the world.

    An average of DDP is not finite on any rank: to learn which rank it came from, look at a backward pass within
    `no_sync`, or have a NonfiniteWatch on the model.
    """
    if trainer_of_model(model) is not None:
        raise ConfigurationError(
            "find_nonfinite_gradients: a ZeroOptimizer trains this model; use its find_nonfinite()"
        )
    wrapper, plain = plain_model(model)
    if process_group is None and wrapper is not None:
        process_group = wrapper.process_group
    given = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    nonfinite = [name for name, fine in zip(given, are_finite(given.values()), strict=True) if not fine]
    return of_all_ranks(default_communicator(process_group), nonfinite[::-1])
