"""Compares gradients that must be equal over tp, as a ZeroOptimizer's step begins.

A parameter that is placed on no part of tp is whole on each of its ranks. A gradient that was not summed over them
differs, and the ranks' weights would diverge silently. `clip_grad_norm_` sees that too, but not all programs clip.

    before a step    one all-gather over the mesh: of each rank, the sum of the squares of its shards of these gradients
    which steps      the first ten, then every tenth (`mesh.norm.is_compared`)

Of optimizers without shards `tensor.same_gradients` compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from ...gradients.clip import local_norms
from ...mesh import Mesh, placement
from ...mesh.norm import check_equal, is_compared
from ..slices import Slice


class SameGradients:
    """The comparison of one optimizer.

    mesh: with more than one rank of tp.
    counted: whether this rank's shards count; False where other ranks hold them too.
    """

    def __init__(self, mesh: Mesh, counted: bool) -> None:
        self._mesh, self._counted, self._steps = mesh, counted, 0

    def compare(
        self,
        reached: Iterable[torch.nn.Parameter],
        slices: Mapping[torch.nn.Parameter, Slice],
        shard: Callable[[int], torch.Tensor],
    ) -> None:
        """Raises one TrainingError on all ranks of the mesh if gradients differ. Collective, at the chosen steps.

        reached: the parameters that have a gradient.
        shard: gives this rank's shard of the reduced gradients, by number.
        """
        self._steps += 1
        if not is_compared(self._steps):
            return
        own = [slices[p] for p in reached if "tp" not in placement(p).axes]
        norms = local_norms([part.view_in(shard(part.number)) for part in own], 2.0)
        squares = math.fsum(norm * norm for norm in norms) if self._counted else 0.0
        table, layout = np.empty(self._mesh.comm.size), self._mesh.layout
        self._mesh.comm.all_gather(table, np.array([squares]))
        sums = table[list(layout.ranks)].reshape(layout.pp, -1, layout.tp).sum(1)
        check_equal(sums, sums[:, :1], "tp", self._mesh, "ZeroOptimizer.step")
