"""All stages of ZeRO follow single-process training on the whole batch, model by model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from tests.mpidl.small_models import (
    Branching,
    Gaps,
    Images,
    Mixture,
    Recipe,
    Recurrent,
    SmoothImages,
    fresh,
    largest_difference,
    small_gpt2,
    train,
)
from tests.mpidl.zero.ways import WAYS, with_buckets

pytestmark = pytest.mark.mpi

SETTINGS = with_buckets(0.002)


class Experts(nn.Module):
    """Every token goes to the expert of its number; some have no token on some ranks, and two never have any."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 6)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(39)])
        self.head = nn.Linear(6, 37)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (tokens == number).nonzero(as_tuple=True)
            if len(chosen[0]):
                y = y.index_put(chosen, expert(x[chosen]))
        return F.cross_entropy(self.head(x + y).flatten(0, 1), targets.flatten())


class Adapted(nn.Module):
    def __init__(self, layer: nn.Module, inside: int, outside: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(inside, 2, bias=False), nn.Linear(2, outside, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted_gpt2() -> nn.Module:
    """All frozen but for low-rank corrections of the feed-forward layers."""
    model = small_gpt2().requires_grad_(False)
    for block in model.transformer["h"]:
        block.mlp.c_fc, block.mlp.c_proj = Adapted(block.mlp.c_fc, 16, 64), Adapted(block.mlp.c_proj, 64, 16)
    return model


class Transformers(nn.Module):
    """A model of Hugging Face transformers, unchanged; it must guess every third token, or each one's successor."""

    def __init__(self, name: str, config: str, guess: bool = False, **settings: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.guess = guess
        self.net = getattr(transformers, name)(getattr(transformers, config)(**settings))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.guess:
            return self.net(input_ids=tokens, labels=tokens).loss
        hidden = torch.arange(8) % 3 == 0
        return self.net(input_ids=torch.where(hidden, 37, tokens), labels=torch.where(hidden, targets, -100)).loss


def hf_gpt2() -> nn.Module:
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return Transformers(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=37, n_positions=8, n_embd=16, n_layer=2, n_head=2, **drop
    )


def hf_bert() -> nn.Module:
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": 38, "max_position_embeddings": 8, "hidden_size": 16, "intermediate_size": 24}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return Transformers("BertForMaskedLM", "BertConfig", guess=True, **sizes, **layers, **drop)


def hf_llama() -> nn.Module:
    sizes = {"vocab_size": 37, "max_position_embeddings": 8, "hidden_size": 16, "intermediate_size": 24}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Transformers("LlamaForCausalLM", "LlamaConfig", **sizes, **layers)


ADAMW: dict[str, Any] = {"settings": {"lr": 1e-3, "eps": 1e-5}}
SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "settings": {"lr": 0.05, "momentum": 0.9}}
EVERY = tuple(WAYS)
# Every second one is short, as `each` has 3 or 4 ranks run it.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (small_gpt2, ADAMW, EVERY),
    # Odd sizes, one element, modules of no parameters.
    "mixture": (Mixture, ADAMW, EVERY),
    "gpt2, accumulated": (small_gpt2, {**SGD, "micro": 2}, ("stage 2", "stage 3 gathered")),
    "lstm": (Recurrent, SGD, EVERY),
    "resnet": (Images, SGD, ("stage 2", "stage 3")),
    "bert": (Gaps, SGD, EVERY),
    # Which experts run is another choice on every rank; gathered so in parameters/test_order.py, as it takes long.
    "experts": (Experts, SGD, ("stage 1", "stage 2", "stage 3")),
    "smooth-images": (SmoothImages, SGD, ("stage 1", "stage 3 gathered")),
    "transformers-gpt2": (hf_gpt2, ADAMW, EVERY),
    "adapters": (adapted_gpt2, ADAMW, EVERY),
    "transformers-bert": (hf_bert, SGD, EVERY),
    "branches": (Branching, SGD, EVERY),
    "transformers-llama": (hf_llama, ADAMW, EVERY),
}


@pytest.mark.each("case")
@pytest.mark.parametrize("case", CASES)
def test_training_equals_that_on_the_whole_batch(comm, case: str, fewer: Callable[[int], int]) -> None:
    make, training, ways = CASES[case]
    steps = fewer(30)
    recipe = Recipe(steps=steps, **training)
    start = {name: tensor.clone() for name, tensor in fresh(make).state_dict().items()}
    expected = train(fresh(make), recipe)
    assert largest_difference(start, expected.weights) > 0.005  # it does train
    found = {}
    for way in ways:
        model = mpidl.SyncBatchNorm.convert_sync_batchnorm(fresh(make, comm.rank), comm)
        found[way] = train(model, Recipe(steps=steps, engine=SETTINGS[way], **training), way, comm)
    largest = max(float(w.abs().max()) for w in expected.weights.values())
    for way, trained in found.items():
        np.testing.assert_allclose(
            trained.losses, expected.losses, rtol=1e-9 if case == "resnet" else 1e-5, err_msg=way
        )
        if comm.rank == 0:
            assert list(trained.weights) == list(expected.weights)
            assert largest_difference(expected.weights, trained.weights) < 1e-5 * largest, way
