"""Memory that a rank holds, counted by tensor, by category: parameters, gradients, ..., activations.

A storage counts once, in the first category of that order that has a view of it, so that the categories add up to
what the process has grown by. DDP's buckets are where its gradients lie: gradients as long as there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..ddp import DistributedDataParallel
from ..ddp.used_gradient import UsedGradient
from ..optim.elementwise_state import state_tensors
from ..tensor.counting import exchange_bytes
from ..zero.gradients.sharded_gradient import ShardedGradient
from .activations import SavedActivations
from .process import MIB, pss_mib, rss_mib


@dataclass(frozen=True)
class Measurement:
    """Bytes of this rank, now.

    parameters: what is whole or sharded, and the model's buffers (running statistics, ...).
    optimizer: its state and fp32 masters.
    buckets: storage for gradients in flight that holds none to keep, and for messages of `compress=`.
    activations: what autograd keeps for backward.
    compression: what `compress=` has not sent, and its compressor's states; the place for messages of
        `compress_parameters=`, which may be the node's.
    slots: memory by which ranks of tp exchange activations.
    offloaded: optimizer state and masters elsewhere (`Offload`), in no total.
    rss, pss: of the process as a whole, with Python, torch and all else in it.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    rss: int
    pss: int
    offloaded: int = 0
    slots: int = 0
    compression: int = 0

    @property
    def model_state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The seven categories of this rank's memory."""
        return self.model_state + self.buckets + self.activations + self.slots + self.compression


def measure(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, activations: SavedActivations | None = None
) -> Measurement:
    """The bytes that this rank holds now, by category. Not collective.

    model: plain, or in DistributedDataParallel.
    optimizer: of torch, or a ZeroOptimizer.
    activations: from `measure_activations`, in which the forward pass ran; without it they count as none.
    """
    held = _held(model, optimizer)
    seen = {key for storages in held.values() for key in storages}
    saved = {} if activations is None else activations.storages
    return Measurement(
        **{category: sum(storages.values()) for category, storages in held.items()},
        activations=sum(nbytes for key, nbytes in saved.items() if key not in seen),
        rss=int(rss_mib() * MIB),
        pss=int(pss_mib() * MIB),
        offloaded=optimizer.offloaded_bytes() if hasattr(optimizer, "offloaded_bytes") else 0,
        slots=exchange_bytes(model),
    )


def model_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The part of `measure` that needs no forward pass: {"parameters", "gradients", "optimizer", "buckets",
    "compression"}.
    """
    return {category: sum(storages.values()) for category, storages in _held(model, optimizer).items()}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors: views of one buffer count it once."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The distinct storages behind tensors, and their bytes."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def _held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[int, int]]:
    """The storages of each category."""
    categories = ("parameters", "gradients", "optimizer", "buckets", "compression")
    tensors: dict[str, list[torch.Tensor]] = {category: [] for category in categories}
    if hasattr(optimizer, "held_tensors"):
        for category, own in optimizer.held_tensors().items():
            tensors[category] += own
    else:
        tensors["optimizer"] += state_tensors(optimizer.state.values())
    if getattr(optimizer, "stage", 0) < 3:  # in stage 3 they are views of more than this rank's share
        tensors["parameters"] += [p.detach() for p in model.parameters()]
    tensors["parameters"] += model.buffers()
    given = [p.grad for p in model.parameters() if p.grad is not None]
    tensors["gradients"] += [gradient for gradient in given if not isinstance(gradient, ShardedGradient | UsedGradient)]
    tensors["buckets"] += _ddp_buckets(model)
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for engine in (*wrappers, optimizer):
        reduction = getattr(engine, "compressed", None)
        if reduction is not None:
            tensors["compression"] += reduction.held_tensors()
            tensors["buckets"] += reduction.message_buffers()
    held: dict[str, dict[int, int]] = {}
    seen: set[int] = set()
    for category, own in tensors.items():
        held[category] = {key: nbytes for key, nbytes in _storages(own).items() if key not in seen}
        seen |= held[category].keys()
    return held


def _ddp_buckets(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The buckets of every DistributedDataParallel in the model."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield from module.held_tensors()["gradients"]
