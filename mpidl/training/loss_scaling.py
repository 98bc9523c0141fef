"""Loss scaling for fp16 over several ranks: torch's GradScaler, whose decisions all ranks take together.

    loss * scale -> backward -> gradients / scale, and is any not finite on any rank?
                                    no:  step, and now and then a larger scale
                                    yes: no rank steps, and every rank's scale falls

A rank that skipped a step by itself, or scaled by itself, would have other weights than the rest from there on. Sharded
gradients make it likely: an overflow is then in one rank's shard alone. Source: Micikevicius et al. 2018, "Mixed
Precision Training", section 3.2, and the dynamic scale of its later practice.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..errors import ConfigurationError, TrainingError
from ..gradients.compression.undo import Undoable, reductions_of, undo_step
from ..gradients.nonfinite import NonfiniteWatch, describe
from ..job.runtime import default_communicator
from ..mesh import Mesh
from ..mesh.groups import checked_mesh, refuse_part
from ..trained_by import innermost
from ..zero import ZeroOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with the same methods and state, for plain torch optimizers, ZeroOptimizer and DiLoCo.

    process_group: the Communicator of all ranks that train the model; by default the world, joined when first needed.
    mesh: a `Mesh`, in place of process_group: one decision of all its ranks, those of pp and tp too.
    device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's, the same on every rank.

    explain_after: a scale that falls this many times in a row is explained by a warning on rank 0, and once it is
        below 1 by a TrainingError on every rank: which parameter's gradient is not finite, on which rank. Gradients are
        watched for it once the scale has fallen one time less. A ZeroOptimizer knows its parameters' names, a torch
        optimizer those of `named_parameters` that it was given.

    `unscale_`, `step` where that was not called before it, and `update` are collective. Raises TrainingError on every
    rank if the scales differ.

    skipped_steps: calls of `step` so far that left the optimizer as it was.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Communicator | None = None,
        explain_after: int = 5,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        mesh = checked_mesh("GradScaler", process_group, mesh)
        if explain_after < 1:
            raise ConfigurationError(f"explain_after: got {explain_after}; needs 1 or more")
        if not isinstance(device, str):
            raise ConfigurationError(f"device: got {device!r}; needs the name of a device (the scale is init_scale=)")
        if not init_scale > 0:
            raise ConfigurationError(f"init_scale: got {init_scale}; needs a number above 0")
        if enabled and process_group is not None:
            refuse_part("GradScaler", process_group, "mesh=, so that all ranks take or skip a step together")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group if mesh is None else mesh.comm
        self.skipped_steps = 0
        self._explain_after, self._falls = explain_after, 0
        self._used: list[weakref.ref[torch.optim.Optimizer]] = []
        self._reductions: weakref.WeakSet[Undoable] = weakref.WeakSet()  # what they have not sent is scaled too
        self._watch: NonfiniteWatch | None = None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(...)`, on unscaled gradients, unless one is not finite on some rank. See torch's."""
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if any(flag.item() for flag in found.values()):
                self.skipped_steps += 1
                undo_step(optimizer)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Makes the scale larger or smaller, or `new_scale`, which must be the same on every rank. See torch's."""
        before = self.get_scale()
        super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
        if self._enabled:
            self._falls = self._falls + 1 if new_scale is None and self.get_scale() < before else 0
            used = [optimizer for optimizer in (ref() for ref in self._used) if optimizer is not None]
            self._used = []
            if self.get_scale() != before:
                for reduction in list(self._reductions):
                    reduction.rescale(self.get_scale() / before)
            self._explain(used)

    def _explain(self, used: list[torch.optim.Optimizer]) -> None:
        """Watches the gradients where the scale keeps falling, and says whose fault it is. Collective then."""
        falls, scale, watch = self._falls, self.get_scale(), self._watch
        hopeless = falls >= self._explain_after and scale < 1
        said = ""
        if watch is not None and falls and (hopeless or falls % self._explain_after == 0):
            comm = default_communicator(self.process_group)
            found = watch.find(comm)
            whose = "each rank's own gradients are finite: they overflow where they are averaged or unscaled"
            if found:
                whose = describe(found)
            said = f"GradScaler: the scale has fallen {falls} times in a row, to {scale:g}: {whose}"
            if comm.rank == 0 and not hopeless:
                warnings.warn(said, stacklevel=3)
        if watch is not None:
            watch.clear()
        if watch is None and falls >= self._explain_after - 1:
            self._watch = NonfiniteWatch(_named(used))
        elif watch is not None and (falls < self._explain_after - 1 or hopeless):
            watch.remove()
            self._watch = None
        if said and hopeless:
            self._falls = 0
            raise TrainingError(said)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales gradients and looks for infinities; torch calls it also for an optimizer that unscales by itself."""
        self._used.append(weakref.ref(optimizer))
        for reduction in reductions_of(optimizer):
            reduction.announce_skips(scaled=True)
            self._reductions.add(reduction)
        inner = innermost(optimizer)
        if isinstance(inner, ZeroOptimizer):
            seen, infinite = True, inner.unscale_(inv_scale.item())
        else:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            seen, infinite = bool(flags), any(flag.item() for flag in flags.values())
        seen, infinite = self._agree(seen, infinite)
        # Torch's error for an optimizer without any gradient comes of an empty answer.
        return {found_inf.device: found_inf.fill_(infinite)} if seen else {}

    def _agree(self, seen: bool, infinite: bool) -> tuple[bool, bool]:
        """Returns whether any rank has gradients, and whether any rank has one that is not finite. Collective."""
        scale = self.get_scale()
        said = np.array([seen, infinite, scale, -scale])
        default_communicator(self.process_group).all_reduce(said, "max")
        if said[2] != -said[3]:
            raise TrainingError(f"GradScaler: the ranks' scales differ: from {-said[3]} to {said[2]}")
        return bool(said[0]), bool(said[1])

    def state_dict(self) -> dict[str, Any]:
        """torch's, and `skipped_steps`; empty if not enabled."""
        return {**super().state_dict(), "skipped_steps": self.skipped_steps} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` or torch's GradScaler gave, on every rank the same."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self.skipped_steps = state_dict.get("skipped_steps", 0)

    def __getstate__(self) -> dict[str, Any]:
        # No file can hold a process group, which is the world when unpickled, or hooks on gradients.
        return {**super().__getstate__(), "process_group": None, "_used": [], "_reductions": (), "_watch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reductions = weakref.WeakSet()


def _named(optimizers: list[torch.optim.Optimizer]) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizers' parameters, and what to call them."""
    named: list[tuple[str, torch.nn.Parameter]] = []
    for optimizer in map(innermost, optimizers):
        if isinstance(optimizer, ZeroOptimizer):
            named += [(name, p) for p, name in optimizer.parameter_names().items()]
            continue
        for number, group in enumerate(optimizer.param_groups):
            parameters = group["params"]
            by_place = [f"parameter {i} of group {number}" for i in range(len(parameters))]
            named += zip(group.get("param_names", by_place), parameters, strict=True)
    return named
