"""The automatic plan: what it finds in a model, what it leaves whole, and that the cut model computes the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.mesh import placement
from mpidl.tensor import AttentionParallel, FeedForwardParallel
from mpidl.tensor.automatic import automatic_plan
from tests.mpidl.tensor.reference import (
    MODELS,
    VOCABULARY,
    all_in_float64,
    build,
    largest_difference,
    loss_of,
    part_of,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _hf(family: str, head: str = "ForCausalLM", **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    config._experts_implementation = "eager"  # the grouped product is of 32 bits at most
    return getattr(transformers, f"{family.removesuffix('Text')}{head}")(config)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention with its norm and residual inside, and biases of positions by heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.width = heads, width // heads, width
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.distances = nn.Embedding(64, heads)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        shape = (x.shape[0], x.shape[1], self.heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.to_q(y), self.to_k(y), self.to_v(y)))
        place = torch.arange(x.shape[1])
        bias = self.distances((place[:, None] - place[None, :]).abs()).permute(2, 0, 1)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask=bias)
        return x + self.to_out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.width))


class Gated(nn.Module):
    """A gated feed-forward network with a residual inside."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, features), nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.silu(self.a(x)) * self.c(x))


class HandWritten(nn.Module):
    """A model that is of no library, without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 30)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            plain = nn.Sequential(nn.Linear(30, 41), nn.GELU(), nn.Dropout(0.0), nn.Linear(41, 30))
            self.blocks.append(nn.ModuleList([Attention(30, 5), Gated(30, 37), plain]))
        self.scores = nn.Linear(30, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.table(input_ids)
        for attention, gated, plain in self.blocks:
            x = gated(attention(x))
            x = x + plain(x)
        logits = self.scores(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"loss": loss})


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "by hand": HandWritten,
    "gemma": lambda: _hf("Gemma", num_key_value_heads=2, head_dim=6),
    "gemma3": lambda: _hf("Gemma3Text", num_key_value_heads=4, head_dim=6),
    "gpt-neox": lambda: _hf("GPTNeoX"),
    "gpt-j": lambda: _hf("GPTJ", n_embd=32, n_head=8, n_layer=2, n_inner=53, rotary_dim=4, resid_pdrop=0.0,
                         embd_pdrop=0.0, attn_pdrop=0.0),
    "opt": lambda: _hf("OPT", ffn_dim=53, word_embed_proj_dim=32, dropout=0.0),
    "bart": lambda: _hf("Bart", "ForConditionalGeneration", d_model=32, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=53, decoder_ffn_dim=53,
                        dropout=0.0, decoder_start_token_id=2),
    "distilbert": lambda: _hf("DistilBert", "ForMaskedLM", dim=32, n_heads=8, n_layers=2, hidden_dim=53, dropout=0.0,
                              attention_dropout=0.0),
    "roberta": lambda: _hf("Roberta", "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "mixtral": lambda: _hf("Mixtral", num_key_value_heads=4, num_local_experts=4),
    "olmo2": lambda: _hf("Olmo2"),
    "bloom": lambda: _hf("Bloom", n_head=8, hidden_dropout=0.0, attention_dropout=0.0),
}  # fmt: skip
REFUSED = ("by hand", "mixtral", "olmo2", "bloom")  # with sequences in pieces


def made(name: str) -> nn.Module:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    return build(name) if name in MODELS else OTHERS[name]().double()


def assert_same(model: nn.Module, whole: nn.Module) -> None:
    """Asserts that the loss and all gradients are those of the whole model."""
    x = tokens(0).clamp(min=3)
    expected, loss = loss_of(whole, x), loss_of(model, x)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None or not p.grad.any(), at
        else:
            assert p.grad is not None, at
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)


def assert_cut_as_whole(
    comm: Communicator, whole: nn.Module, *inputs: torch.Tensor, sequence_parallel: bool = False
) -> None:
    """Asserts that a copy, cut by the automatic plan, has the result and the gradients of the whole model."""
    model = copy.deepcopy(whole)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=sequence_parallel)
        assert comm.size == 1 or any(placement(p).cut is not None for p in model.parameters())
        results = []
        for each in (model, whole):
            given = [x.clone().requires_grad_() for x in inputs]
            y = each(*given)
            y.sin().sum().backward()
            results.append([y.detach(), *(x.grad for x in given)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert q.grad is not None, at
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)


def random_input(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_model_that_leaves_out_blocks_is_refused_in_pieces(comm: Communicator) -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 53, "decoder_ffn_dim": 53}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "decoder_start_token_id": 2}
    model = _hf("Bart", "ForConditionalGeneration", **sizes, **heads, encoder_layerdrop=0.5)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        with pytest.raises(ConfigurationError, match=r"model\.encoder has layerdrop=0\.5"):
            mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
        model.model.encoder.layerdrop = 0.0
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)


class GatedPost(nn.Module):
    """A gated feed-forward network with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 11), nn.Linear(6, 11), nn.Linear(11, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(F.silu(self.gate(x)) * self.up(x)))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_a_gated_network_beside_another_module_sums_the_gradient_of_its_input(comm: Communicator) -> None:
    torch.manual_seed(0)
    assert_cut_as_whole(comm, nn.Sequential(nn.Linear(6, 6), GatedPost()).double(), random_input(2, 5, 6))


