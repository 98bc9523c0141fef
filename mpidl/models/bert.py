"""BERT for masked-language modelling: post-norm encoder layers, learned positions, output tied to the embedding.

    tokens + positions + types -> norm -> layers, each seeing the whole sequence -> transform -> a score for each token

Names and shapes of the parameters are those of transformers' `BertForMaskedLM`, so that weights load both ways
(`models.pretrained_bert`). Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding", sections 3 and A.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError


@dataclass(frozen=True)
class BERTConfig:
    """Sizes.

    block_size: positions, the longest sequence.
    embd: width, a multiple of heads.
    types: of segments.
    inner: width between the two projections of a layer; four times embd by default (0).
    std: of the random weights at the start.
    checkpoint_activations: a layer keeps its input alone for backward and computes the rest again.
    """

    vocab_size: int = 30522
    block_size: int = 512
    layers: int = 12
    heads: int = 12
    embd: int = 768
    inner: int = 0
    types: int = 2
    dropout: float = 0.0
    std: float = 0.02
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "layers", "heads", "embd", "types"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: got {getattr(self, name)}; needs at least 1")
        if self.inner < 0:
            raise UsageError(f"inner: got {self.inner}; needs a width, or 0 for four times embd")
        if self.embd % self.heads:
            raise UsageError(f"heads: {self.heads} heads do not fit a width of {self.embd}; needs a divisor of it")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout: got {self.dropout}; needs a probability below 1")

    @property
    def inner_width(self) -> int:
        """`inner`, or four times embd."""
        return self.inner or 4 * self.embd

    @classmethod
    def named(cls, name: str, **changes: Any) -> BERTConfig:
        """A size by its name, from SIZES, with changes to single settings."""
        if name not in SIZES:
            raise UsageError(f"model: got {name!r}; needs one of {', '.join(SIZES)}")
        return replace(SIZES[name], **changes)


# With a vocabulary of bytes and four marks (260): tiny 0.5, small 3.4, base46m 46.7 million parameters; bert-base and
# bert-large are the published ones. base46m has BERT-base's width and heads. Bytes need next to no embedding, so its
# parameters are in the layers: 7 of them, with an inner width of 3.5 times 768,
#     7 * (4 * (768 * 768 + 768) + 2 * 768 * 2688 + 2688 + 768 + 4 * 768) = 45 453 184   layers
#     (260 + 512 + 2) * 768 + 2 * 768                                     =    595 968   embeddings and their norm
#     768 * 768 + 3 * 768 + 260                                           =    592 388   head; its matrix is tied
# std is about 1 / sqrt(embd): with the published 0.02 tiny had learnt no more than how frequent bytes are after 1000
# steps of 2048 bytes of Tiny Shakespeare, with this one it had begun to look at their neighbours after 600.
SIZES = {
    "tiny": BERTConfig(layers=2, heads=2, embd=128, std=0.088),
    "small": BERTConfig(layers=4, heads=4, embd=256, std=0.0625),
    "base46m": BERTConfig(layers=7, heads=12, embd=768, inner=2688, std=0.036),
    "bert-base": BERTConfig(),
    "bert-large": BERTConfig(layers=24, heads=16, embd=1024),
}


class Embeddings(nn.Module):
    """The sum of a token's, a segment type's and a position's vector, normed."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.word_embeddings = nn.Embedding(config.vocab_size, config.embd)
        self.position_embeddings = nn.Embedding(config.block_size, config.embd)
        self.token_type_embeddings = nn.Embedding(config.types, config.embd)
        self.LayerNorm = _norm(config)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Maps int64 [batch, time] -> [batch, time, embd]."""
        types = torch.zeros_like(tokens) if types is None else types
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return F.dropout(self.LayerNorm(x), self.dropout, self.training)


class SelfAttention(nn.Module):
    """Every position looks at every other, over all heads at once."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = config.heads, config.embd // config.heads, config.dropout
        self.query, self.key, self.value = (nn.Linear(config.embd, config.embd) for _ in range(3))

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Maps [batch, time, embd] -> [batch, time, embd]. seen: bool [batch, 1, 1, time], positions to look at."""
        shape = (*x.shape[:2], self.heads, self.head_width)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x)))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        return y.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_width)


class AddAndNorm(nn.Module):
    """A projection back to the model's width, added to what went round it, then normed."""

    def __init__(self, config: BERTConfig, inputs: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.dense = nn.Linear(inputs, config.embd)
        self.LayerNorm = _norm(config)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Projects x, adds residual, norms: [batch, time, inputs], [batch, time, embd] -> [batch, time, embd]."""
        y: torch.Tensor = self.LayerNorm(F.dropout(self.dense(x), self.dropout, self.training) + residual)
        return y


class Layer(nn.Module):
    """One layer: attention, then two projections with an exact GELU between."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": AddAndNorm(config, config.embd)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.embd, config.inner_width)})
        self.output = AddAndNorm(config, config.inner_width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Maps [batch, time, embd] -> [batch, time, embd]. seen: see SelfAttention."""
        x = self.attention["output"](self.attention["self"](x, seen), x)
        y: torch.Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return y


class Predictions(nn.Module):
    """A score for each token of the vocabulary: a projection, GELU and norm, then products with the embeddings."""

    def __init__(self, config: BERTConfig, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.ModuleDict({"dense": nn.Linear(config.embd, config.embd), "LayerNorm": _norm(config)})
        self.decoder = nn.Linear(config.embd, config.vocab_size)
        self.decoder.weight = embeddings.weight
        self.bias = self.decoder.bias  # published weights have it under both names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., embd] -> [..., vocab_size]."""
        y: torch.Tensor = self.decoder(self.transform["LayerNorm"](F.gelu(self.transform["dense"](x))))
        return y


class Output(NamedTuple):
    """Output of the model.

    logits: [batch, time, vocab_size], or [chosen, vocab_size] with `where`.
    loss: with labels.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None


class BERT(nn.Module):
    """The masked-language model. config: BERTConfig."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        embeddings = Embeddings(config)
        self.bert = nn.ModuleDict({"embeddings": embeddings, "encoder": nn.ModuleDict({"layer": layers})})
        self.cls = nn.ModuleDict({"predictions": Predictions(config, embeddings.word_embeddings)})
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        where: torch.Tensor | None = None,
    ) -> Output:
        """Logits and, with labels, the mean cross-entropy over those that are not -100.

        input_ids, token_type_ids, labels: int64 [batch, time], time at most block_size; types are 0 by default.
        attention_mask: bool or integer [batch, time], zero at padding; each sequence has something else.
        where: bool [batch, time]: scores are computed for these positions alone, which spares most of the work with
            a large vocabulary; logits [chosen, vocab_size] and the loss are of them then.
        """
        part: Any = self.bert
        x = part["embeddings"](input_ids, token_type_ids)
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        again = self.config.checkpoint_activations and torch.is_grad_enabled()
        for layer in part["encoder"]["layer"]:
            x = checkpoint(layer, x, seen, use_reentrant=False) if again else layer(x, seen)
        logits = self.cls["predictions"](x if where is None else x[where])
        if labels is None:
            return Output(logits, None)
        chosen = labels.flatten() if where is None else labels[where]
        return Output(logits, F.cross_entropy(logits.float().flatten(0, -2), chosen))


def _norm(config: BERTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.embd, eps=1e-12)
