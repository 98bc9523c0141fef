"""DeepSpeed's ZeRO on the CPU, over the gloo group of `collectives.bench.peers.start_gloo`, with an optimizer of torch.

Its settings are DeepSpeed's own defaults (buckets, prefetching, what stays whole between forward and backward), except
that it does not clip gradients, as the other engines do not.

Two of its habits are changed, and neither has a part in a training step. It searches for an accelerator: it is told.
And where it finds a process group on the CPU it compiles a collective of its own, on one rank while the others wait
for a lock file. That takes minutes and a compiler, and a job that ends in the meantime leaves the lock behind, for
which all later ones wait for ever. The collective is an all-reduce for inference, so here it is not built.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch


def load() -> Any:
    """The package `deepspeed`, set up for the CPU. Raises ImportError."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read as the package is imported
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it talks on standard output, where the table goes
    warnings.filterwarnings("ignore", r".*_tensor` is deprecated", FutureWarning)  # it calls older names of torch's
    deepspeed.ops.__compatible_ops__ = {}  # what it may build: nothing, without trying the compiler to find out
    return deepspeed


class DeepSpeed:
    """A model trained by ZeRO of a stage, fp32, micro_steps passes a step. Collective over torch's default group.

    model: with equal weights on every rank; called as DeepSpeed's engine, it is the same function.
    optimizer: one of torch, over the model's parameters, as the other engines have. DeepSpeed's own for the CPU needs a
        compiler.
    stage: 1, 2 or 3.
    batch: sequences a rank a micro-step.
    micro_steps: passes of which a step takes the sum of gradients, averaged over ranks.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, stage: int, batch: int, micro_steps: int
    ) -> None:
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": micro_steps,
            "gradient_clipping": 0.0,  # its default is 1
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self._linear = torch.nn.functional.linear
        with self._own_linear():
            self.engine, *_ = load().initialize(model=model, optimizer=optimizer, config=config)

    @contextlib.contextmanager
    def _own_linear(self) -> Iterator[None]:
        """Context in which torch's `linear` is DeepSpeed's: stage 3 replaces it, for the whole process without this.

        Otherwise every engine that makes its steps in turn with it would compute by that function, whose backward pass
        takes longer than torch's.
        """
        others = torch.nn.functional.linear
        torch.nn.functional.linear = self._linear
        try:
            yield
        finally:
            self._linear, torch.nn.functional.linear = torch.nn.functional.linear, others

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """The forward pass."""
        with self._own_linear():
            return self.engine(*batch)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a loss that is divided by the micro-steps already.

        DeepSpeed counts micro-steps in `step`, which must be called after each of them.
        """
        with self._own_linear():
            self.engine.backward(loss, scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self) -> None:
        """The optimizer's step, after the last backward pass; gradients are zero then."""
        self.engine.step()

    def close(self) -> None:
        """Undoes what DeepSpeed leaves behind, so that engines after it are timed and their memory measured alone.

        Stage 3 keeps the model in a list and in a cache of a class.
        """
        with self._own_linear():
            self.engine.destroy()
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        parameter_offload.FWD_MODULE_STACK.clear()
        for method in vars(PartitionedParameterCoordinator).values():
            for cell in getattr(method, "__closure__", None) or ():  # a decorator hides the cache
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()
