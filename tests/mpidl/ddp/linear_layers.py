"""Linear layers, models of them, and where the gradients of their weights lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpidl
from mpidl.models.gpt2 import Projection

WIDTH = 16


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(WIDTH, 5)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, WIDTH),
    "linear without bias": lambda: nn.Linear(5, 6, bias=False),
    "one output": lambda: nn.Linear(5, 1, bias=False),
    "conv1d": conv1d,
    "projection": lambda: Projection(5, WIDTH, 0.5),
}


def made(make: Callable[[], Any]) -> Any:
    """A model, the same on every rank."""
    torch.manual_seed(0)
    return make()


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Watched:
    """A wrapped model, and where the gradients of its weights lie when they arrive, before they are averaged.

    found: of each weight that arrived in the last pass, whether in a bucket's memory, and what.
    """

    def __init__(self, comm: Any, model: nn.Module, **settings: Any) -> None:
        self.found: dict[str, tuple[bool, torch.Tensor]] = {}
        self.handles = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))
            for name, p in model.named_parameters()
        ]
        self.model = model
        self.wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)

    def _arrived(self, name: str, p: torch.Tensor) -> None:
        buckets = {flat.untyped_storage().data_ptr() for flat in self.wrapped.held_tensors()["gradients"]}
        self.found[name] = (p.grad.untyped_storage().data_ptr() in buckets, p.grad.clone())

    def in_place(self) -> dict[str, bool]:
        """Returns, by weight that has arrived since the last call, True if its gradient lies in the bucket."""
        found, self.found = self.found, {}
        return {name: there for name, (there, _) in found.items() if name.endswith("weight")}


class Two(nn.Module):
    """Two layers and an activation in place. calls: of the first."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = torch.relu_(self.first(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.hidden(x)).square().sum()


def steps(call: Any, model: nn.Module, passes: int = 1) -> list[torch.Tensor]:
    """The gradients after a step of several backward passes, the same on all ranks."""
    model.zero_grad()
    for number in range(passes):
        call(data(4, WIDTH, seed=number)).backward()
    return [p.grad.clone() for p in model.parameters()]
