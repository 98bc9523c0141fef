"""Training with optimizers that send one bit an element, by the engines that take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.job.objects import broadcast_object
from mpidl.optim.one_bit import OneBitOptimizer
from tests.mpidl.optim import one_bit_reference as reference

ENGINES = ("ddp", "stage 1")
SHAPES = [(5, 3), (40,), (1,), (9, 11)]
engines = pytest.mark.parametrize("engine", ENGINES)


class Slopes(nn.Module):
    """Parameters whose gradients are what a forward pass is given."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape, generator=random) for shape in SHAPES])

    def forward(self, slopes: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, slopes, strict=True)]).sum()


def slopes(step: int, rank: int) -> list[torch.Tensor]:
    """Gradients of sizes that differ, with elements that are always zero."""
    random = np.random.default_rng([step, rank])
    made = [torch.from_numpy(random.normal(size=shape) * 10.0**n + 0.3) for n, shape in enumerate(SHAPES)]
    made[3][4] = 0.0
    return made


class Training:
    """An engine with an optimizer on slopes."""

    def __init__(
        self, comm: Communicator, engine: str, optimizer_class: Any, model: nn.Module, **settings: Any
    ) -> None:
        self.comm, self.model, self.called = comm, model, model
        if engine == "ddp":
            wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
            self.called = wrapped
            self.inner: OneBitOptimizer = optimizer_class(model.parameters(), process_group=comm, **settings)
            self.optimizer: Any = self.inner
            wrapped.register_comm_hook(self.inner, mpidl.optim.one_bit_hook)
        else:
            self.optimizer = mpidl.ZeroOptimizer(model, optimizer_class, stage=1, process_group=comm, **settings)
            self.inner = self.optimizer.inner_optimizer

    def step(self, *inputs: Any, scale: float = 1.0) -> None:
        (self.called(*inputs) * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            self.step([g.float() for g in slopes(step, self.comm.rank)])

    def state(self) -> dict[str, Any]:
        """The state_dict, of mean errors."""
        self.inner.gather_errors()
        found: dict[str, Any] = self.optimizer.state_dict()
        return found

    def load(self, first: Training, state: dict[str, Any]) -> None:
        """Takes over the weights of rank 0 of another, and its state."""
        whole = broadcast_object(self.comm, [p.detach().clone() for p in first.model.parameters()])
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), whole, strict=True):
                p.copy_(q)
        if isinstance(self.optimizer, mpidl.ZeroOptimizer):
            self.optimizer.load_model_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(state)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def check_equal_on_all_ranks(self) -> None:
        theirs = self.weights().clone()
        self.comm.broadcast(theirs)
        assert torch.equal(theirs, self.weights())


def nodes_of(comm: Communicator, where: str | None) -> int:
    return comm.nodes if where == "between_nodes" else comm.size


def of_nodes(step: int, ranks: int, nodes: int) -> list[list[np.ndarray]]:
    """The gradients of each node: the means of its ranks'."""
    local = ranks // nodes
    everyone = [[g.float().double().numpy() for g in slopes(step, rank)] for rank in range(ranks)]
    groups = [everyone[node * local : (node + 1) * local] for node in range(nodes)]
    return [[np.mean(each, 0) for each in zip(*group, strict=True)] for group in groups]


def check_against(training: Training, expected: Any, steps: int, nodes: int, rtol: float = 2e-4) -> None:
    """Steps, and compares the weights with the reference's after each."""
    for step in range(steps):
        training.run(step, 1)
        expected.step(of_nodes(step, training.comm.size, nodes))
        for p, w in zip(training.model.parameters(), expected.w, strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=rtol, atol=rtol)
        training.check_equal_on_all_ranks()


def start() -> list[np.ndarray]:
    return [p.detach().double().numpy() for p in Slopes().parameters()]


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (mpidl.optim.OneBitAdam, {"freeze_step": 4}),
    "zero_one": (mpidl.optim.ZeroOneAdam, {"renewals": 2, "local_after": 6}),
    "lamb": (mpidl.optim.OneBitLamb, {"freeze_step": 4}),
}
classes = pytest.mark.parametrize("name", CLASSES)


FREEZE = 6  # the step in which v of `with_reference` stays
SCHEDULE = {"renewals": 2, "local_after": 8, "local_interval_steps": 2, "max_local_interval": 4}


def with_reference(comm: Communicator, engine: str, name: str, where: str = "everywhere") -> tuple[Training, Any, int]:
    """Training, its reference in float64, and the number of nodes that exchange."""
    nodes = nodes_of(comm, where)
    exchange = reference.Exchange(SHAPES, comm.size, nodes)
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "where": where}
    if name == "zero_one":
        expected: Any = reference.ZeroOne(start(), exchange, 0.01, 0.1, *SCHEDULE.values())
        settings |= SCHEDULE
    else:
        kind = reference.Adam if name == "adam" else reference.Lamb
        expected = kind(start(), exchange, FREEZE, 0.01, 0.1)
        settings["freeze_step"] = FREEZE
    return Training(comm, engine, CLASSES[name][0], Slopes(), **settings), expected, nodes
