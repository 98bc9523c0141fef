"""Computes a loss's mean over the samples of all ranks, which may have different numbers of samples."""

from __future__ import annotations

import numpy as np
import torch

from collectives import Communicator

from ..errors import TrainingError
from ..mesh import Mesh
from ..mesh.groups import data_group


def global_mean(
    loss_sum: torch.Tensor,
    count: int | float | torch.Tensor,
    process_group: Communicator | None = None,
    *,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """A loss whose gradient, averaged over the ranks, is that of the mean over all samples of all ranks. Collective.

    loss_sum: the sum of this rank's losses in this pass.
    count: how many samples (tokens, ...) this rank has in the whole step; with several micro-batches a step, each call
        gets the count of all of them.

    Returns loss_sum * ranks / (count of all ranks): its mean over the ranks, summed over the micro-batches, is the loss
    of the whole batch.

    Raises TrainingError on every rank when no rank has a sample.
    """
    comm = data_group("global_mean", process_group, mesh)
    total = np.array([float(count)])
    comm.all_reduce(total)
    if not total[0] > 0:
        raise TrainingError(f"global_mean: the ranks have {total[0]:g} samples in all; needs at least one")
    return loss_sum * (comm.size / float(total[0]))
