"""The ways in which ZeRO keeps a model, by name, and optimizers made for them."""

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
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def zero(model: nn.Module, comm: Communicator, way: str, optimizer: Any = torch.optim.AdamW, **settings: Any) -> Any:
    if optimizer is torch.optim.AdamW:
        settings = {**ADAM, **settings}
    return mpidl.ZeroOptimizer(model, optimizer, process_group=comm, **WAYS[way], **settings)
