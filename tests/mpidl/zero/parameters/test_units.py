"""Units by default, and errors for rules and models that cannot be cut well."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpidl
from mpidl.zero.parameters.units import cut_into_units
from tests.mpidl.small_models import small_gpt2
from tests.mpidl.zero.reference import SGD, Block, Several, engine, follow, made, plainly
from tests.mpidl.zero.ways import zero

mpi = pytest.mark.mpi


class Other(Block):
    """A block of another class."""


class Wrapped(nn.Module):
    """A block inside a wrapper that runs it again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def of(*kinds: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model with these blocks."""

    def make() -> nn.Module:
        model = Several()
        model.blocks = nn.ModuleList([kind() for kind in kinds])
        return model

    return make


def compiled() -> nn.Module:
    return torch.compile(Block(), backend="eager")


class Keyed(Several):
    """Blocks in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class Nested(Several):
    """Lists of blocks in a list, which have no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Block(), Other(), nn.LayerNorm(3)]) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second, norm in self.blocks:
            x = norm(second(first(x)))
        return self.head(x)


LISTS = {
    "unlike": (of(Block, Other, Block), 3),
    "wrapped": (of(Block, Wrapped, Block), 3),
    "compiled": (of(Block, compiled, nn.Identity), 2),
    "keyed": (Keyed, 3),
    "nested": (Nested, 6),
}


def test_units_are_the_blocks_and_the_rest() -> None:
    model = small_gpt2()
    units = cut_into_units(model)
    assert [unit.name for unit in units] == ["transformer.h.0", "transformer.h.1", "transformer.h.2", ""]
    everything = [p for unit in units for p in unit.parameters]
    assert set(everything) == set(model.parameters())
    assert len(everything) == len(set(everything))
    by_class = cut_into_units(model, [nn.LayerNorm])
    assert [unit.name for unit in by_class][:2] == ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]


def test_marked_modules_are_units_in_place_of_the_blocks_or_in_addition_to_a_rule() -> None:
    model = small_gpt2()
    block = model.transformer["h"][1]
    assert mpidl.zero.unit(block.mlp) is block.mlp
    assert [unit.name for unit in cut_into_units(model)] == ["transformer.h.1.mlp", ""]
    names = {unit.name for unit in cut_into_units(model, [type(block.attn)])}
    assert names == {"", "transformer.h.1.mlp", *(f"transformer.h.{number}.attn" for number in range(3))}


@mpi
@pytest.mark.parametrize("name", LISTS)
def test_blocks_are_units_whatever_else_is_in_their_list(comm, name: str) -> None:
    make, number = LISTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        model = made(make)
        assert len(cut_into_units(model)) == number + 1
        assert set(cut_into_units(model)[-1].parameters) == set(model.head.parameters())
        follow(comm, "stage 3 gathered", make, plainly, steps=2)


class NoStack(nn.Module):
    """Modules of one class in a dictionary with others, and blocks below."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList([Block(), Block()])
        self.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "in": Block(), "blocks": blocks})
        self.chain = nn.Sequential(Block(), nn.Tanh(), Block())
        self.halves = nn.ModuleList([Block(), Other()])


def test_what_is_no_stack_of_blocks_belongs_to_the_model() -> None:
    assert [unit.name for unit in cut_into_units(NoStack())] == ["parts.blocks.0", "parts.blocks.1", ""]


@mpi
@pytest.mark.parametrize("way", ["stage 1", "stage 3 gathered"])
@pytest.mark.parametrize("units", [nn.LSTM, [nn.LSTM, nn.GRU], [], "Block"], ids=str)
def test_units_that_no_module_is_are_refused_in_every_stage(comm, way: str, units: object) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=r"units: got .*; needs .*classes"):
        engine(comm, Several, way, units=units)


@mpi
def test_units_may_be_classes_of_which_some_match_also_from_an_iterator(comm) -> None:
    _, optimizer = engine(comm, Several, "stage 3 gathered", units=iter([nn.LSTM, Block]))
    if comm.size > 1:
        assert len(optimizer.stats()["buckets"]) == 4


class Heap(nn.Module):
    """A large model in which no blocks are found."""

    def __init__(self, table: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(table, 1) if table else None
        self.first, self.second = nn.Linear(2000, 1000), nn.Linear(1000, 2000)


@mpi
@pytest.mark.parametrize(
    ("make", "settings", "expected"),
    [
        (Heap, {}, True),
        (Heap, {"units": lambda module: False}, False),
        (lambda: Heap(5_000_000), {}, False),
        (Several, {}, False),
    ],
    ids=["heap", "told", "embedding", "small"],
)
def test_a_large_model_of_one_unit_warns_once(comm, make: Callable, settings: dict, expected: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero(make(), comm, "stage 3 gathered", torch.optim.SGD, **SGD, **settings)
    said = [str(each.message) for each in caught if "units" in str(each.message)]
    assert len(said) == (expected and comm.rank == 0 and comm.size > 1)
    assert all("100% of the 4,003,000 parameters of Heap" in each for each in said)
