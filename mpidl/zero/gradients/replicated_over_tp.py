"""Compares gradients that must be equal over tp, as a ZeroOptimizer's step begins.

A parameter that is placed on no part of tp is whole on each of its ranks. A gradient that was not summed over them
differs, and the ranks' weights would diverge silently. `clip_grad_norm_` sees that too, but not all programs clip.

    before a step    one all-gather over the mesh: of each rank, the sum of the squares of its shards of these gradients
    which steps      the first ten, then every tenth (`mesh.norm.is_compared`)

Of optimizers without shards `tensor.same_gradients` compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...errors import TrainingError
from ...gradients.clip import local_norms
from ...mesh import Mesh, placement
from ...mesh.norm import differ, is_compared
from ..slices import Slice


class ReplicatedOverTp:
    """The comparison of one optimizer.

    mesh: with more than one rank of tp.
    counted: whether this rank's shards count; False where other ranks hold them too.
    """

    def __init__(self, mesh: Mesh, counted: bool) -> None:
        self._mesh, self._counted, self._steps = mesh, counted, 0

    def compare(self, slices: Mapping[torch.nn.Parameter, Slice], shards: Sequence[torch.Tensor]) -> None:
        """Raises one TrainingError on all ranks of the mesh if gradients differ. Collective, at the chosen steps.

        slices: of the parameters that have a gradient.
        shards: of the reduced gradients, by number.
        """
        self._steps += 1
        if not is_compared(self._steps):
            return
        parts = [part.of(shards[part.number]) for p, part in slices.items() if "tp" not in placement(p).axes]
        squares = math.fsum(norm * norm for norm in local_norms(parts, 2.0)) if self._counted else 0.0
        table, layout = np.empty(self._mesh.comm.size), self._mesh.layout
        self._mesh.comm.all_gather(table, np.array([squares]))
        sums = table[list(layout.ranks)].reshape(layout.pp, -1, layout.tp).sum(1)
        if differ(sums, sums[:, :1]):
            raise TrainingError(
                "ZeroOptimizer.step: gradients of parameters that are placed on no part of tp differ over its "
                f"{layout.tp} ranks; sum them over tp, or declare where the parameters are cut "
                "(mpidl.mesh.place(p, 'tp'))"
            )
