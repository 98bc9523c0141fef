"""Engines as all tests name them, the ways in which ZeRO keeps a model, and optimizers made for these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator

ADAM = {"lr": 1e-2, "eps": 1e-6}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3 gathered": {"stage": 3, "share_in_node": False},
}
STAGES = ("stage 1", "stage 2", "stage 3")
ENGINES = ("ddp", *STAGES)
every_way = pytest.mark.parametrize("way", WAYS)
# Each way to keep parameters (whole, in shared memory, in shards) and each to keep gradients (whole, in shards).
# Stage 2 alone brings nothing new: it has the parameters of stage 1 and the gradients of stage 3.
every_part = pytest.mark.parametrize("way", ["stage 1", "stage 3", "stage 3 gathered"])


def with_buckets(cap_mb: float) -> dict[str, dict[str, Any]]:
    """WAYS, with buckets of this size where there are any: small models then have several."""
    return {way: given if given["stage"] == 3 else {**given, "bucket_cap_mb": cap_mb} for way, given in WAYS.items()}


def zero(model: nn.Module, comm: Communicator, way: str, optimizer: Any = torch.optim.AdamW, **settings: Any) -> Any:
    if optimizer is torch.optim.AdamW:
        settings = {**ADAM, **settings}
    return mpidl.ZeroOptimizer(model, optimizer, process_group=comm, **WAYS[way], **settings)
