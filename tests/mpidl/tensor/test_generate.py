"""Forward passes without training, and generated tokens, of a cut model: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh
from tests.mpidl.tensor.reference import MODELS, all_in_float64, build, loss_of, tokens

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

LIBRARY = [name for name in MODELS if name not in ("gpt2", "bert", "hf bert", "hf bert, decoder", "phi3")]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "repetition_penalty": 1.3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


def cache_heads(cache: Any) -> set[int]:
    """The numbers of heads in a cache of keys and values, also of an encoder and a decoder."""
    cache = getattr(cache, "self_attention_cache", cache)
    return {layer.keys.shape[1] for layer in cache.layers}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tokens_of_gpt2_are_those_of_one_process(comm: Communicator, sequence_parallel: bool) -> None:
    whole, model = build("gpt2"), build("gpt2")
    prompt = tokens(0)[:, :5]
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        for p in (whole, model):
            p.eval()
        for settings in ({"top_k": 1}, {"temperature": 1.5, "top_k": 40}, {"context": 9}):
            made: list[Any] = []
            for generating in (whole, model):
                random = torch.Generator().manual_seed(4)
                made.append(generating.generate(prompt, 12, generator=random, **settings))
            assert torch.equal(*made)
        pasts: list[Any] = [[] for _ in range(model.config.layers)]
        model(prompt, pasts=pasts)
        assert {past[0].shape[1] for past in pasts} == {7 // comm.size + (comm.rank < 7 % comm.size)}


@pytest.mark.each("name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARY)
def test_tokens_of_transformers_are_those_of_one_process(comm: Communicator, name: str, way: str) -> None:
    whole, model = build(name), build(name)
    prompt = tokens(0)[:, :5].clamp(min=3)
    settings = {"max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0, **WAYS[way]}
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=way == "sampling")
        made = []
        for generating in (whole, model):
            if way == "sampling":
                loss_of(generating, tokens(1)).backward()  # sequences are in pieces, and whole again in eval mode
            generating.eval()
            torch.manual_seed(5)
            made.append(generating.generate(prompt, return_dict_in_generate=True, output_logits=True, **settings))
        assert torch.equal(made[0].sequences, made[1].sequences)
        assert made[0].sequences.shape[1] >= 7
        torch.testing.assert_close(made[1].logits[0] + 0, made[0].logits[0], rtol=1e-9, atol=1e-9)
        (all_heads,), heads = cache_heads(made[0].past_key_values), cache_heads(made[1].past_key_values)
        held = mpidl.all_gather_object(comm, max(heads))
        assert len(heads) == 1
        assert sum(held) == max(all_heads, comm.size)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("implementation", ["static", "dynamic_full"])
def test_a_cache_of_a_fixed_size_holds_the_ranks_heads(comm: Communicator, implementation: str) -> None:
    whole, model = build("llama, two key heads"), build("llama, two key heads")
    prompt = tokens(0)[:, :5].clamp(min=3)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    if implementation == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    with all_in_float64(), Mesh(tp=2, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        made = [m.eval().generate(prompt, return_dict_in_generate=True, **settings) for m in (whole, model)]
        assert torch.equal(made[0].sequences, made[1].sequences)
        assert cache_heads(made[1].past_key_values) == {1}


@pytest.mark.parametrize("name", ["bert", "hf bert", "t5", "qwen3"])
def test_forward_passes_without_gradients(comm: Communicator, name: str) -> None:
    whole, model = build(name), build(name)
    x = tokens(0)
    arguments = {"decoder_input_ids": x[:, :4]} if name == "t5" else {}
    mask = torch.ones_like(x)
    mask[1, 8:] = 0
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        with torch.no_grad():
            for mode in (True, False, True):
                logits = [m.train(mode)(x, attention_mask=mask, **arguments).logits for m in (whole, model)]
                torch.testing.assert_close(logits[1] + 0, logits[0], rtol=1e-9, atol=1e-9)
                assert logits[1].argmax(-1).tolist() == logits[0].argmax(-1).tolist()
        with torch.inference_mode():
            logits = [m.eval()(x, attention_mask=mask, **arguments).logits for m in (whole, model)]
            assert logits[1].argmax(-1).tolist() == logits[0].argmax(-1).tolist()
