"""Models, optimizers and comparisons for the tests of steps within the backward pass, of DDP and of ZeRO."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Makes two groups of parameters: matrices with weight decay, the others without and with another rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


def check_equal(one: Any, other: Any) -> None:
    """Compares nested values to the bit."""
    if torch.is_tensor(one):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            check_equal(mine, theirs)
    else:
        assert one == other


class Deep(nn.Module):
    """Twelve equal blocks, and a small head."""

    def __init__(self, width: int = 32, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12)])
        self.head = nn.Linear(width, 1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x)


class CallsBlocksTwice(nn.Module):
    """Two checkpointed blocks, each called twice, so that each gradient arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return x


class ReadsLastWeight(nn.Module):
    """Blocks, of which the last one's weight is read before the first block runs, and again in backward."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.blocks[-1].weight.detach()
        for block in self.blocks:
            x = block(x)
        return x


class Counts(torch.optim.SGD):
    """SGD that counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Decays(torch.optim.SGD):
    """SGD whose steps become smaller, by a count of its own."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= self.count
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
