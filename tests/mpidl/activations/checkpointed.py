"""A GPT-2 with dropout, stores of each kind, and a pass to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpidl.activations import CheckpointStore
from mpidl.models.gpt2 import GPT2, GPT2Config
from tests.mpidl.small_models import sequences

KINDS = ("none", "arena", "disk")
DROPPING = GPT2Config(vocab_size=37, block_size=8, layers=4, heads=2, embd=16, dropout=0.2)
INPUT = 12 * 8 * 16 * 4  # bytes of a block's input


def made(kind: str, folder: Path) -> CheckpointStore | None:
    """A store that takes small tensors, and writes them in several pieces."""
    if kind == "none":
        return None
    return CheckpointStore(offload=folder if kind == "disk" else None, smallest=64, buffer_mb=1000 / 2**20)


def dropping() -> GPT2:
    torch.manual_seed(7)
    return GPT2(DROPPING)


def passed(model: nn.Module, autocast: bool = False) -> tuple[torch.Tensor, list[torch.Tensor | None], torch.Tensor]:
    """The loss, the gradients, and the random number that comes after them."""
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*sequences(0, 0))
    loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()], torch.rand(())


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