class Crossing(nn.Module):
    """An attention to a context, or to its own input; a statement says which."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 2
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if context is None:
            context = x
        shape = (x.shape[0], -1, self.heads, self.head_dim)
        q = self.to_q(x).view(shape).transpose(1, 2)
        k, v = self.to_k(context).view(shape).transpose(1, 2), self.to_v(context).view(shape).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


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


class Repeated(nn.Module):
    """A gated feed-forward network that runs twice, the second time on its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 11), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.down(F.silu(self.gate(x)) * self.up(x))
        return x


class Shifted(Repeated):
    """One that adds a parameter to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("network", [Repeated, Shifted])
def test_a_gated_network_whose_layers_get_what_it_has_computed_sums_the_gradient(
    comm: Communicator, network: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    assert_cut_as_whole(comm, nn.Sequential(nn.Linear(6, 6), network()).double(), random_input(2, 5, 6))


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.brief_on(2)
@pytest.mark.each("name")
@pytest.mark.thorough(*(f"{name}-{pieces}" for name in MODELS for pieces in (False, True)))  # test_parity trains them
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_gradients_are_those_of_one_process(
    comm: Communicator, name: str, sequence_parallel: bool, capsys: Any
) -> None:
    whole, model = made(name), made(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        if sequence_parallel and name in REFUSED and comm.size > 1:
            with pytest.raises(ConfigurationError, match=r"^sequence_parallel: plan='auto'"):
                mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
            return
        if sequence_parallel and name == "opt" and comm.size > 1:  # it joins batch and sequence in a block
            with pytest.raises(ConfigurationError, match=r"sequence parallelism: got an input of shape \(\d+, 32\)"):
                mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
            return
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=sequence_parallel)
        said = capsys.readouterr().out
        assert (type(model).__name__ in said) == (comm.rank == 0 and comm.size > 1)
        assert_same(model, whole)
        assert largest_difference(model, whole) == 0.0
        assert comm.size == 1 or any(placement(p).cut is not None for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3"])
def test_it_finds_what_ready_plans_name(name: str) -> None:
    from mpidl.tensor.plans import matches
    from mpidl.tensor.ready_plans import plan_for

    model = build(name)
    ready = plan_for(model)
    assert ready is not None
    regions = AttentionParallel | FeedForwardParallel

    def cut(plan: Any) -> set[str]:
        found = matches(plan, model)
        return {name for name, _, styles in found for style in styles if isinstance(style, regions)}

    assert cut(automatic_plan(model, 2, sequence_parallel=False).plan) == cut(ready)


def test_the_report_has_a_line_for_each_pattern_with_the_reason_to_leave_it_whole() -> None:
    lines = automatic_plan(OTHERS["olmo2"](), 2, sequence_parallel=False).lines
    assert lines[0].startswith("auto plan of Olmo2ForCausalLM over 2 ranks")
    fields = {line.split()[1]: line.split(maxsplit=2) for line in lines[1:]}
    assert len(fields) == len(lines) - 1
    assert fields["model.embed_tokens"][0] == fields["lm_head"][0] == "vocabulary"
    assert fields["model.layers.*.self_attn"][::2] == ["whole", "q_norm may compute on several heads"]
    assert fields["model.layers.*.mlp"][::2] == ["feed-forward", "53 features: gate_proj, up_proj -> down_proj"]


@pytest.mark.parametrize(
    ("name", "at", "reason"),
    [
        ("bloom", "transformer.h.*.self_attention", "query_key_value"),
        ("mixtral", "model.layers.*.mlp.experts", "MixtralExperts"),
    ],
)
def test_what_cannot_be_cut_stays_whole_with_a_reason(name: str, at: str, reason: str) -> None:
    lines = automatic_plan(OTHERS[name](), 2, sequence_parallel=False).lines
    assert any(line.split()[:2] == ["whole", at] and reason in line for line in lines)


class Mixing(nn.Module):
    """Two linear layers between which features are normalised: not to be cut by features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.softmax(self.up(x), -1))


