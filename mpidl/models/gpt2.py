"""GPT-2, the original architecture: pre-norm blocks, learned positions, output layer tied to the embedding.

Names and layouts of the parameters are those of the published weights (`transformer.h.0.attn.c_attn.weight`
is [in, out]), so that real weights load as they are (`models.pretrained`). Source: Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError


@dataclass(frozen=True)
class GPT2Config:
    """Sizes.

    block_size: positions, the longest sequence.
    embd: width, a multiple of heads.
    """

    vocab_size: int = 50257
    block_size: int = 1024
    layers: int = 12
    heads: int = 12
    embd: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "layers", "heads", "embd"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: got {getattr(self, name)}; needs at least 1")
        if self.embd % self.heads:
            raise UsageError(f"heads: {self.heads} heads do not fit a width of {self.embd}; needs a divisor of it")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout: got {self.dropout}; needs a probability below 1")

    @classmethod
    def named(cls, name: str, **changes: Any) -> GPT2Config:
        """A size by its name, from SIZES, with changes to single settings."""
        if name not in SIZES:
            raise UsageError(f"model: got {name!r}; needs one of {', '.join(SIZES)}")
        return replace(SIZES[name], **changes)


# 27m: 27.1 million parameters with a vocabulary of bytes.
SIZES = {
    "27m": GPT2Config(layers=11, heads=7, embd=448),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(layers=24, heads=16, embd=1024),
    "gpt2-large": GPT2Config(layers=36, heads=20, embd=1280),
    "gpt2-xl": GPT2Config(layers=48, heads=25, embd=1600),
}


# Cache of one layer: empty, or keys and values, each [batch, heads, time, width of a head].
Past = list[torch.Tensor]


class Projection(nn.Module):
    """x @ weight + bias, with the weight stored [in, out] as in the published weights."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., in] -> [..., out]."""
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPT2Config, residual_std: float) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = config.heads, config.embd // config.heads, config.dropout
        self.c_attn = Projection(config.embd, 3 * config.embd, 0.02)
        self.c_proj = Projection(config.embd, config.embd, residual_std)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Maps [batch, time, embd] -> [batch, time, embd]. past: keys, values of earlier positions; extended here."""
        qkv = self.c_attn(x)
        batch, time, _ = qkv.shape
        shape = (batch, time, self.heads, self.head_width)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        dropout = self.dropout if self.training else 0.0
        causal = k.shape[2] == time  # a single new position sees all earlier ones
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        y = self.c_proj(y.transpose(1, 2).reshape(batch, time, self.heads * self.head_width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two projections with a tanh-approximated GELU between."""

    def __init__(self, config: GPT2Config, residual_std: float) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Projection(config.embd, 4 * config.embd, 0.02)
        self.c_proj = Projection(4 * config.embd, config.embd, residual_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, time, embd] -> [batch, time, embd]."""
        x = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        residual_std = 0.02 / math.sqrt(2 * config.layers)
        self.ln_1 = nn.LayerNorm(config.embd)
        self.attn = Attention(config, residual_std)
        self.ln_2 = nn.LayerNorm(config.embd)
        self.mlp = MLP(config, residual_std)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Maps [batch, time, embd] -> [batch, time, embd]."""
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The language model. config: GPT2Config."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        wte = nn.Embedding(config.vocab_size, config.embd)
        wpe = nn.Embedding(config.block_size, config.embd)
        blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": blocks, "ln_f": nn.LayerNorm(config.embd)})
        nn.init.normal_(wte.weight, std=0.02)
        nn.init.normal_(wpe.weight, std=0.02)
        self.lm_head = nn.Linear(config.embd, config.vocab_size, bias=False)
        self.lm_head.weight = wte.weight

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, pasts: list[Past] | None = None
    ) -> torch.Tensor:
        """Logits, or with targets the mean cross-entropy.

        tokens, targets: int64 [batch, time], time at most block_size. Logits: [batch, time, vocab_size].
        pasts: one list a layer, empty at first; then `tokens` are one position behind those already seen.
        """
        part: Any = self.transformer
        seen = pasts[0][0].shape[2] if pasts and pasts[0] else 0
        positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        x = part["wte"](tokens) + part["wpe"](positions)
        x = F.dropout(x, self.config.dropout, self.training)
        for number, block in enumerate(part["h"]):
            x = block(x, None if pasts is None else pasts[number])
        logits: torch.Tensor = self.lm_head(part["ln_f"](x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        count: int,
        context: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Appends `count` sampled tokens to int64 [batch, time]; returns [batch, time + count].

        context: how many of the last tokens are looked at, at most and by default block_size; once so many
        are remembered, the older half is forgotten.
        """
        context = min(context or self.config.block_size, self.config.block_size)
        pasts: list[Past] = []
        for _ in range(count):
            if pasts and pasts[0][0].shape[2] < context:
                logits = self(tokens[:, -1:], pasts=pasts)
            else:
                kept = max(1, context // 2 if pasts else context)
                pasts = [[] for _ in range(self.config.layers)]
                logits = self(tokens[:, -kept:], pasts=pasts)
            logits = logits[:, -1].float() / temperature
            if top_k is not None:
                least = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
        return tokens


def parameter_count(model: nn.Module) -> int:
    """Parameters; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())
