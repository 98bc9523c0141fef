"""Small models with dropout everywhere, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mpidl.models.gpt2 import GPT2, GPT2Config
from tests.mpidl.tensor import reference
from tests.mpidl.tensor.reference import VOCABULARY

T = TypeVar("T")


def _gpt2() -> nn.Module:
    return GPT2(GPT2Config(vocab_size=VOCABULARY, block_size=32, layers=2, heads=7, embd=28, dropout=0.2))


def _hf_gpt2(attention: str = "sdpa") -> nn.Module:
    import transformers

    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.3}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 2, "n_head": 7, "n_embd": 28}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes,
            **rates,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
            attn_implementation=attention,
        )
    )


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=53,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=0.3,
        )
    )


def _dropping(name: str) -> nn.Module:
    """One of `reference`, with a rate in place of all that are 0."""
    model = reference.MODELS[name]()
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or (key == "p" and isinstance(module, nn.Dropout))):
                setattr(module, key, 0.15)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "hf gpt2": _hf_gpt2,
    "hf gpt2, eager": lambda: _hf_gpt2("eager"),
    "llama": _llama,
    **{name: partial(_dropping, name) for name in ("bert", "hf bert", "t5", "phi3")},
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model in training mode, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def seeded(function: Callable[[], T], seed: int = 5) -> T:
    """Calls a function with the random generator in the same state each time."""
    torch.manual_seed(seed)
    return function()
