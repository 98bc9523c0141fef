"""The automatic plan on single modules: what is cut computes the same, and what only looks like it stays whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError
from mpidl.tensor.automatic import automatic_plan
from tests.mpidl.tensor.automatic_checks import assert_cut_as_whole, random_input
from tests.mpidl.tensor.small_attentions import (
    Attends,
    ByNamedAttention,
    ByOwnAttention,
    ByPart,
    ByShape,
    ByUnpackedShape,
    Crossing,
    DropsBetween,
    FirstHeads,
    FusedByHeads,
    FusedInARow,
    Heads,
    LaidOutAnew,
    Normalised,
    NormBehind,
    NormOfHeads,
    OtherNames,
    OverHeads,
    Root,
    RootOfResult,
    Separate,
    ShapeFirst,
    SharedQueries,
    Slopes,
    Square,
    Tiled,
    TwoKinds,
    WidthFirst,
    WithHeads,
    WrittenBeside,
    WrittenOut,
)
from tests.mpidl.tensor.small_networks import (
    Activates,
    Backwards,
    Beside,
    Branches,
    ByFirst,
    ByFunction,
    ByLastSize,
    ByModule,
    ByNamedActivation,
    ByNamedClip,
    ByOutFeatures,
    ByProduct,
    BySize,
    ByWidth,
    ByWidths,
    Chain,
    Cube,
    Deviation,
    GatedPost,
    Gates,
    Halves,
    InPlace,
    KeepsALoss,
    Largest,
    Mixing,
    OwnParameter,
    Repeated,
    ReturnsALoss,
    Scaled,
    Shifted,
    SlowButExact,
    Squash,
    WithFunction,
    WithMethod,
    parametrized,
)

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_a_gated_network_beside_another_module_sums_the_gradient_of_its_input(comm: Communicator) -> None:
    torch.manual_seed(0)
    assert_cut_as_whole(comm, nn.Sequential(nn.Linear(6, 6), GatedPost()).double(), random_input(2, 5, 6))


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_an_attention_that_chooses_its_memory_sums_both_gradients(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = Crossing().double()
    assert_cut_as_whole(comm, model, random_input(2, 5, 8), random_input(2, 3, 8, seed=2))
    model.zero_grad()
    assert_cut_as_whole(comm, model, random_input(2, 5, 8))
    (style,) = automatic_plan(model, 2, sequence_parallel=False).plan[""]
    assert (style.memory, style.each) == ("context", False)


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["WithHeads", "NormOfHeads", "Heads", "Activates", "ByWidths", "Beside"])
def test_what_acts_on_single_heads_or_features_is_cut_and_computes_the_same(comm: Communicator, name: str) -> None:
    torch.manual_seed(0)
    models = {cls.__name__: cls for cls in (WithHeads, NormOfHeads, Heads, Activates, ByWidths)}
    model = models[name]() if name in models else Beside(Cube())
    width = 8 if "Heads" in name else 6
    assert_cut_as_whole(comm, nn.Sequential(nn.Linear(width, width), model).double(), random_input(2, 5, width))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("network", [Repeated, Shifted])
def test_a_gated_network_whose_layers_get_what_it_has_computed_sums_the_gradient(
    comm: Communicator, network: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    assert_cut_as_whole(comm, nn.Sequential(nn.Linear(6, 6), network()).double(), random_input(2, 5, 6))


@pytest.mark.parametrize(
    "model",
    [
        Scaled(),
        Square(),
        SlowButExact(),
        InPlace(),
        FusedInARow(),
        Activates(),
        Beside(Cube()),
        ByModule(Cube()),
        ByModule(F.mish),
        ByModule(partial(F.gelu, approximate="tanh")),
        ByModule(nn.Sequential(nn.Tanh(), nn.Dropout(0.0))),
        WithHeads(),
        NormOfHeads(),
        Heads(),
        ByWidths(),
        ByFunction(),
        Attends(),
        ByOwnAttention(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_is_nearly_another_is_cut(model: nn.Module) -> None:
    made = automatic_plan(nn.Sequential(model), 2, sequence_parallel=False)
    assert "0" in made.plan


@pytest.mark.parametrize(
    "model",
    [
        Mixing(),
        OtherNames(),
        ByWidth(),
        OwnParameter(),
        Deviation(),
        Halves(),
        KeepsALoss(),
        ReturnsALoss(),
        Gates(),
        Branches(),
        Largest(),
        SlowButExact(pieces=2),
        ShapeFirst(),
        parametrized(),
        Separate(),
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        Chain(),
        FusedByHeads(),
        LaidOutAnew(),
        WithFunction(),
        WithMethod(),
        ByModule(Squash()),
        ByModule(partial(F.softmax, dim=-1)),
        ByModule(nn.Softmin(-1)),
        ByFirst(),
        ByProduct(),
        Beside(Squash()),
        Normalised(),
        NormBehind(),
        OverHeads(),
        ByPart(),
        SharedQueries(),
        Slopes(),
        Root(),
        RootOfResult(),
        WrittenOut(),
        WrittenBeside(),
        ByShape(),
        ByUnpackedShape(),
        TwoKinds(),
        FirstHeads(),
        DropsBetween(),
        Tiled(),
        WidthFirst(),
        ByNamedAttention(),
        ByNamedActivation(),
        ByNamedClip(),
        ByOutFeatures(),
        ByLastSize(),
        BySize(),
        Backwards(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)),
        nn.TransformerEncoderLayer(8, 2),
        nn.MultiheadAttention(8, 2),
        nn.Linear(3, 3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_with_nothing_that_can_be_cut_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="'auto' found no attention"):
        automatic_plan(nn.Sequential(model), 2, sequence_parallel=False)


def test_an_attention_with_fewer_heads_than_ranks_stays_whole() -> None:
    made = automatic_plan(nn.Sequential(WithHeads(), Scaled()), 5, sequence_parallel=False)
    assert list(made.plan) == ["1"]
    assert any("has 4 heads, fewer than the 5 ranks" in line for line in made.lines)


class ByWeight(nn.Module):
    """A language model that computes its logits with the weight of its embedding, in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(11, 6), Scaled()

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.embedding.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.get_logits(self.block(self.embedding(tokens)))


