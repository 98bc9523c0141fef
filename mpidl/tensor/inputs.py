"""Comparison of the ranks' inputs: all ranks of tp must run the model on the same ones."""

from __future__ import annotations

import torch

from collectives import Communicator

from ..errors import TrainingError
from ..job.objects import all_gather_object


def refuse_different(comm: Communicator, x: torch.Tensor) -> None:
    """Raises TrainingError on every rank if `x` is not the same on all. Collective."""
    flat = x.detach().double().view(-1) if not x.is_complex() else torch.view_as_real(x.detach()).reshape(-1).double()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    everyone = all_gather_object(comm, (tuple(x.shape), float(flat.sum()), float(flat @ weights)))
    for rank, other in enumerate(everyone):
        if repr(other) != repr(everyone[0]):  # NaN equals NaN there
            raise TrainingError(
                f"tensor parallelism: the inputs of rank {rank} of tp, of shape {other[0]}, differ from those of rank "
                f"0, of shape {everyone[0][0]}; needs the same on all: give `mesh=` to the sampler or loader"
            )
