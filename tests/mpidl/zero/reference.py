"""A plain model as the judge of ZeroOptimizer: it steps on the mean of the gradients of every rank's pass."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any

import torch
from torch import nn

import mpidl
from collectives import Work, WorkTimeout
from tests.mpidl.zero.ways import with_buckets

SETTINGS = with_buckets(1e-5)
SGD = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}

Loss = Callable[[Any, int, int], torch.Tensor]
Make = Callable[[], nn.Module]


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + rank + 1))


def made(make: Make, rank: int = 0) -> nn.Module:
    """Equal on all ranks but for weights that only rank 0 has right."""
    torch.manual_seed(3)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(float(rank))
    return model


def engine(comm, make: Make, way: str, **settings: Any) -> tuple[nn.Module, mpidl.ZeroOptimizer]:
    model = made(make, comm.rank)
    return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD, **settings)


def strategy(optimizer: mpidl.ZeroOptimizer) -> Any:
    """The part of an optimizer that keeps the parameters."""
    return optimizer._parts.parameters


class Late(Work):
    """A reduction for which a rank has to wait long enough to offer the others a round."""

    def __init__(self) -> None:
        super().__init__("late")
        self.waits = 0

    def wait(self, timeout: float | None = None) -> None:
        self.waits += 1
        if self.waits == 1:
            raise WorkTimeout(f"not after {timeout} s")


def wait_for_rounds(optimizer: mpidl.ZeroOptimizer) -> None:
    """Returns once the other ranks have joined all rounds that this one has started."""
    while optimizer.stats()["rounds_under_way"]:
        sleep(1e-3)


class Plain:
    """The reference: every rank's pass on one plain model, one after the other, then a step on their mean."""

    def __init__(self, make: Make, ranks: int) -> None:
        self.model, self.ranks = made(make), ranks
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], **SGD)

    def step(self, run: Callable[[nn.Module, int], None]) -> None:
        for rank in range(self.ranks):
            run(self.model, rank)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= self.ranks
        self.optimizer.step()
        self.optimizer.zero_grad()


def check(model: nn.Module, optimizer: mpidl.ZeroOptimizer, expected: nn.Module) -> None:
    """On every rank."""
    with optimizer.gathered(writable=False):
        found = dict(model.named_parameters())
        for name, p in expected.named_parameters():
            torch.testing.assert_close(found[name].detach(), p.detach(), rtol=1e-5, atol=1e-6, msg=name)


def follow(comm, way: str, make: Make, loss: Loss, steps: int = 3, **settings: Any) -> mpidl.ZeroOptimizer:
    """Weights after each of some SGD steps. loss: of a model, a rank and the step."""
    model, optimizer = engine(comm, make, way, **settings)
    plain = Plain(make, comm.size)
    for step in range(steps):
        plain.step(lambda m, rank, step=step: loss(m, rank, step).backward())  # type: ignore[misc]
        loss(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)
    return optimizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Several(nn.Module):
    """Units to choose from, and something of the model's own."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(count)])
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def plainly(m: Any, rank: int, step: int) -> torch.Tensor:
    return m(data(rank, step)).square().sum()


def after_failure(
    comm,
    model: nn.Module,
    optimizer: mpidl.ZeroOptimizer,
    make: Make,
    loss: Loss = plainly,
    steps: int = 2,
) -> None:
    """The next step is that of a plain model's first one, and so on."""
    plain = Plain(make, comm.size)
    for step in range(steps):
        plain.step(lambda m, rank, step=step: loss(m, rank, step).backward())  # type: ignore[misc]
        loss(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)
