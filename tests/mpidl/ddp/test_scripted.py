"""DistributedDataParallel of modules that TorchScript has scripted or traced, wholly or in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.mpidl.ddp.reference import data, follow

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


def layers(activation: Callable[[], nn.Module] = Swish) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 3))


def part_traced() -> nn.Module:
    model = layers()
    model[0] = torch.jit.trace(model[0], torch.zeros(2, 3))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "an activation": lambda: layers(lambda: torch.jit.script(Swish())),
    "a traced part": part_traced,
    "all": lambda: torch.jit.script(layers()),
}


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_averaged(comm, model: str, settings: dict[str, Any]) -> None:
    follow(comm, MODELS[model], lambda m, rank: m(data(rank)).square().sum(), **settings)
