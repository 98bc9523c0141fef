"""DDP and all stages of ZeRO give the same bits in fp32 at the same number of ranks, whichever rank is late.

Gradients are added in the order of the ranks wherever buckets and shards cut them, and an optimizer's update of an
element depends on that element alone. That holds for torch's loops over parameters and its foreach kernels. The fused
kernels on CPUs round the last elements of a tensor, which do not fill a vector, in another way than the others: so
parameters and shards begin with cache lines, and a slice ends where a vector does, or where the parameter does.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from mpidl.absent_state import refusal
from tests.mpidl.small_models import MODELS, Recipe, Trained, fresh, train

pytestmark = pytest.mark.mpi

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, small buckets": ("ddp", {"bucket_cap_mb": 0.003}),
    "stage 1": ("stage 1", {}),
    "stage 1, small buckets": ("stage 1", {"bucket_cap_mb": 0.001}),
    "stage 2": ("stage 2", {}),
    "stage 2, small buckets": ("stage 2", {"bucket_cap_mb": 0.003}),
    "stage 3": ("stage 3", {}),
    "stage 3 gathered": ("stage 3 gathered", {}),
}
ADAMW: dict[str, Any] = {"settings": {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}}
SGD: dict[str, Any] = {
    "optimizer": torch.optim.SGD,
    "settings": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True},
}
FUSED: dict[str, Any] = {"settings": {"lr": 1e-2, "weight_decay": 0.1, "fused": True}}
FOREACH: dict[str, Any] = {"settings": {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}}
CASES = {
    "gpt2, AdamW": ("gpt2", ADAMW),
    "odd sizes, AdamW, foreach": ("mixture", FOREACH),
    "odd sizes, AdamW, fused": ("mixture", FUSED),
    "odd sizes, SGD": ("mixture", SGD),
    "gpt2, accumulated under no_sync": ("gpt2", {**ADAMW, "micro": 2, "sync_each": False}),
}


def run(comm, engine: str, model: str, training: dict[str, Any], delays: int = 0, **settings: Any) -> Trained:
    """delays: the seed of random ones, other ones on every rank; 0 for none."""
    made = fresh(MODELS[model], comm.rank)
    dice = random.Random(100 * delays + comm.rank)

    def wait(*_: Any) -> None:
        time.sleep(dice.random() * 2e-3)

    for module in made.modules() if delays else []:
        if isinstance(module, torch.nn.LayerNorm | torch.nn.Tanh):
            module.register_forward_hook(wait)
            module.register_full_backward_hook(wait)
    if engine == "ddp" and model == "mixture":
        settings["find_unused_parameters"] = True
    return train(made, Recipe(steps=3, engine=settings, **training), engine, comm)


def differences(expected: Trained, found: Trained) -> list[str]:
    """Lists what differs in any bit; sharded weights are compared where they are whole, on rank 0."""
    held = {} if refusal(found.weights) or refusal(expected.weights) else expected.weights
    differ = [name for name, tensor in held.items() if not torch.equal(found.weights[name], tensor)]
    return differ if np.array_equal(found.losses, expected.losses) else ["losses", *differ]


@pytest.mark.parametrize("case", CASES)
def test_every_engine_gives_the_same_bits(comm, case: str) -> None:
    expected = run(comm, "ddp", *CASES[case])
    found = {}
    for number, (name, (engine, settings)) in enumerate(ENGINES.items()):
        found[name] = differences(expected, run(comm, engine, *CASES[case], delays=number + 1, **settings))
    assert found == {name: [] for name in ENGINES}


def test_stages_agree_when_each_of_several_passes_is_reduced(comm) -> None:
    """DDP averages the sum so far in every pass, as torch's does, and so rounds in another order."""
    training = {**ADAMW, "micro": 3}
    expected = run(comm, "stage 1", "gpt2", training)
    found = {}
    for name in ("stage 2, small buckets", "stage 3", "stage 3 gathered"):
        engine, settings = ENGINES[name]
        found[name] = differences(expected, run(comm, engine, "gpt2", training, **settings))
    assert found == {name: [] for name in found}


def test_both_ways_of_stage_3_clip_to_the_same_bits(comm) -> None:
    """Other engines add up the norm over other shards."""
    training = {**FOREACH, "clip": 0.5}
    expected, found = (run(comm, way, "mixture", training) for way in ("stage 3", "stage 3 gathered"))
    assert differences(expected, found) == []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_kernels_on_slices_give_the_bits_of_the_whole(optimizer: type[torch.optim.Optimizer]) -> None:
    """The reason for the tests above: foreach for any cut, fused for cuts between whole vectors."""
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    for kernel, cuts in (("foreach", (1, 7, 333, 512)), ("fused", (64, 512))):
        for at in cuts:
            results = []
            for sizes in ([1003], [at, 1003 - at]):
                torch.manual_seed(0)
                parts = [part.clone() for part in torch.randn(1003).split(sizes)]
                chosen = optimizer(parts, lr=0.01, weight_decay=0.1, **settings, **{kernel: True})
                for _ in range(5):
                    for part, gradient in zip(parts, torch.randn(1003).split(sizes), strict=True):
                        part.grad = gradient.clone()
                    chosen.step()
                results.append(torch.cat(parts))
            assert torch.equal(*results), (kernel, at)
