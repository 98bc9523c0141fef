"""ZeRO with units, or a whole model, that torch.compile has compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import SETTINGS, SGD, Plain, Several, check, engine, follow, made, plainly

# The compiler sees one rank's model; it takes ten seconds to import.
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("way", ["stage 2", "stage 3 gathered"])
def test_compiled_units(comm, way: str) -> None:
    def compiled() -> nn.Module:
        model = Several()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        follow(comm, way, compiled, plainly, steps=2)


@pytest.mark.parametrize("way", ["stage 3", "stage 3 gathered"])
def test_a_compiled_model(comm, way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        model, optimizer = engine(comm, Several, way)
        compiled = torch.compile(model, backend="aot_eager")
        plain = Plain(Several, comm.size)
        for step in range(2):
            plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
            plainly(compiled, comm.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            check(model, optimizer, plain.model)


@pytest.mark.parametrize("way", ["stage 1", "stage 3 gathered"])
def test_a_model_that_was_compiled_before(comm, way: str) -> None:
    """States have the plain model's names, not the compiler's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        compiled = torch.compile(made(Several, comm.rank), backend="aot_eager")
        optimizer = mpidl.ZeroOptimizer(compiled, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)
        plain = Plain(Several, comm.size)
        for step in range(2):
            plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
            plainly(compiled, comm.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            check(optimizer.model, optimizer, plain.model)
        whole = optimizer.model_state_dict()
        assert comm.rank or list(whole) == list(plain.model.state_dict())
        with pytest.raises(mpidl.ConfigurationError, match="trains it already"):
            mpidl.ZeroOptimizer(compiled, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Blocks(nn.Module):
    """Blocks of several modules each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("way", ["stage 2", "stage 3", "stage 3 gathered"])
def test_no_hook_cuts_a_compiled_unit_into_pieces(comm, way: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Blocks()
    for block in model.blocks:
        block.compile(backend="eager")
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)
    for _ in range(2):
        model(torch.randn(3, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
