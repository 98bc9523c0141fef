"""A tiny GPT-2 of transformers, its data, and one process that trains it on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import mpidl
from collectives import Communicator
from tests.mpidl.zero.ways import WAYS

STEPS, SEQUENCES, LENGTH = 4, 2, 8
"""Steps of a run, sequences that a rank takes in each, tokens of a sequence."""

MAX_NORM = 0.05
"""Gradients have norms of about 1, so that every step clips."""

ZERO = {**WAYS, "stage 2": {**WAYS["stage 2"], "bucket_cap_mb": 0.01}}
"""Settings of each way. In one of them the model has several buckets."""

ADAM = {"lr": 1e-2, "weight_decay": 0.01}


def made() -> Any:
    """Makes a model with the same weights on every rank."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=32, n_positions=LENGTH, n_layer=2, n_head=2, n_embd=16)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False})
    return transformers.GPT2LMHeadModel(config)


def sequences(rank: int) -> torch.Tensor:
    """A rank's tokens, in the order of its steps: (STEPS * SEQUENCES, LENGTH)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(32, (STEPS * SEQUENCES, LENGTH), generator=generator)


@dataclass
class Run:
    """Result of a run: the mean loss of each step, the norm of its gradients before clipping, and the weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def reference(ranks: int) -> Run:
    """One process, with torch's own optimizer and clipping, on the sequences of all ranks."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    batches = torch.cat([sequences(rank).view(STEPS, SEQUENCES, LENGTH) for rank in range(ranks)], dim=1)
    losses, norms = [], []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(norms) > 5 * MAX_NORM
    return Run(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


def wrapped(way: str) -> tuple[Any, Any]:
    """A model to call, and its optimizer."""
    model = made()
    if way == "ddp":
        called = mpidl.DistributedDataParallel(model)
        return called, torch.optim.AdamW(called.parameters(), **ADAM)
    return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, **ZERO[way], **ADAM)


def weights_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Copies of whole weights, on every rank."""
    if isinstance(optimizer, mpidl.ZeroOptimizer):
        with optimizer.gathered(writable=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    inner = getattr(model, "module", model)
    return {name: p.detach().clone() for name, p in inner.named_parameters()}


def check(comm: Communicator, what: str, found: Run, expected: Run) -> None:
    """Raises AssertionError for what differs by more than the order of sums explains. Collective."""
    losses = torch.tensor(found.losses, dtype=torch.float64)
    comm.all_reduce(losses, "avg")
    near: Callable[..., None] = torch.testing.assert_close
    near(losses.tolist(), expected.losses, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}, losses: {text}")
    near(found.norms, expected.norms, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}, norms: {text}")
    for name, p in expected.weights.items():
        near(found.weights[name], p, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{what}, {name}: {text}")
