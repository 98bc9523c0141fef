"""Models that the automatic plan is tried on: of transformers, and one written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.mpidl.tensor.reference import MODELS, VOCABULARY, build

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
