"""Plans: the modules that they name, the models that have ready ones, and what is refused."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator, OperationError
from mpidl import ConfigurationError, Mesh, ModelMismatch, UsageError, all_gather_object
from mpidl.mesh import placement
from mpidl.tensor import (
    AttentionParallel,
    ColumnParallel,
    FeedForwardParallel,
    RowParallel,
    SequenceBegins,
    SequenceEnds,
    VocabParallel,
    model_state_dict,
    plan_for,
    traffic,
)
from mpidl.tensor.parallelize import tensor_parallels
from tests.mpidl.tensor.reference import VOCABULARY, build, loss_of, part_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


class Tiny(nn.Module):
    """An embedding, layers with a list of two linear ones each, and an output layer."""

    def __init__(self, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(11, 6, padding_idx=4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(11)])
        self.output = nn.Linear(6, 11, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x)


def raised_on_every_rank(comm: Communicator, error: type[Exception], match: str, action: Callable[[], Any]) -> None:
    """Asserts that the action raises the same line on every rank."""
    with pytest.raises(error, match=match) as raised:
        action()
    text = str(raised.value)
    assert "\n" not in text
    assert set(all_gather_object(comm, text)) == {text}


def parts(model: nn.Module) -> set[str]:
    """The names of the parameters that are cut."""
    return {name for name, p in model.named_parameters() if placement(p).cut is not None}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_names_with_a_star_and_the_last_of_a_list(comm: Communicator) -> None:
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(Tiny(), mesh, {"layers.-1.0": ColumnParallel(), "layers.-1.2": RowParallel()})
        assert parts(model) == {"layers.10.0.weight", "layers.10.0.bias", "layers.10.2.weight"}
        model = mpidl.parallelize(Tiny(), mesh, {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()})
        assert len(parts(model)) == 33
        x = torch.tensor([[1, 5]])
        torch.testing.assert_close(model(x), Tiny()(x))


@pytest.mark.mpi
@pytest.mark.parametrize("tied", [False, True])
def test_padding_has_no_gradient(comm: Communicator, tied: bool) -> None:
    whole, model = Tiny(tied).double(), Tiny(tied).double()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, {"tokens": VocabParallel(), **({"output": VocabParallel()} if tied else {})})
        x = torch.arange(11).repeat(2).view(2, 11)
        whole(x).square().sum().backward()
        model(x).square().sum().backward()
        cut = placement(model.tokens.weight).cut
        expected = whole.tokens.weight.grad
        torch.testing.assert_close(model.tokens.weight.grad, cut.of(expected) if cut else expected)
        mpidl.unparallelize(model)
        assert model.tokens.padding_idx == 4


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_layers_of_derived_classes_compute_what_is_their_own(comm: Communicator) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3.0

    class Doubled(nn.Linear):
        """A class whose name says nothing."""

    def made() -> Tiny:
        model = Tiny()
        embedding, output = Scaled(11, 6, padding_idx=4), Doubled(6, 11)
        embedding.weight, output.weight = model.tokens.weight, model.output.weight
        model.tokens, model.output = embedding, output
        return model

    torch.manual_seed(0)
    whole = made()
    torch.manual_seed(0)
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(made(), mesh, {"tokens": VocabParallel(), "output": VocabParallel()})
        x = torch.arange(10).view(2, 5)
        torch.testing.assert_close(model(x).whole(), whole(x))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_the_plan_of_a_model_is_that_of_the_models_inside_it(comm: Communicator) -> None:
    import transformers

    torch.manual_seed(0)
    inner = build("hf gpt2")
    config = inner.config
    config.pad_token_id = 0
    classifier = transformers.GPT2ForSequenceClassification(config).double()
    pair = nn.ModuleDict({"left": inner, "right": build("llama, two key heads")})
    assert plan_for(nn.Linear(2, 2)) is None
    x = tokens(0)
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        expected = classifier(x).logits
        mpidl.parallelize(classifier, mesh)
        assert "transformer.wte.weight" in parts(classifier)
        assert "score.weight" not in parts(classifier)
        torch.testing.assert_close(classifier(x).logits, expected)
        mpidl.parallelize(pair, mesh)
        assert Counter(name.split(".")[0] for name in parts(pair)).keys() == {"left", "right"}
        # Each of the two runs by itself.
        for name in ("left", "right"):
            whole = build("hf gpt2" if name == "left" else "llama, two key heads")
            torch.testing.assert_close(loss_of(pair[name], x), loss_of(whole, x))


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"layer": ColumnParallel()}, "'layer' names no module of Tiny"),
        ({"layers.*.3": ColumnParallel()}, r"'layers.\*.3'"),
        ({"layers.0.1": ColumnParallel()}, "layers.0.1: is a Tanh"),
        ({"layers.0.1": RowParallel()}, "layers.0.1: is a Tanh"),
        ({"layers.0.1": VocabParallel()}, "layers.0.1: is a Tanh"),
        ({"layers.0": FeedForwardParallel(inputs=("1",), output="2")}, r"layers.0.1: is a Tanh"),
        ({"layers.0": FeedForwardParallel(inputs=("5",), output="2")}, r"layers.0: has no module '5'"),
        ({"layers.0": AttentionParallel(query="0", key="0", value="0", output="2", heads="n")}, r"attribute 'n'"),
        ({"layers.0": AttentionParallel(query="0", key="0", value="0", output="2", heads=1)}, r"has 1 heads"),
        ({"layers.0": AttentionParallel(query="0", key="0", value="0", output="2", heads=5)}, r"7 features.*5 heads"),
        ({"layers.0": "column"}, "got 'column'"),
        ({"layers.0": [ColumnParallel]}, "needs a style"),
        ({}, "plan: got {}, which cuts nothing"),
        ({1: ColumnParallel()}, "plan: got dict"),
        ([ColumnParallel()], "plan: got list"),
        ("rows", "plan: got 'rows'.*'auto'"),
        (None, "no ready plan for Tiny.*Llama"),
        ({"tokens": VocabParallel()}, "output: its weight"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_one_line_on_every_rank(comm: Communicator, plan: Any, match: str) -> None:
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        raised_on_every_rank(comm, ConfigurationError, match, lambda: mpidl.parallelize(Tiny(tied=True), mesh, plan))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_a_linear_layer_with_a_forward_pass_of_its_own_is_refused(comm: Communicator) -> None:
    class Quantized(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).round()

    model = Tiny()
    model.layers[0][0] = Quantized(6, 7)
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        plan = {"layers.*.0": ColumnParallel()}
        raised_on_every_rank(
            comm, ConfigurationError, "layers.0.0: is a Quantized", lambda: mpidl.parallelize(model, mesh, plan)
        )


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("at", "plan", "match"),
    [
        ("layers.0", {"layers.*": FeedForwardParallel(inputs=("0",), output="2")}, "layers.0: has a forward pass"),
        ("layers.0.0", {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()}, "layers.0.0: is a Linear"),
        ("layers.0.2", {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()}, "layers.0.2: is a Linear"),
        ("tokens", {"tokens": VocabParallel()}, "tokens: has a forward pass"),
        ("output", {"tokens": VocabParallel()}, "output: its weight"),
    ],
)
def test_a_forward_pass_of_an_instance_that_hides_the_cut_is_refused(
    comm: Communicator, at: str, plan: Any, match: str
) -> None:
    """Programs patch modules so: they set a forward pass in an instance before the model is cut."""
    model = Tiny(tied=True)
    module = model.get_submodule(at)
    module.forward = MethodType(type(module).forward, module)
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        raised_on_every_rank(comm, ConfigurationError, match, lambda: mpidl.parallelize(model, mesh, plan))


@pytest.mark.mpi
@pytest.mark.ranks(3, exactly=True)
def test_fewer_heads_than_ranks_are_refused_by_name(comm: Communicator) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_layer=1, n_head=2, n_embd=8)
    model = transformers.GPT2LMHeadModel(config)
    with Mesh(tp=3, dp=1, comm=comm) as mesh:
        match = r"transformer.h.0.attn: has 2 heads, fewer than the 3 ranks"
        raised_on_every_rank(comm, ConfigurationError, match, lambda: mpidl.parallelize(model, mesh))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_a_model_is_cut_once_and_by_a_mesh(comm: Communicator) -> None:
    plan = {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()}
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(Tiny(), mesh, plan)
        raised_on_every_rank(comm, UsageError, "cut already", lambda: mpidl.parallelize(model, mesh, plan))
        outer = nn.Sequential(model)
        raised_on_every_rank(
            comm, UsageError, "cut already", lambda: mpidl.parallelize(outer, mesh, {"0": ColumnParallel()})
        )
        raised_on_every_rank(comm, ConfigurationError, "mesh: got", lambda: mpidl.parallelize(Tiny(), comm, plan))  # type: ignore[arg-type]
        raised_on_every_rank(comm, ConfigurationError, "model: got", lambda: mpidl.parallelize(Tiny, mesh, plan))  # type: ignore[arg-type]


@pytest.mark.mpi
@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize(
    ("name", "first", "other"),
    [
        ("sequence_parallel", True, False),
        ("dropout", "'streams'", "'by_index'"),
        ("overlap", "'auto'", False),
        ("plan", "'a dict'", "'auto'"),
    ],
)
def test_arguments_that_differ_over_tp_are_refused(comm: Communicator, name: str, first: Any, other: Any) -> None:
    def value(given: Any) -> Any:
        if given == "'a dict'":
            return {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()}
        return given.strip("'") if isinstance(given, str) else given

    with Mesh(tp=2, comm=comm) as mesh:
        arguments = {"plan": value("'a dict'"), name: value(other if mesh.rank("tp") else first)}
        match = f"parallelize: {name}: got {first} on rank 0 of tp and {other} on rank 1"
        raised_on_every_rank(comm, ModelMismatch, match, lambda: mpidl.parallelize(Tiny(), mesh, **arguments))
        wrong = {"plan": value("'a dict'"), "dropout": "none" if mesh.rank("tp") else "streams"}
        with pytest.raises(ConfigurationError, match="dropout: got 'none'"):
            mpidl.parallelize(Tiny(), mesh, **wrong)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_models_that_differ_over_the_ranks_are_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = {"tokens": VocabParallel()}
    last = comm.rank == comm.size - 1
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = Tiny()
        if last:
            model.layers[3] = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        match = re.escape(f"layers.3.0.weight of rank {comm.size - 1} of tp is float32 of shape (8, 6)")
        raised_on_every_rank(comm, ModelMismatch, match, lambda: mpidl.parallelize(model, mesh, plan))
        other: Any = {**plan, "output": VocabParallel()} if last else plan
        raised_on_every_rank(comm, ModelMismatch, "plan: that of rank", lambda: mpidl.parallelize(Tiny(), mesh, other))
        other = {"layers.*.0": ColumnParallel(segments=7 if last else 1)}
        raised_on_every_rank(comm, ModelMismatch, "plan: that of rank", lambda: mpidl.parallelize(Tiny(), mesh, other))
        model = Tiny()
        model.layers[3].requires_grad_(not last)
        match = rf"layers.3.0.weight of rank {comm.size - 1} of tp is float32 of shape \(7, 6\), frozen, that of rank 0"
        raised_on_every_rank(comm, ModelMismatch, match, lambda: mpidl.parallelize(model, mesh, plan))
        mpidl.parallelize(Tiny(seed=comm.rank), mesh, plan)
    if last:  # one rank is enough
        monkeypatch.setenv("MPIDL_DEBUG", "1")
    with Communicator() as group, Mesh(tp=comm.size, dp=1, comm=group) as mesh:
        match = "tokens.weight of rank 1 of tp .* needs the same model"
        raised_on_every_rank(comm, ModelMismatch, match, lambda: mpidl.parallelize(Tiny(seed=comm.rank), mesh, plan))
        mpidl.parallelize(Tiny(), mesh, plan)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_plan_that_begins_no_pieces_or_never_ends_them_is_refused(comm: Communicator) -> None:
    plan: Any = {"layers.*.0": ColumnParallel(), "layers.*.2": RowParallel()}
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        for more, match in (
            ({}, "got True with a plan that cuts no sequences"),
            ({"layers.0": SequenceBegins()}, "layers.0 has SequenceBegins"),
        ):
            raised_on_every_rank(
                comm,
                ConfigurationError,
                match,
                lambda more=more: mpidl.parallelize(Tiny(), mesh, {**plan, **more}, sequence_parallel=True),
            )


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_layers_that_cannot_tell_whole_memory_from_a_piece_are_refused(comm: Communicator) -> None:
    style = AttentionParallel(query="q", key="k", value="v", output="o", heads=6, input="x", each=True, memory="memory")
    model = nn.Sequential(Grouped(6))
    plan: Any = {"0": [style, SequenceBegins("x"), SequenceEnds()]}
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        raised_on_every_rank(
            comm,
            ConfigurationError,
            "where a layer cannot tell whole memory from a piece",
            lambda: mpidl.parallelize(model, mesh, plan, sequence_parallel=True),
        )


class Fused(nn.Module):
    """Queries, keys and values of two key/value heads in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.key_heads = nn.Linear(8, 32), nn.Linear(16, 8), 8, 2


