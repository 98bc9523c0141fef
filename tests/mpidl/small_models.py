"""Models and single-process references that several tests train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.models.bert import BERT, BERTConfig
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.models.resnet import ResNet
from tests.mpidl.zero.ways import WAYS

SMALL_GPT2 = GPT2Config(vocab_size=37, block_size=8, layers=3, heads=2, embd=16)
MEMORY_GPT2 = GPT2Config(vocab_size=256, block_size=32, layers=6, heads=4, embd=96)
SEQUENCES = 12  # divisible by 1, 2, 3 and 4 ranks


class Mixture(nn.Module):
    """Odd sizes, a frozen part, a tied weight, a buffer, a parameter of one element and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5))
        self.shift = nn.Parameter(torch.randn(7), requires_grad=False)
        self.blocks[1][0].bias.requires_grad_(False)
        self.head = nn.Linear(7, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x * self.scale).flatten(0, 1), targets.flatten())


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(37, 13), nn.ReLU(), nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 37))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(F.one_hot(tokens[:, 0], 37).float()), targets[:, 0])


def waves(tokens: torch.Tensor) -> torch.Tensor:
    """Pictures of 8 x 8 points, waves of which each token sets a row's length."""
    return torch.sin((1 + tokens[:, None, :, None]) * torch.arange(1, 9) / 8)


class Images(nn.Module):
    """A small ResNet, in double precision.

    In single precision its losses leave each other after some steps for any two orders of summation, in one process
    too, unless the steps are small: a rectifier whose input is nearly zero passes on a gradient or does not.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype
        self.net = ResNet("resnet18", num_classes=37, width=4, in_channels=1, stem="small").to(dtype)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(waves(tokens).to(self.dtype)), targets[:, 0])


class SmoothImages(nn.Module):
    """Residual convolutions and normalizations in single precision, without that."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1 if n == 0 else 6, 6, 3, padding=1) for n in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(6) for _ in range(4)])
        self.head = nn.Linear(6, 37)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = waves(tokens)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = torch.tanh(norm(convolution(x)))
            x = x + y if x.shape == y.shape else y
        return F.cross_entropy(self.head(x.mean((2, 3))), targets[:, 0])


class Gaps(nn.Module):
    """BERT, which has to guess every third token."""

    def __init__(self) -> None:
        super().__init__()
        self.net = BERT(BERTConfig(vocab_size=38, block_size=8, layers=2, heads=2, embd=16, dropout=0.0))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(8) % 3 == 0
        labels = torch.where(hidden, targets, -100)
        return self.net(torch.where(hidden, 37, tokens), labels=labels).loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(37, 6), nn.LSTM(6, 9, 2, batch_first=True), nn.Linear(9, 37)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embed(tokens))[0]).flatten(0, 1), targets.flatten())


class Branching(nn.Module):
    """A model whose branch depends on the step, and whose third branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 37) for _ in range(3)])
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        branch = self.branches[int(self.passes) // 4 % 2]
        return F.cross_entropy(branch(self.embed(tokens)).flatten(0, 1), targets.flatten())


def small_gpt2() -> nn.Module:
    return GPT2(SMALL_GPT2)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": small_gpt2, "mixture": Mixture}


def sequences(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a micro-step: a rule that a small model can learn, from random starts."""
    random = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, 37, (SEQUENCES, 8), generator=random)
    return tokens, (tokens * 3 + 1) % 37


@dataclass
class Recipe:
    """Recipe of a training. micro: micro-steps a step; sync_each: communicate in each of them."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "eps": 1e-6})
    steps: int = 20
    micro: int = 1
    sync_each: bool = True
    clip: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """losses: mean over the global batch a step. weights, state: whole, on rank 0. call, optimizer: the engine's."""

    losses: np.ndarray
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    model: nn.Module
    optimizer: Any


def train(model: nn.Module, recipe: Recipe, engine: str = "single", comm: Communicator | None = None) -> Trained:
    """Trains in one process ("single"), or with DDP ("ddp") or a way of ZeRO, each rank on its share of the batches."""
    rank, ranks = (comm.rank, comm.size) if comm and engine != "single" else (0, 1)
    call: Any = model
    if engine == "single":
        optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad], **recipe.settings)
    elif engine == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=comm, **recipe.engine)
        optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad], **recipe.settings)
    else:
        optimizer = mpidl.ZeroOptimizer(
            model, recipe.optimizer, process_group=comm, **{**WAYS[engine], **recipe.engine}, **recipe.settings
        )
    losses = []
    for step in range(recipe.steps):
        losses.append(0.0)
        for micro in range(recipe.micro):
            x, y = (part.chunk(ranks)[rank] for part in sequences(step, micro))
            quiet = not recipe.sync_each and micro < recipe.micro - 1 and engine != "single"
            with _no_sync(call, optimizer) if quiet else contextlib.nullcontext():
                loss = call(x, y) / recipe.micro
                loss.backward()
            losses[-1] += _mean(comm if engine != "single" else None, loss.item())
        if recipe.clip is not None:
            if engine in WAYS:
                optimizer.clip_grad_norm_(recipe.clip)
            else:
                mpidl.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    sharded = engine in WAYS
    weights = optimizer.model_state_dict() if sharded else dict(model.state_dict())
    return Trained(np.array(losses), weights, optimizer.state_dict(), model, optimizer)


@contextlib.contextmanager
def _no_sync(call: Any, optimizer: Any) -> Iterator[None]:
    with (optimizer if isinstance(optimizer, mpidl.ZeroOptimizer) else call).no_sync():
        yield


def _mean(comm: Communicator | None, value: float) -> float:
    total = np.array([value])
    if comm is not None:
        comm.all_reduce(total, "avg")
    return float(total[0])


def fresh(make: Callable[[], nn.Module], rank: int = 0) -> nn.Module:
    """Makes a model of one structure on every rank, whose weights only rank 0 has right: engines broadcast them."""
    torch.manual_seed(7)
    model = make()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    return model


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all elements of all tensors."""
    assert a.keys() == b.keys()
    return max(float((tensor.double() - b[name].double()).abs().max()) for name, tensor in a.items())
