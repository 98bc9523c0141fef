"""DiLoCo: many steps of each rank alone, then an outer optimizer's step on the mean of the ranks' changes.

    inner     theta_i moves by H steps of any optimizer, on rank i's own data
    outer     theta_0 - theta_i, averaged over the ranks, is a gradient of theta_0: a step of SGD with Nesterov momentum
              on it; then every theta_i = theta_0

Sources: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1;
Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (fragments, overlap, mixing).

    optimizer = mpidl.optim.DiLoCo(torch.optim.AdamW(model.parameters(), lr=3e-4), period=50)

The paper's ranks begin with a model that has been trained together: `warmup_steps` does so.

Fragments are stepped in turn, one every H / F steps. With `overlap` tau a fragment's reduction begins tau steps
before its outer step, and runs while the ranks go on (`outer_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError
from ..mesh.groups import data_group
from .elementwise_state import state_tensors
from .outer_steps import OuterSteps
from .post_local import PostLocalSGDOptimizer

_SGD = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class DiLoCo(PostLocalSGDOptimizer):
    """Steps with `optimizer` on every rank by itself, and every `period` steps with an outer optimizer on the mean.

    optimizer: any of torch.optim, of this rank's model: without warmup_steps a plain one, not in a
        DistributedDataParallel over all ranks. Where the ranks of a node train together, of a DistributedDataParallel
        with process_group=node_group, or a ZeroOptimizer with process_group=node's, whose state and outer state are cut
        over the node.
    period: H, inner steps from one outer step of a parameter to the next.
    process_group: the Communicator of all ranks that train; by default the world.
    node_group: the Communicator of the ranks of this node, if they train together; as many ranks on every node. A
        ZeroOptimizer's own process_group by itself.
    outer_class, outer_settings: a torch.optim class that steps on theta_0, which has the parameters' shapes, or under
        ZeRO is flat slices of them. By default SGD with lr 0.7 and Nesterov momentum 0.9.
    fragments: F, into how many parts of about equal size the parameters are cut, each with outer steps of its own.
    overlap: tau, inner steps for which a fragment is reduced meanwhile, below period / fragments.
    mixing: alpha, the share of a rank's own weights when they merge: theta = theta_0 + alpha (theta - theta_0).
    compress: None, or what pseudo-gradients are sent in: "bf16", "int8" or "int4" (`gradients.compression`), each of
        whose methods keeps fp32 errors. None or "bf16" if parameters are cut over tp.
    error_feedback: add what rounding left to the next one.
    warmup_steps: steps that come first, in which gradients are averaged over all ranks, by DistributedDataParallel with
        `PostLocalSGDState(..., averager=optimizer.averager)` and `post_local_sgd_hook`; outer steps begin after them.
        0 with a ZeroOptimizer.

    At construction all ranks get rank 0's weights. The arguments must be the same on every rank, and the parameters of
    the same shapes, on which groups are fixed. Every rank must make the same steps. After an outer step with mixing 0
    the fragment's weights are bitwise equal on all ranks; theta_0 always is. The inner state is each rank's own, and so
    are buffers such as running statistics, except in a DistributedDataParallel over all ranks, which broadcasts rank
    0's in passes outside of no_sync().
    Weights must change by steps alone until the next outer step; theta_0 takes the memory of the parameters once more,
    in fp32 for 16-bit ones, and SGD's momentum as much.

    Raises ConfigurationError on every rank for arguments that cannot work, and TrainingError, on every rank, for a
    pseudo-gradient that is not finite, before theta_0 and the outer state are changed, and for weights that differ
    after warmup_steps.
    """

    averager: OuterSteps

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        period: int,
        process_group: Communicator | None = None,
        node_group: Communicator | None = None,
        outer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
        outer_settings: Mapping[str, Any] | None = None,
        *,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 0.0,
        compress: str | None = None,
        error_feedback: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"optimizer: got {type(optimizer).__name__}; needs a torch.optim.Optimizer")
        outer = OuterSteps(
            optimizer,
            data_group("DiLoCo", process_group, needed="process_group=, as mesh.along('dp', 'cp')"),
            node_group,
            period,
            outer_class,
            dict(_SGD) if outer_settings is None and outer_class is torch.optim.SGD else dict(outer_settings or {}),
            fragments,
            overlap,
            mixing,
            compress,
            error_feedback,
            warmup_steps,
        )
        super().__init__(optimizer, outer)

    @property
    def outer(self) -> torch.optim.Optimizer:
        """The outer optimizer, whose param_groups an outer schedule may change."""
        return self.averager.optimizer

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors of the inner optimizer, and as "optimizer" theta_0, the outer state, errors, a mean in flight."""
        inner: Any = self.optimizer
        if hasattr(inner, "held_tensors"):
            held = dict(inner.held_tensors())
        else:
            held = {"optimizer": state_tensors(inner.state.values())}
        held["optimizer"] = [*held.get("optimizer", []), *self.averager.held_tensors()]
        return held