@pytest.mark.mpi
@pytest.mark.ranks(3, exactly=True)
def test_fused_heads_that_some_ranks_would_share_are_refused_on_all(comm: Communicator) -> None:
    """The last of three ranks would have the second key/value head by itself."""
    style = AttentionParallel(fused="qkv", output="out", heads="heads", key_heads="key_heads", input="x")
    with Mesh(tp=3, dp=1, comm=comm) as mesh:
        match = "has 2 key/value heads for 3 ranks"
        raised_on_every_rank(
            comm, ConfigurationError, match, lambda: mpidl.parallelize(nn.Sequential(Fused()), mesh, {"0": style})
        )


class Grouped(nn.Module):
    """An attention of 6 heads, several to a key/value head."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads, self.groups = key_heads, 6 // key_heads
        self.q, self.k, self.v = (nn.Linear(12, 2 * heads) for heads in (6, key_heads, key_heads))
        self.o = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(self.groups, 1) for part in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.mpi
@pytest.mark.ranks(4, exactly=True)
def test_attentions_whose_key_heads_other_ranks_share_stand_in_one_model(comm: Communicator) -> None:
    """Ranks 0 and 1 share one of 2 key/value heads, and ranks 2 and 3 the other; of 3 ranks 0 and 1 share the first."""
    torch.manual_seed(0)
    whole = nn.Sequential(Grouped(2), Grouped(3)).double()
    model = copy.deepcopy(whole)
    style = AttentionParallel(
        query="q", key="k", value="v", output="o", heads=6, key_heads="key_heads", groups="groups", input="x"
    )
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Mesh(tp=4, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, {"0": style, "1": style})
        for each in (model, whole):
            each(x).sin().sum().backward()
        for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)


@pytest.mark.mpi
@pytest.mark.ranks(4, exactly=True)
def test_groups_that_share_heads_are_made_once_for_a_mesh_which_closes_them(comm: Communicator) -> None:
    style = AttentionParallel(
        query="q", key="k", value="v", output="o", heads=6, key_heads="key_heads", groups="groups", input="x"
    )
    groups = []
    with Mesh(tp=4, dp=1, comm=comm) as mesh:
        for _ in range(3):
            model = mpidl.parallelize(nn.Sequential(Grouped(2)), mesh, {"0": style})
            groups.append(tensor_parallels(model)[0].groups[1].comm)
            mpidl.unparallelize(model)
        assert groups[0].size == 2
        assert groups[0] is groups[1] is groups[2]
        groups[0].barrier()
    with pytest.raises(OperationError, match="it was closed"):
        groups[0].barrier()


class FourHeads(nn.Module):
    """The layers of an attention of 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 8, bias=False) for _ in range(3))
        self.o = nn.Linear(8, 4)