class Separate(nn.Module):
    """Two linear layers of fitting sizes, of which neither gets what the other has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up(x), self.down(y)


class OtherNames(nn.Module):
    """An attention whose number of heads is an attribute of a name that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.d_model, self.d_k, self.h = 8, 2, 4
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        k = self.k_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, self.d_model))


class ByWidth(nn.Module):
    """An attention that computes the heads' width from that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.query, self.key, self.value, self.proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q = self.query(x).view(b, t, self.n_head, -1).transpose(1, 2)
        k = self.key(x).view(b, t, self.n_head, -1).transpose(1, 2)
        v = self.value(x).view(b, t, self.n_head, -1).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) / (c // self.n_head) ** 0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class OwnParameter(nn.Module):
    """A network with a parameter that acts on all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beta = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * torch.sigmoid(self.beta * h))


class Deviation(Mixing):
    """One whose features are divided by their deviation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.std(-1, keepdim=True))


class Halves(Mixing):
    """One that puts halves of the features together anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(torch.cat([a * b.sigmoid(), b * a.sigmoid()], -1))


class KeepsALoss(Mixing):
    """One that keeps the mean of its features, as for a loss that makes them sparse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        self.sparsity = h.abs().mean()
        return self.down(h)


class ReturnsALoss(Mixing):
    """One that returns such a mean."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.up(x))
        y = self.down(h)
        return y, h.mean()


class Gates(Mixing):
    """One whose output is weighed by all features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        y = self.down(h)
        if self.training:
            y = y * h.amax(-1, keepdim=True)
        return y


class Largest(Mixing):
    """One that keeps the largest of the features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * (h >= h.kthvalue(3, -1, keepdim=True).values))


def by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, time, heads * any] -> [batch, heads, time, any], as einops writes it."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class FusedByHeads(nn.Module):
    """An attention whose fused weight another function lays out by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = by_heads(self.qkv(x), self.heads).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LaidOutAnew(FusedByHeads):
    """One that keeps the result under the same name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv = by_heads(qkv, self.heads)
        q, k, v = qkv.chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedInARow(FusedByHeads):
    """One whose queries, keys and values lie in a row, under one name after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv = qkv.reshape(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def squash(h: torch.Tensor) -> torch.Tensor:
    """Divides features by their norm."""
    return h / (1 + h.norm(dim=-1, keepdim=True))


class Squash(nn.Module):
    """A module that does what `squash` does."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return squash(h)


class Cube(nn.Module):
    """An activation that is of no library."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.square(h).clamp(max=4.0)


class WithFunction(Mixing):
    """A network with a function of the program's own between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(squash(self.up(x)))


class WithMethod(Mixing):
    """One with a method of its own there."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h - h.mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class ByModule(Mixing):
    """One with a module, or a function in an attribute, there."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class ByFirst(Mixing):
    """One whose features are weighed by the first of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * h[..., :1])


class ByProduct(Mixing):
    """One whose features are weighed by their product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * h.prod(-1, keepdim=True))


class Activates(Mixing):
    """One with a method of its own that acts on single features: no reason to leave it whole."""

    def activate(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h) if self.training else torch.where(h > 0, h, 0.1 * h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.up(x)))


class Beside(nn.Module):
    """A network of layers `dense`, of which the first lies in a module with `between`."""

    class First(nn.Module):
        def __init__(self, between: nn.Module) -> None:
            super().__init__()
            self.dense, self.between = nn.Linear(6, 8), between

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.between(self.dense(x))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 6)

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.dense(h) + x

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.output = self.First(between), self.Last()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.intermediate(x), x)


class WithHeads(nn.Module):
    """An attention of 4 heads, with methods that split and merge them; derived ones do something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def split(self, part: torch.Tensor) -> torch.Tensor:
        return part.view(part.shape[0], part.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.transpose(1, 2).flatten(2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-1, -2)) / self.head_dim**0.5).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(self.merge(self.attend(q, k, v)))


class Normalised(WithHeads):
    """One whose queries are normalised over all heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.split(F.normalize(self.q_proj(x), dim=-1))
        return self.out_proj(self.merge(self.attend(q, self.split(self.k_proj(x)), self.split(self.v_proj(x)))))


