"""ZeRO with parameters that are tied, nested, frozen, empty, complex, of odd sizes and layouts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpidl.zero.parameters.units import cut_into_units
from tests.mpidl.zero.reference import Block, Several, data, engine, follow, made, plainly
from tests.mpidl.zero.ways import every_part

pytestmark = pytest.mark.mpi


class TiedBlocks(Several):
    """Two blocks share a weight, and the model's own head has another block's bias."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.last = nn.Linear(3, 3)
        self.last.bias = self.blocks[3].inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x, (0, 1, 2, 3)) @ self.head.weight)


@every_part
def test_parameters_tied_across_units(comm, way: str) -> None:
    follow(comm, way, TiedBlocks, plainly)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TwoEncoders(nn.Module):
    """Each has a weight that two of its blocks share; nothing is shared between them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = Encoder(), Encoder(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.left(x) * self.right(x))


def test_what_units_share_belongs_to_the_lowest_module_that_contains_them(comm) -> None:
    model = made(TwoEncoders)
    units = {unit.name: unit for unit in cut_into_units(model)}
    names = {p: name for name, p in model.named_parameters()}
    owned = {unit.name: [names[p] for p in unit.parameters] for unit in units.values()}
    assert owned["left"] == ["left.blocks.0.inner.weight"]
    assert owned["right.blocks.2"] == ["right.blocks.2.inner.bias"]
    assert sorted(owned[""]) == [
        "head.bias",
        "head.weight",
        "left.norm.bias",
        "left.norm.weight",
        "right.norm.bias",
        "right.norm.weight",
    ]
    order = list(owned)
    assert order.index("left") < order.index("left.blocks.0") < order.index("right") < order.index("")
    assert sorted(name for own in owned.values() for name in own) == sorted(names.values())


def test_a_list_that_is_never_called_owns_nothing(comm) -> None:
    """The weight that two blocks of the model share goes to the model, as their list has no forward pass."""
    model = made(TiedBlocks)
    assert {unit.name for unit in cut_into_units(model)} == {"", "blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    assert model.blocks[0].inner.weight in cut_into_units(model)[-1].parameters


def test_a_block_under_several_names_is_a_unit(comm) -> None:
    def repeated() -> nn.Module:
        model = Several(2)
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0]])
        return model

    units = cut_into_units(made(repeated))
    assert [(unit.name, len(unit.parameters)) for unit in units] == [("blocks.0", 2), ("blocks.1", 2), ("", 2)]
    for way in ("stage 2", "stage 3", "stage 3 gathered"):
        follow(comm, way, repeated, plainly)


@every_part
def test_nested_units_for_shared_parameters(comm, way: str) -> None:
    follow(comm, way, TwoEncoders, plainly)


@every_part
def test_nested_units_by_a_rule(comm, way: str) -> None:
    follow(comm, way, TwoEncoders, plainly, units=lambda module: isinstance(module, Encoder | Block))


@every_part
def test_a_parameter_used_outside_its_module(comm, way: str) -> None:
    class Borrows(Several):
        def forward(self, x):
            x = F.linear(x, self.blocks[1].inner.weight)
            return F.linear(super().forward(x, (0, 1)), self.blocks[2].inner.weight[:, :2])

    follow(comm, way, Borrows, plainly)


class PartlyFrozen(Several):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].inner.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)


@every_part
def test_frozen_and_trained_parameters_in_a_unit(comm, way: str) -> None:
    follow(comm, way, PartlyFrozen, plainly)


class Odd(nn.Module):
    """Parameters of one element, of none, smaller than the world, of odd sizes; a module without any; two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.two = nn.Parameter(torch.ones(2))
        self.odd = nn.Parameter(torch.randn(7, 3))
        self.wide = nn.Linear(3, 5).double()
        self.nothing = nn.Dropout(0.0)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.filters = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.nothing(block(x))
        y = self.wide(x.double()).sum() * self.scale + (x @ self.odd.t()).sum() * self.one + self.two.prod()
        z = self.filters(x[:, :, None, None].expand(-1, -1, 2, 3)).square().sum()
        return y + z + self.none.sum() + (x @ self.turned.t()).square().sum()


@every_part
def test_parameters_of_any_size_and_layout(comm, way: str) -> None:
    follow(comm, way, Odd, lambda m, rank, step: m(data(rank, step)))


class OnlyEmpty(Several):
    """A unit, and a dtype, all of whose parameters are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.weight = nn.Parameter(torch.empty(0, 3))
        self.blocks[1].inner.bias = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = self.blocks[1](x).sum() if self.blocks[1].inner.bias.dtype == x.dtype else 0.0
        return super().forward(x, (0, 2)) + nothing


@every_part
def test_a_unit_of_nothing_but_empty_parameters(comm, way: str) -> None:
    follow(comm, way, OnlyEmpty, plainly)


class Phases(Several):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, x):
        return (super().forward(x) * self.phase).abs()


@every_part
def test_complex_parameters(comm, way: str) -> None:
    follow(comm, way, Phases, plainly)


@every_part
def test_complex_gradients_are_clipped_with_the_others(comm, way: str) -> None:
    model, optimizer = engine(comm, Phases, way)
    plain = made(Phases)
    for m in (model, plain):
        plainly(m, 0, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert optimizer.clip_grad_norm_(0.01) == pytest.approx(float(norm), rel=1e-5)
    found = optimizer.gradients()
    for name, p in plain.named_parameters():
        if comm.rank == 0:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-7)