@pytest.mark.mpi
@pytest.mark.ranks(3, exactly=True)
def test_tied_layers_with_the_same_cuts_on_some_ranks_alone_are_refused_on_all(comm: Communicator) -> None:
    """The last of three ranks has rows 6 and 7, by heads as well as by rows."""
    model = nn.Sequential(FourHeads(), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].q.weight
    style = AttentionParallel(query="q", key="k", value="v", output="o", heads=4, input="x")
    with Mesh(tp=3, dp=1, comm=comm) as mesh, pytest.raises(ConfigurationError, match="cut in two ways"):
        mpidl.parallelize(model, mesh, {"0": style, "1": ColumnParallel()})
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_states_are_whole_and_traffic_is_counted_through_what_is_around_a_model(comm: Communicator) -> None:
    plan: Any = {"tokens": VocabParallel(), "output": VocabParallel(), "layers.*.0": ColumnParallel()}
    plan |= {"layers.*.2": RowParallel()}
    whole = Tiny().state_dict()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(Tiny(), mesh, plan)
        engine = mpidl.DistributedDataParallel(model, mesh=mesh)
        engine(torch.tensor([[1, 5]]))
        assert traffic(engine) == traffic(model) == traffic(nn.Sequential(model))
        assert traffic(model).all_reduces > 0
        for around, prefix in ((engine, ""), (nn.Sequential(model), "0."), (nn.Sequential(engine), "0.module.")):
            states = model_state_dict(around)
            assert states.keys() == {f"{prefix}{name}" for name in whole}
            assert all(torch.equal(states[f"{prefix}{name}"], value) for name, value in whole.items())
        raised_on_every_rank(comm, UsageError, "Embedding has parameters", lambda: model_state_dict(model.tokens))
        assert mpidl.unparallelize(engine) is model
        assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
        by_hand = nn.Sequential(mpidl.tensor.ColumnParallelLinear(4, 7, mesh=mesh))
        assert model_state_dict(by_hand)["0.weight"].shape == (7, 4)
        raised_on_every_rank(comm, UsageError, "not by parallelize", lambda: mpidl.unparallelize(by_hand))
