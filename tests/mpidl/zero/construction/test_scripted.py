"""Models with parts that TorchScript has scripted or traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import SETTINGS, SGD, follow, made, plainly
from tests.mpidl.zero.ways import every_way

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), torch.jit.script(Swish())) for _ in range(3)))


def traced() -> nn.Module:
    model = layers()
    model[1][0] = torch.jit.trace(model[1][0], torch.zeros(2, 3))
    return model


@every_way
def test_scripted_modules_without_parameters_may_be_inside(comm, way: str) -> None:
    follow(comm, way, layers, plainly)


@every_way
@pytest.mark.parametrize(
    ("make", "name"), [(lambda: torch.jit.script(layers()), "it"), (traced, r"1\.0")], ids=["scripted", "traced"]
)
def test_those_with_parameters_are_refused_before_the_model_changes(
    comm, way: str, make: Callable[[], Any], name: str
) -> None:
    model = made(make)
    before = {key: values.clone() for key, values in model.state_dict().items()}
    with pytest.raises(mpidl.ConfigurationError, match=rf"model: {name} .*scripted"):
        mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)
    assert all(torch.equal(model.state_dict()[key], values) for key, values in before.items())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
