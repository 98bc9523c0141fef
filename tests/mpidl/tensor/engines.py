"""Training of models that are cut over tp by every engine on a mesh, and by one process on the global batch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from tests.mpidl.tensor.reference import TOKENS, VOCABULARY, loss_of
from tests.mpidl.zero.ways import WAYS

# The sizes of a mesh by the number of ranks.
MESHES: dict[int, list[tuple[int, int]]] = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3)], 4: [(2, 2), (1, 4)]}
ENGINES = ("torch", "ddp", *WAYS)
ADAM = {"lr": 1e-2, "eps": 1e-6}
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training. micro: passes a step; all but the last under no_sync, unless reduces_each.

    clip: the largest norm. clipper: the optimizer's own function, or that of "mpidl" or "torch".
    frozen: parts of names of parameters that do not train. settings: of the optimizer. engine: arguments of the engine.
    """

    steps: int = 20
    micro: int = 1
    reduces_each: bool = False
    clip: float | None = None
    norm_type: float = 2.0
    clipper: str = "optimizer"
    frozen: tuple[str, ...] = ()
    optimizer: Any = torch.optim.AdamW
    settings: Any = None
    engine: Any = None

    def kwargs(self) -> dict[str, Any]:
        return dict(ADAM if self.settings is None else self.settings)


@dataclass
class Trained:
    """Means of the losses over the global batch, norms before clipping, and the whole weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def batch(step: int, micro: int) -> torch.Tensor:
    """The global batch of a pass."""
    random = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, VOCABULARY, (GLOBAL_BATCH, TOKENS), generator=random)


def freeze(model: nn.Module, recipe: Recipe) -> None:
    for name, p in model.named_parameters():
        if any(part in name for part in recipe.frozen):
            p.requires_grad_(False)


def train_alone(model: nn.Module, recipe: Recipe) -> Trained:
    """Trains in one process."""
    freeze(model, recipe)
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad], **recipe.kwargs())
    losses, norms = [], []
    for step in range(recipe.steps):
        losses.append(0.0)
        for micro in range(recipe.micro):
            loss = loss_of(model, batch(step, micro)) / recipe.micro
            loss.backward()
            losses[-1] += loss.item()
        if recipe.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


@contextlib.contextmanager
def engine_of(name: str, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Any:
    """Gives (what is called, the optimizer), and makes the model a plain one again at the end."""
    given = recipe.engine or {}
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "torch":
        yield model, recipe.optimizer(trained, **recipe.kwargs())
    elif name == "ddp":
        yield (
            mpidl.DistributedDataParallel(model, mesh=mesh, **given),
            recipe.optimizer(trained, **recipe.kwargs()),
        )
    else:
        optimizer = mpidl.ZeroOptimizer(model, recipe.optimizer, mesh=mesh, **WAYS[name], **given, **recipe.kwargs())
        yield model, optimizer
        optimizer.unwrap()


def clip(model: nn.Module, optimizer: Any, mesh: Mesh, recipe: Recipe) -> float:
    """Clips, and returns the norm."""
    assert recipe.clip is not None
    if recipe.clipper == "optimizer" and isinstance(optimizer, mpidl.ZeroOptimizer):
        return optimizer.clip_grad_norm_(recipe.clip, recipe.norm_type)
    if recipe.clipper == "torch":
        return torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type).item()
    return mpidl.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type, mesh=mesh)


def train_cut(engine: str, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Trained:
    """Trains a model that is cut already, each rank of dp with its part of the global batch."""
    freeze(model, recipe)
    losses, norms = [], []
    with engine_of(engine, model, mesh, recipe) as (call, optimizer):
        for step in range(recipe.steps):
            losses.append(0.0)
            for micro in range(recipe.micro):
                x = batch(step, micro).chunk(mesh.size("dp"))[mesh.rank("dp")]
                later = micro < recipe.micro - 1 and engine != "torch" and not recipe.reduces_each
                owner = optimizer if engine in WAYS else call
                with owner.no_sync() if later else contextlib.nullcontext():
                    loss = loss_of(call, x) / recipe.micro
                    loss.backward()
                losses[-1] += _mean(mesh["dp"], loss.item())
            if recipe.clip is not None:
                norms.append(clip(model, optimizer, mesh, recipe))
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, norms, mpidl.tensor.model_state_dict(model))


def _mean(comm: Communicator, value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    comm.all_reduce(total, "avg")
    return total.item()


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-10) -> None:
    """Losses and norms, and every weight."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert (found.weights[name] - value).abs().max().item() <= tolerance, name
