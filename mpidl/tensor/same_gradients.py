"""Compares gradients that must be equal over tp, as an optimizer's step begins.

torch.nn.utils.clip_grad_norm_ takes the norm of this rank's parts, so that each rank of tp scales the gradients of
replicated parameters by another factor; a gradient that was not summed over tp differs as well. The ranks' weights
would then diverge silently.

    before a step    one all-gather over tp of a number, the sum of the squares of these gradients
    which steps      the first ten of an optimizer, then every tenth (`mesh.norm.is_compared`)

Every rank of tp steps with the same optimizers, so that all come to the same operations in the same order. Gradients
that a ZeroOptimizer holds are compared by its own step (`zero.gradients.same_gradients`), and those that a
backward pass has used are gone: this module compares neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..errors import TrainingError
from ..mesh import Mesh, placement
from ..mesh.norm import differ, is_compared
from ..trained_by import trainer_of

# Of sums of squares, as others than CPUs compute what has other bits each time.
_TOLERANCE_ON_CPUS, _TOLERANCE_ELSEWHERE = 1e-4, 1e-3


class SameGradients:
    """Comparison of one optimizer's gradients over tp. Holds no parameters: they are the optimizer's.

    mesh: the optimizer's uncut parameters must have equal gradients over its tp.
    model: all parameters of the cut model; empty if the model is not known. Then an optimizer without a cut parameter
        is not compared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, model: Iterable[torch.Tensor]) -> None:
        self._mesh, self._steps = mesh, 0
        own, known = _parameters(optimizer), set(model)
        has_part = any("tp" in placement(p).axes for p in own)
        on_cpus = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for p in own)
        self._tolerance = _TOLERANCE_ON_CPUS if on_cpus else _TOLERANCE_ELSEWHERE
        self._needed = any(_is_replicated(p) and (has_part or p in known) for p in own)

    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises one TrainingError on all ranks of tp if gradients differ. Collective over tp, at the chosen steps."""
        if not self._needed or self._mesh.closed:
            return
        self._steps += 1
        if not is_compared(self._steps):
            return
        comm = self._mesh["tp"]
        table = np.empty(comm.size)
        comm.all_gather(table, np.array([_sum_of_squares(optimizer)]))
        if differ(table, table[:1], self._tolerance):
            raise TrainingError(
                f"{type(optimizer).__name__}.step: gradients of parameters that are not cut over tp differ "
                f"over its {comm.size} ranks, as after torch.nn.utils.clip_grad_norm_, which sees one rank's parts; "
                "clip by mpidl.clip_grad_norm_(parameters, max_norm, mesh=mesh), sum them over tp, or declare where "
                "the parameters are cut (mpidl.mesh.place(p, 'tp'))"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_replicated(p: torch.Tensor) -> bool:
    return "tp" not in placement(p).axes and trainer_of(p) is None


@torch.no_grad()
def _sum_of_squares(optimizer: torch.optim.Optimizer) -> float:
    """Sums the squares of this rank's gradients of replicated parameters."""
    gradients = [p.grad for p in _parameters(optimizer) if _is_replicated(p) and type(p.grad) is torch.Tensor]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for g in gradients:
        if g is not None and g.numel():
            values = g.coalesce().values() if g.is_sparse else g
            by_device.setdefault(g.device, []).append(torch.view_as_real(values) if values.is_complex() else values)
    norms = [torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)) for grads in by_device.values()]
    return sum((float(norms_of_device.square().sum()) for norms_of_device in norms), 0.0)
