"""Small models with dropout everywhere, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
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


class DroppingFeatures(nn.Module):
    """A feed-forward network in a module with its norm, so that a layer begins the region; 12 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(self.norm(x))))  # type: ignore[no-any-return]


class DroppingShares(nn.Module):
    """An attention with a residual inside, so that each of its layers begins the region; 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = 4, 2, 0.5
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        shares = F.dropout(F.softmax(q @ k.mT, -1), self.dropout, self.training)
        return x + self.o((shares @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


REGIONS_OF_LAYERS = (DroppingFeatures, DroppingShares)


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model in training mode, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def seeded(function: Callable[[], T], seed: int = 5) -> T:
    """Calls a function with the random generator in the same state each time."""
    torch.manual_seed(seed)
    return function()
