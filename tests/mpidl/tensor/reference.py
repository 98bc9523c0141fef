"""Small models of every family with a ready plan, in float64, and their training in one process and cut over tp."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.mesh import placement
from mpidl.models.bert import BERT, BERTConfig
from mpidl.models.gpt2 import GPT2, GPT2Config

VOCABULARY, TOKENS = 257, 13  # odd numbers, which no number of ranks divides


def _gpt2() -> nn.Module:
    return GPT2(GPT2Config(vocab_size=VOCABULARY, block_size=32, layers=2, heads=7, embd=28))


def _hf_gpt2() -> nn.Module:
    import transformers

    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 2, "n_head": 7, "n_embd": 28}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    )


def _llama(family: str, key_heads: int, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=53,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
        **settings,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)  # type: ignore[no-any-return]


def _bert() -> nn.Module:
    return BERT(BERTConfig(vocab_size=VOCABULARY, block_size=32, layers=2, heads=7, embd=28, inner=53))


def _hf_bert(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=30,
        intermediate_size=53,
        num_hidden_layers=2,
        num_attention_heads=5,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )
    if settings.get("is_decoder"):
        return transformers.BertLMHeadModel(config)
    return transformers.BertForMaskedLM(config)


def _t5(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=28,
        d_kv=6,
        d_ff=53,
        num_layers=2,
        num_heads=5,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **settings,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "hf gpt2": _hf_gpt2,
    "llama, one key head": lambda: _llama("Llama", 1),
    "llama, two key heads": lambda: _llama("Llama", 2),
    "mistral": lambda: _llama("Mistral", 4),
    "qwen2, tied": lambda: _llama("Qwen2", 4, tie_word_embeddings=True),
    "qwen3": lambda: _llama("Qwen3", 2, head_dim=6),
    "phi3": lambda: _llama("Phi3", 4, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0),
    "bert": _bert,
    "hf bert": _hf_bert,
    "hf bert, decoder": lambda: _hf_bert(is_decoder=True, add_cross_attention=True),
    "t5": _t5,
    "t5, gated, untied": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Inside, models compute in float64 also what they compute in fp32 whatever they are in: losses and norms."""

    def root_mean_square(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for norm in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "T5LayerNorm"):
            family = norm.removesuffix("RMSNorm").removesuffix("LayerNorm").lower()
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            patch.setattr(getattr(module, norm), "forward", root_mean_square)
        yield


def tokens(step: int, batch: int = 2) -> torch.Tensor:
    """Tokens of a step, the same on every rank of tp."""
    random = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (batch, TOKENS), generator=random)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token."""
    if isinstance(getattr(model, "module", model), GPT2):  # under an engine as well
        return model(x[:, :-1], x[:, 1:])  # type: ignore[no-any-return]
    settings = getattr(getattr(model, "module", model), "config", None)
    if getattr(settings, "is_encoder_decoder", False):
        return model(input_ids=x, labels=x[:, 2:].contiguous()).loss  # type: ignore[no-any-return]
    if getattr(settings, "add_cross_attention", False):
        random = torch.Generator().manual_seed(int(x.sum()))
        memory = torch.rand(len(x), 5, settings.hidden_size, dtype=torch.float64, generator=random)
        return model(input_ids=x, labels=x, encoder_hidden_states=memory).loss  # type: ignore[no-any-return]
    return model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]


def train(model: nn.Module, steps: int, optimizer: Any = None) -> list[float]:
    """Trains, and returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_difference(model: nn.Module, whole: nn.Module) -> float:
    """The largest difference of a weight, of the whole model that `model` is cut from. Collective."""
    states = mpidl.tensor.model_state_dict(model)
    assert states.keys() == whole.state_dict().keys()
    return max((states[name] - value).abs().max().item() for name, value in whole.state_dict().items())


def part_of(gradient: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This rank's part of what belongs to a whole parameter."""
    cut = placement(p).cut
    return gradient if cut is None else cut.of(gradient)