class NormBehind(WithHeads):
    """One with a norm without parameters over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return self.norm(heads.transpose(1, 2).flatten(2))


class NormOfHeads(NormBehind):
    """One with such a norm over each head: no reason to leave it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, elementwise_affine=False)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return self.norm(heads).transpose(1, 2).flatten(2)


class OverHeads(WithHeads):
    """One whose heads compete for the keys."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.softmax(q @ k.transpose(-1, -2), dim=1) @ v


class ByPart(WithHeads):
    """One with a module inside that has the number of heads as well."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(part.shape[0], part.shape[1], self.heads, -1).transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.part(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class SharedQueries(nn.Module):
    """An attention whose queries are its keys: three square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qk, self.v, self.out = 4, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.qk(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """An attention of 4 heads in one method; derived ones go by numbers of which a rank has others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.embed_dim = 4, 2, 8
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, heads = x.shape[0], x.shape[1], self.num_heads
        shape = (b, t, heads, self.embed_dim // self.num_heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.num_heads != self.num_heads)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, self.embed_dim))


class Slopes(Heads):
    """One whose scores are lowered by distances, at each head by another slope."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        place = torch.arange(x.shape[1])
        mask = -(place[None, :] - place[:, None]).abs() * slopes[:, None, None]
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Root(Heads):
    """One whose scores are divided by the root of the width of all heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = (q @ k.mT / math.sqrt(self.embed_dim)).softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.embed_dim))


class RootOfResult(Heads):
    """One that asks what a layer returns for that width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        queries = self.q_proj(x)
        q = queries.view(shape).transpose(1, 2) * queries.shape[-1] ** -0.5
        k, v = (part.view(shape).transpose(1, 2) for part in (self.k_proj(x), self.v_proj(x)))
        return self.out_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WrittenOut(Heads):
    """One whose number of heads is no attribute, but is written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class WrittenBeside(Heads):
    """One where it is, beside the width of a head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], -1, 4, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attends(Heads):
    """One with a method for the products, which derived ones have in another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByShape(Attends):
    """One that takes the number of heads from a shape, for slopes as those of `Slopes`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = q.shape[1]
        slopes = 2.0 ** (-8.0 * torch.arange(1, h + 1) / h)
        return ((q @ k.mT) * slopes[:, None, None]).softmax(-1) @ v


class ByUnpackedShape(Attends):
    """One that takes it from the whole shape."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, h, t, d = q.shape
        return F.scaled_dot_product_attention(q / h, k, v.view(b, h, t, d))


class TwoKinds(Attends):
    """One in which half of the heads look at what was before alone."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (q1, q2), (k1, k2), (v1, v2) = q.chunk(2, dim=1), k.chunk(2, dim=1), v.chunk(2, dim=1)
        first = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True)
        return torch.cat([first, F.scaled_dot_product_attention(q2, k2, v2)], dim=1)


class FirstHeads(Attends):
    """One in which the first half of the heads has no scores of its own."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        y[:, : self.num_heads // 2] = 0.0
        return y * y[:, : self.num_heads // 2].mean()


def slope_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes an attention whose scores go by the number of heads."""
    return (q @ k.mT / q.shape[1]).softmax(-1) @ v


def root_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes an attention whose scores go by the width of a head."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class ByNamedAttention(Attends):
    """One that calls a function of the program, whose name says that it is an attention."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return slope_attention(q, k, v)


class ByOwnAttention(Attends):
    """One that calls a function of the program which acts on single heads: no reason to leave it whole."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return root_attention(q, k, v)


class DropsBetween(Heads):
    """One that drops elements of its keys' input, behind its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(self.drop(x)).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tiled(Heads):
    """One whose key/value heads serve every second query head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_heads = self.n_rep = 2
        self.k_proj, self.v_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(*x.shape[:2], self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(*x.shape[:2], self.num_key_value_heads, self.head_dim).transpose(1, 2)
        k, v = k.repeat(1, self.n_rep, 1, 1), v.repeat(1, self.n_rep, 1, 1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WidthFirst(Heads):
    """One whose features are all heads of one place of a head, then of the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.head_dim, self.num_heads)
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(shape).permute(0, 3, 1, 2) for part in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def topk_relu(h: torch.Tensor) -> torch.Tensor:
    """Keeps the largest features."""
    return h * (h >= h.topk(2, -1).values[..., -1:])


def clip(h: torch.Tensor) -> torch.Tensor:
    """Bounds the norm of all features."""
    return h / h.norm(dim=-1, keepdim=True).clamp(min=1)


class ByNamedActivation(Mixing):
    """A network with a function of the program that has the name of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(topk_relu(self.up(x)))


class ByNamedClip(Mixing):
    """One with a function that has the name of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(clip(self.up(x)))


