"""What a layer keeps for backward, by formula: under sequence parallelism 1/tp of all of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.tensor import traffic
from mpidl.tensor.communication import TensorGroup, Traffic
from tests.mpidl.tensor.reference import loss_of, part_of
from tests.mpidl.tensor.with_dropout import seeded

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 24, 48, 12, 60  # divisible by 1 to 4 ranks
ITEM = 8


def _gpt2(layers: int, dropout: float = 0.0) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "block_size": TOKENS, "heads": HEADS, "embd": WIDTH}
    return GPT2(GPT2Config(**sizes, layers=layers, dropout=dropout))


def _llama(layers: int) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=TOKENS,
        )
    )


def _batch() -> torch.Tensor:
    return torch.arange(BATCH * (TOKENS + 1)).view(BATCH, TOKENS + 1) % VOCABULARY


def _loss(model: nn.Module) -> torch.Tensor:
    x = _batch()
    return loss_of(model, x if isinstance(model, GPT2) else x[:, :TOKENS])


def kept_bytes(model: nn.Module) -> int:
    """Bytes of all storage that a forward pass keeps for backward, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = seeded(lambda: _loss(model))
    found = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return found


def of_a_layer(build: Callable[[int], nn.Module], measured: Callable[[nn.Module], int], **cuts: Any) -> int:
    """What a layer adds: that of a model of three less that of one of two."""
    found = []
    for layers in (2, 3):
        model = build(layers).double()
        if cuts:
            mpidl.parallelize(model, **cuts)
        found.append(measured(model))
    return found[1] - found[0]


BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": _gpt2,
    "gpt2 with dropout": lambda layers: _gpt2(layers, 0.1),
    "llama": _llama,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_with_sequences_in_pieces_a_layer_keeps_1_of_tp_of_everything(comm: Communicator, name: str) -> None:
    whole = of_a_layer(BUILDERS[name], kept_bytes)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        part = of_a_layer(BUILDERS[name], kept_bytes, mesh=mesh, sequence_parallel=True)
    assert part * comm.size == whole


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_whole_sequences_each_rank_keeps_norms_and_the_inputs_of_regions(
    comm: Communicator, dropout: float
) -> None:
    """10 of the 34 bytes of Korthikanti et al.: two inputs of norms, two of regions, two masks; and what norms note."""

    def build(layers: int) -> nn.Module:
        return _gpt2(layers, dropout)

    whole = of_a_layer(build, kept_bytes)
    masks, notes = 2 * WIDTH * (dropout > 0), 2 * 2
    replicated = BATCH * TOKENS * (4 * WIDTH + masks + notes) * ITEM
    with Mesh(tp=comm.size, comm=comm) as mesh:
        assert of_a_layer(build, kept_bytes, mesh=mesh) * comm.size == whole + (comm.size - 1) * replicated


# ---- messages ------------------------------------------------------------------------------------------------------


def _elements(model: nn.Module) -> dict[str, int]:
    """Elements of a forward and a backward pass."""
    _loss(model).backward()
    return dict(vars(traffic(model)))


SIZE = BATCH * TOKENS * WIDTH


@pytest.mark.ranks(2, 3, 4)
def test_a_layer_of_llama_sends_4_all_reduces(comm: Communicator) -> None:
    """One for three projections, and one for a gate and its values; `test_traffic` has those of GPT-2."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        counts = _of_a_layer_by_name(_llama, mesh=mesh)
    assert (counts["all_reduces"], counts["reduced"]) == (4, 4 * SIZE)
    assert counts["reduce_scatters"] == counts["all_gathers"] == 0
    assert Traffic(**counts).sent(comm.size) == pytest.approx(8 * SIZE * (comm.size - 1) / comm.size)


@pytest.mark.ranks(2, 3, 4)
def test_with_sequences_in_pieces_it_gathers_the_inputs_of_regions_again(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        counts = _of_a_layer_by_name(_llama, mesh=mesh, sequence_parallel=True)
    assert (counts["reduce_scatters"], counts["scattered"]) == (4, 4 * SIZE)
    assert (counts["all_gathers"], counts["gathered"]) == (6, 6 * SIZE)
    assert counts["reduced"] <= 6 * WIDTH  # gradients of two norms, and of biases
    of_activations = Traffic(**{**counts, "reduced": 0})
    assert of_activations.sent(comm.size) == pytest.approx(10 * SIZE * (comm.size - 1) / comm.size)


def _of_a_layer_by_name(build: Callable[[int], nn.Module], **cuts: Any) -> dict[str, int]:
    found = []
    for layers in (2, 3):
        model = mpidl.parallelize(build(layers).double(), **cuts)
        found.append(_elements(model))
    return {name: found[1][name] - found[0][name] for name in found[0]}


@pytest.mark.ranks(2, 3, 4)
def test_the_embedding_sends_2_bsh_and_the_loss_3_numbers_a_token(comm: Communicator) -> None:
    model = _gpt2(1).double()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        model.transformer["wte"](_batch()[:, :TOKENS]).sum().backward()
        assert traffic(model) == Traffic(all_reduces=1, reduced=SIZE)
        logits = model.lm_head(torch.ones(BATCH * TOKENS, WIDTH, dtype=torch.float64))
        loss = nn.functional.cross_entropy(logits, _batch()[:, :TOKENS].flatten())
        assert traffic(model) == Traffic(all_reduces=3, reduced=SIZE + 3 * BATCH * TOKENS)
        torch.autograd.grad(loss, logits)
        sent = Traffic(all_reduces=3, reduced=SIZE + 3 * BATCH * TOKENS)
        assert traffic(model) == sent
        probabilities = logits.softmax(-1)  # of all tokens' logits, which are gathered for it
        assert traffic(model) == replace(sent, all_gathers=1, gathered=probabilities.numel())


# ---- an input that is gathered again -------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_one_gather_serves_all_layers_of_a_region_in_each_backward_pass(comm: Communicator) -> None:
    whole, model = _llama(1).double(), _llama(1).double()
    model.load_state_dict(whole.state_dict())
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        for each in (whole, model):
            each.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
            each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        losses = [_loss(each) for each in (whole, model)]
        before = traffic(model).all_gathers
        for loss in losses:
            loss.backward(retain_graph=True)
        first = traffic(model).all_gathers - before
        for loss in losses:
            loss.backward()
        assert traffic(model).all_gathers - before == 2 * first
        assert first == 2 + 2 + 1  # regions again; gradients of regions' outputs; where pieces begin
        for (name, p), q in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(p.grad, part_of(q[1].grad, p), rtol=1e-4, atol=1e-6, msg=name)  # fp32 norms


@pytest.mark.ranks(2, exactly=True)
def test_a_gathered_input_is_released_after_its_last_use(comm: Communicator) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    model = _llama(1).double()
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        with pytest.MonkeyPatch.context() as patch:
            gather = TensorGroup.all_gather

            def noted(*args: Any) -> torch.Tensor:
                assert sum(ref() is not None for ref in seen) <= 1
                seen.append(weakref.ref(result := gather(*args)))
                return result

            patch.setattr(TensorGroup, "all_gather", noted)
            loss = _loss(model)
            alive = [ref() for ref in seen if ref() is not None]
            assert len(alive) <= 1  # the hidden states that the output layer keeps
            del alive
            loss.backward(retain_graph=True)
            assert sum(ref() is not None for ref in seen) <= 1
