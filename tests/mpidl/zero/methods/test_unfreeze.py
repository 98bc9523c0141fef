"""Parameters that are frozen at first, and added to the optimizer later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from mpidl import Precision
from tests.mpidl.zero.ways import ADAM, every_way, zero

pytestmark = pytest.mark.mpi


def frozen_blocks() -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
    model[:3].requires_grad_(False)
    return model


def thaw(model: nn.Module, optimizer: Any, lr: float) -> None:
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": lr})


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(12, 6, generator=random), torch.randint(0, 5, (12,), generator=random)


@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@every_way
def test_frozen_parameters_can_be_added_later(comm, way: str, precision: Precision | None) -> None:
    plain, model = frozen_blocks(), frozen_blocks()
    reference = torch.optim.AdamW(plain[3].parameters(), **ADAM)
    optimizer = zero(model, comm, way, precision=precision)
    start = {name: p.clone() for name, p in plain.state_dict().items()}
    for step, (x, y) in zip(range(8), batches(), strict=False):
        if step == 3:
            thaw(plain, reference, 1e-3)
            thaw(model, optimizer, 1e-3)
        F.cross_entropy(plain(x), y).backward()
        mine = (part.chunk(comm.size)[comm.rank] for part in (x, y))
        F.cross_entropy(model(next(mine)).float(), next(mine)).backward()
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    weights, state = optimizer.model_state_dict(), optimizer.state_dict()
    if comm.rank:
        return
    tolerance = 1e-5 if precision is None else 1e-2
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name].float(), value, rtol=tolerance, atol=tolerance, msg=name)
    assert torch.equal(weights["0.0.weight"].float(), start["0.0.weight"].to(weights["0.0.weight"].dtype).float())
    assert not torch.equal(plain[2][0].weight, start["2.0.weight"])
    reference.load_state_dict(state)
    assert [group["lr"] for group in state["param_groups"]] == [1e-2, 1e-3]


@every_way
def test_groups_that_cannot_be_added_are_refused(comm, way: str) -> None:
    model = frozen_blocks()
    optimizer = zero(model, comm, way)
    for group, message in (
        ([], "got no parameters"),
        ([nn.Parameter(torch.ones(2))], "no parameter of the model"),
        ([model[3][0].weight], r"3\.0\.weight is in a group already"),
        ([model[2][0].weight], r"2\.0\.weight is frozen"),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=message):
            optimizer.add_param_group({"params": group})
    model[2][0].weight.requires_grad_(True)
    if way.startswith("stage 3"):
        with pytest.raises(mpidl.ConfigurationError, match=r"of which 2\.0\.bias would stay frozen"):
            optimizer.add_param_group({"params": model[2][0].weight})
    else:
        optimizer.add_param_group({"params": model[2][0].weight})
    assert len(optimizer.param_groups) == 1 + (not way.startswith("stage 3"))