def soft(h: torch.Tensor) -> torch.Tensor:
    """Computes each feature by itself."""
    return h * torch.sigmoid(h)


class ByFunction(Mixing):
    """One with a function that acts on single features: no reason to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(soft(self.up(x)))


class ByOutFeatures(Mixing):
    """A network that divides by the root of the number of its features, as its layer has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) / math.sqrt(self.up.out_features))


class ByLastSize(Mixing):
    """One that has the number from its features themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.shape[-1] ** 0.5)


class BySize(Mixing):
    """One that has it from them by a method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.size(-1))


class ByWidths(Mixing):
    """One that goes by its input's width, and by the number of its sequences: no reasons to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) / x.shape[-1] ** 0.5
        return self.down(h / h.shape[0])


class Chain(nn.Module):
    """Three layers of one size, of which each gets what the one before gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Backwards(nn.Sequential):
    """One whose modules run in the opposite order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class ShapeFirst(OtherNames):
    """An attention with a number of heads that is not known, in a shape that it makes beforehand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (len(x), -1, self.h, self.d_k)
        q, k = self.q_linear(x).view(shape).transpose(1, 2), self.k_linear(x).view(shape).transpose(1, 2)
        v = self.v_linear(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, self.d_model))


class SlowButExact(Mixing):
    """One with another way to compute, which its settings rule out: no reason to leave it whole."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.pieces = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        if self.pieces > 1:
            y = self.down.bias + F.linear(h[..., :4], self.down.weight[:, :4])
            y = y + F.linear(h[..., 4:], self.down.weight[:, 4:])
        else:
            y = self.down(h)
        return y


class InPlace(Mixing):
    """One that changes its features in place, and checks them: no reasons to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.relu_()
        torch._assert(h.dim() > 1, "one sequence")
        return self.down(h)


class Branches(Mixing):
    """One that goes another way where a feature is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        y = self.down(h)
        if h.amax() > 3:
            y = 2 * y
        return y


class Scaled(Mixing):
    """One whose output is scaled by a parameter of its own, which is no reason to leave it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * self.down(F.relu(self.up(x)))


class Square(OtherNames):
    """Heads as many as each is wide, under known names; the input's width is compared alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = self.num_heads = 3
        del self.d_k, self.h
        self.d_model = 9
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        if c != 9:
            raise ValueError("the width")
        q = self.q_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, self.d_model))


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


def parametrized() -> nn.Module:
    """Layers whose weights are computed from other parameters."""
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(6, 8, bias=False)), nn.ReLU(), norm(nn.Linear(8, 6, bias=False)))


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


class Block(nn.Module):
    """An attention and a feed-forward network with their norms; derived ones look at other tokens as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.up, self.down = WithHeads(), nn.Linear(8, 11), nn.Linear(11, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.features(self.norm_2(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class LooksBack(Block):
    """One that adds to each token the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return x + self.features(self.norm_2(x + before))


class TakesMean(Block):
    """One whose network takes the mean of all tokens off, before its first layer."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x - x.mean(1, keepdim=True))))


class Shift(nn.Module):
    """Moves tokens by one place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, dims=1)


class HasModule(Block):
    """One with a module without parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.features(self.module(self.norm_2(x)))


class Behind(WithHeads):
    """An attention that looks at other tokens behind its last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        y = self.out_proj(self.merge(self.attend(q, k, v)))
        return y / y.shape[1]


class HasBehind(Block):
    """One with such an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Behind()


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_blocks_that_compute_each_token_by_itself_are_cut_in_pieces(comm: Communicator) -> None:
    torch.manual_seed(0)
    stack = Stack(Block(), Block()).double()
    assert_cut_as_whole(comm, stack, random_input(2, 5, 8), sequence_parallel=True)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (LooksBack(), r"x\[:, :1\]"),
        (TakesMean(), "features"),
        (HasModule(Shift()), "module"),
        (HasModule(nn.AvgPool1d(1)), "module"),
        (HasModule(nn.BatchNorm1d(5, affine=False)), "module"),
        (HasBehind(), r"y\.shape\[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_blocks_that_look_at_other_tokens_are_refused_in_pieces(block: nn.Module, what: str) -> None:
    model = Stack(Block(), block)
    assert "blocks.1.attn" in automatic_plan(model, 2, sequence_parallel=False).plan
    with pytest.raises(ConfigurationError, match=rf"^sequence_parallel: plan='auto': blocks\.1\S*: {what} may look at"):
        automatic_plan(model, 2, sequence_parallel=True)
