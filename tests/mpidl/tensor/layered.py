"""GPT-2 and Llama of any number of layers, in sizes that 1 to 4 ranks divide, and their loss on one batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mpidl.models.gpt2 import GPT2, GPT2Config
from tests.mpidl.tensor.reference import loss_of

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 24, 48, 12, 60


def gpt2(layers: int, dropout: float = 0.0) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "block_size": TOKENS, "heads": HEADS, "embd": WIDTH}
    return GPT2(GPT2Config(**sizes, layers=layers, dropout=dropout))


def llama(layers: int) -> nn.Module:
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


BUILDERS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def batch() -> torch.Tensor:
    return torch.arange(BATCH * (TOKENS + 1)).view(BATCH, TOKENS + 1) % VOCABULARY


def loss(model: nn.Module) -> torch.Tensor:
    x = batch()
    return loss_of(model, x if isinstance(model, GPT2) else x[:, :TOKENS])
