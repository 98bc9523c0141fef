"""A GPT of plain torch.nn.Linear layers, which every library can cut over ranks, and what it is trained on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention with a layer each for queries, keys, values and the output. parts: see `LinearGPT`."""

    def __init__(self, width: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.heads, self.head_width = heads // parts, width // heads
        inside = self.heads * self.head_width
        self.q, self.k, self.v = (nn.Linear(width, inside) for _ in range(3))
        self.o = nn.Linear(inside, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, time, width] -> [batch, time, width]."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Two layers with a GELU between. parts: see `LinearGPT`."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width // parts), nn.Linear(4 * width // parts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, time, width] -> [batch, time, width]."""
        result: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


class Block(nn.Module):
    """One layer. parts: see `LinearGPT`."""

    def __init__(self, width: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, parts)
        self.norm_2, self.feed_forward = nn.LayerNorm(width), FeedForward(width, parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, time, width] -> [batch, time, width]."""
        x = x + self.attention(self.norm_1(x))
        x = x + self.feed_forward(self.norm_2(x))
        return x


class LinearGPT(nn.Module):
    """A language model of bytes.

    positions: the longest sequence.
    parts: of these the model has one, of the heads of each attention and the features of each feed-forward network.
    """

    def __init__(self, width: int, layers: int, heads: int, positions: int, parts: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList([Block(width, heads, parts) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Computes the mean cross-entropy of tokens [batch, time] and targets of the same shape."""
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(step: int, sequences: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, the same in every job."""
    tokens = torch.randint(0, VOCABULARY, (sequences, time + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
