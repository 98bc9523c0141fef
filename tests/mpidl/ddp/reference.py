"""Gradients of a pass on each rank by itself, to judge averaged gradients by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpidl

Loss = Callable[[Callable[..., Any], int], torch.Tensor]


def data(rank: int, features: int = 3) -> torch.Tensor:
    return torch.randn(2, features, generator=torch.Generator().manual_seed(rank + 1))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def mean_gradients(make: Callable[[], nn.Module], loss: Loss, ranks: int, passes: int = 1) -> dict[str, Any]:
    """The reference: each rank's pass on a plain model, one after the other; None where no pass gave a gradient."""
    found: dict[str, Any] = {}
    for rank in range(ranks):
        model = made(make)
        for _ in range(passes):
            loss(model, rank).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                share = p.grad.to_dense() / ranks
                found[name] = share if found.get(name) is None else found[name] + share
            else:
                found.setdefault(name, None)
    return found


def check(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, p in model.named_parameters():
        if expected[name] is None:
            assert p.grad is None, name
        else:
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.to_dense(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


def follow(comm, make: Callable[[], nn.Module], loss: Loss, passes: int = 3, **settings: Any) -> nn.Module:
    """Several steps, as buckets are cut anew after the first; returns the module."""
    model = made(make)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **{"bucket_cap_mb": 1e-5, **settings})
    expected = mean_gradients(make, loss, comm.size)
    for _ in range(passes):
        model.zero_grad()
        loss(wrapped, comm.rank).backward()
        check(model, expected)
    return model


class Several(nn.Module):
    """Layers to choose from."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(count)])

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x
