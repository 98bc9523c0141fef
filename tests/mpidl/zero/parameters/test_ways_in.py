"""Stage 3 where ranks gather: gradients that come into a unit by other ways than its untouched outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

WIDTH = 6
SETTINGS: dict[str, dict[str, Any]] = {
    **{way: WAYS[way] for way in ("stage 2", "stage 3", "stage 3 gathered")},
    "stage 3 gathered, kept": {**WAYS["stage 3 gathered"], "reshard_after_forward": False},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.exit = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.logits: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


class Net(nn.Module):
    """block: of the class that the subclass is about."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class WrittenInto(Net):
    """The unit returns a view, into which the caller writes."""

    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(-1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x).square().mean()


class Attribute(Net):
    """An exit's result is an attribute that the loss is made of."""

    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.logits = self.exit(torch.tanh(y))
            return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(block.logits.square().mean() for block in self.blocks)


class FrozenExit(Attribute):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.exit.requires_grad_(False)


class Container(Net):
    """The unit changes a list and returns nothing."""

    class block(Block):
        def forward(self, box: list[torch.Tensor]) -> None:
            box.append(super().forward(box.pop()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = [x]
        for block in self.blocks:
            block(box)
        return self.head(box[0]).square().mean()


class Weight(Net):
    """A unit returns a view of its weight."""

    class block(Block):
        def forward(self, x: torch.Tensor | None) -> torch.Tensor:
            return self.first.weight.t() if x is None else super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0](None)
        return super().forward(torch.tanh(x @ weight) @ weight.t())


@pytest.mark.parametrize("way", SETTINGS)
@pytest.mark.parametrize("make", [WrittenInto, Attribute, FrozenExit, Container, Weight])
def test_weights_are_whole_whichever_way_a_gradient_comes(comm, make: Callable[[], Net], way: str) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=comm, **SETTINGS[way])
    for _ in range(2):
        plain.zero_grad()
        optimizer.zero_grad()
        for rank in range(comm.size):
            x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            (plain(x) / comm.size).backward()
            if rank == comm.rank:
                model(x).backward()
        found = optimizer.gradients()
        for name, p in plain.named_parameters() if comm.rank == 0 else ():
            if p.grad is not None:
                torch.testing.assert_close(found[name], p.grad)


class Functional(Net):
    """Keeps what no module returns, made of a parameter of the unit itself."""

    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.logits = x * self.scale
            return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return sum(block.logits.square().mean() for block in self.blocks)


def test_a_gradient_that_could_not_be_foreseen_is_refused_by_name(comm) -> None:
    settings = WAYS["stage 3 gathered"]
    model = Functional()
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=comm, **settings)
    if comm.size == 1:
        return
    with pytest.raises(mpidl.TrainingError, match=r"blocks\.\d\.scale: .*result of blocks\.\d"):
        model(torch.randn(5, WIDTH, dtype=torch.float64)).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", SETTINGS)
def test_parameters_may_be_frozen_between_passes(comm, way: str) -> None:
    """A discriminator is frozen while a generator trains: any of them, also the first."""
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = Net()
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=comm, **SETTINGS[way])
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for frozen in ((), (0,), (0, 1, 2), (1,), ()):
        for m in (plain, model):
            for number, block in enumerate(m.blocks):
                block.requires_grad_(number not in frozen)
        for m, o in ((plain, stepper), (model, optimizer)):
            m(x).backward()
            o.step()
            o.zero_grad()
    weights = optimizer.model_state_dict()
    for name, p in plain.named_parameters() if comm.rank == 0 else ():
        torch.testing.assert_close(weights[name], p.detach())