class ByKey(ByWeight):
    """One that has the embedding in a dictionary of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"table": self.embedding})

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.parts["table"].weight)


class ByVariable(ByWeight):
    """One that has it in a variable."""

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        table = self.embedding
        return x @ table.weight.T


class ByCall(ByWeight):
    """One that gets it from a method."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.get_input_embeddings().weight)


class ByParameter(ByWeight):
    """One that has the weight as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = self.embedding.weight

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.scores)


class Table(nn.Embedding):
    """An embedding that scores its rows."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class ByMethod(ByWeight):
    """One that gets its logits from the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Table(11, 6)

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding.scores(x)


@pytest.mark.parametrize("model", [ByWeight, ByKey, ByVariable, ByCall, ByParameter, ByMethod])
def test_an_embedding_whose_weight_is_used_by_itself_stays_whole(model: Callable[[], nn.Module]) -> None:
    assert list(automatic_plan(model(), 2, sequence_parallel=False).plan) == ["block"]


def test_a_module_with_a_forward_pass_of_its_own_stays_whole() -> None:
    model = nn.Sequential(Scaled(), Scaled(), Crossing(), Crossing())
    for at in ("0", "1.down", "2"):
        module = model.get_submodule(at)
        module.forward = MethodType(type(module).forward, module)
    mpidl.activations.checkpoint_modules(model, lambda module: module is model[3])  # which hides nothing
    made = automatic_plan(model, 2, sequence_parallel=False)
    assert list(made.plan) == ["3"]
    assert sum("has a forward pass of its own" in line for line in made.lines) == 1  # of one pattern of names
    words = nn.Sequential(nn.Embedding(11, 6), Scaled())
    words[0].forward = MethodType(nn.Embedding.forward, words[0])
    assert list(automatic_plan(words, 2, sequence_parallel=False).plan) == ["1"]
