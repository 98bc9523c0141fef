"""A model of small layers, whole or this rank's part of it over tp, with states that can be told from each other.

heads      [q of 7 heads | k, v of 2 heads], rows: uneven heads, several runs, k and v shared by ranks
fused      [in, q | k | v], columns, as GPT-2's Conv1D has them
table      257 rows
experts    dimensions 0 and 2 cut, the ranks on a grid
one        2 rows: nothing for the third rank
norm       whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.mesh import Cut, place, placement
from tests.mpidl.zero.ways import WAYS

HEADS, KV_HEADS, WIDTH = 7, 2, 4


def even(size: int, parts: int) -> list[tuple[int, int]]:
    """Runs of a dimension, one a part, the first ones longer."""
    edges = [size * part // parts for part in range(parts + 1)]
    edges = [size - edge for edge in reversed(edges)]
    return [*pairwise(edges)]


def cuts(tp: int, size: int) -> dict[str, tuple[Cut, bool]]:
    """The cut of each parameter on one of `size` ranks, and whether it is the one that counts it."""
    head = even(HEADS, size)[tp]
    kv = (tp * KV_HEADS // size, tp * KV_HEADS // size + 1) if size > KV_HEADS else even(KV_HEADS, size)[tp]
    first = all(other * KV_HEADS // size != kv[0] for other in range(tp)) or size <= KV_HEADS
    q = (head[0] * WIDTH, head[1] * WIDTH)
    k = ((HEADS + kv[0]) * WIDTH, (HEADS + kv[1]) * WIDTH)
    v = tuple(edge + KV_HEADS * WIDTH for edge in k)
    rows = (HEADS + 2 * KV_HEADS) * WIDTH
    wide = even(6, size)[tp]
    grid = (2, size // 2) if size % 2 == 0 else (1, size)
    row = (0, 0) if size > 2 <= tp else even(2, min(size, 2))[tp]
    experts = ((even(4, grid[0])[tp // grid[1]],), ((0, 3),), (even(5, grid[1])[tp % grid[1]],))
    return {
        "heads": (Cut.along((rows, 3), 0, [q, k, v]), True),  # of which k and v overlap with other ranks'
        "kv": (Cut.along((KV_HEADS, 5), 0, [kv]), first),
        "fused": (Cut.along((5, 18), 1, [(wide[0] + at, wide[1] + at) for at in (0, 6, 12)]), True),
        "table": (Cut.along((257, 300), 0, [even(257, size)[tp]]), True),
        "experts": (Cut((4, 3, 5), experts), True),
        "one": (
            Cut.along((2, 3), 0, [row]),
            True,
        ),
    }


class Model(nn.Module):
    """All of it. seed: of the values."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=made).to(dtype))

        for name, (cut, _) in cuts(0, 1).items():
            setattr(self, name, weight(*cut.shape))
        self.norm, self.scale = weight(6), weight()
        self.tied = self.table
        self.register_buffer("mean", torch.randn(3, generator=made))

    def forward(self) -> torch.Tensor:
        """Depends on each element by itself, so that a part has the gradients of the whole."""
        return sum(((p.float() * 3 + 1).square().sum() for p in self.parameters()), torch.tensor(0.0))


def cut_over(mesh: Mesh | None, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    """The model, of which a rank of tp has its part."""
    model = Model(seed, dtype)
    if mesh is None or mesh.size("tp") == 1:
        return model
    for name, (cut, counted) in cuts(mesh.rank("tp"), mesh.size("tp")).items():
        part = nn.Parameter(cut.of(getattr(model, name).detach()))
        place(part, "tp", counted=counted, cut=cut)
        setattr(model, name, part)
    model.tied = model.table
    return model


class Training:
    """A model and what trains it: "plain", "ddp" or a way of ZeRO."""

    def __init__(
        self, engine: str, comm: Any, mesh: Mesh | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        self.engine, self.mesh, self.comm = engine, mesh, comm
        self.model = cut_over(mesh, seed, dtype)
        self.call: Any = self.model
        where = {"process_group": comm} if mesh is None else {"mesh": mesh}
        named = dict(self.model.named_parameters())
        groups = [{"params": [p for name, p in named.items() if name in chosen]} for chosen in (FIRST, REST)]
        groups[1]["lr"] = 0.02
        self.optimizer: Any
        if engine in WAYS:
            self.optimizer = mpidl.ZeroOptimizer(
                self.model, torch.optim.AdamW, params=groups, lr=0.01, **WAYS[engine], **where
            )
        else:
            if engine == "ddp":
                self.call = mpidl.DistributedDataParallel(self.model, **where)
            self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.where = where

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.call().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, path: Any, step: int = 1, **more: Any) -> Any:
        return mpidl.checkpoint.save(path, self.call, self.optimizer, step=step, **self.where, **more)

    def load(self, path: Any, **more: Any) -> Any:
        return mpidl.checkpoint.load(path, self.call, self.optimizer, **self.where, **more)

    def differing(self, whole: dict[str, torch.Tensor]) -> Iterator[str]:
        """Names of what this rank holds that differs from the same elements of the whole tensors."""
        if self.engine in WAYS:
            held = [(o.parameter, o.start, o.stop, o.values) for o in self.optimizer.owned_state().slices()]
        else:
            held = [(p, 0, p.numel(), p) for p in self.model.parameters()]
        names = {p: name for name, p in self.model.named_parameters()}
        for p, start, stop, values in held:
            name, cut = names[p], placement(p).cut
            found = {name: values, **{f"{key}/{name}": v for key, v in self.optimizer.state.get(values, {}).items()}}
            for key, value in found.items():
                expected = whole[key]
                if not key.startswith("step/"):
                    part = expected if cut is None else cut.of(expected)
                    expected = part.reshape(-1)[start:stop].to(value.dtype)
                if not torch.equal(value.detach().reshape(-1), expected.reshape(-1)):
                    yield key
        if not torch.equal(self.model.mean, whole["mean"]):
            yield "mean"


Layout = tuple[int, int]  # tp, dp


@contextmanager
def training(engine: str, layout: Layout, group: Communicator, **more: Any) -> Iterator[Training]:
    with Mesh(tp=layout[0], dp=layout[1], comm=group) as mesh:
        yield Training(engine, group, mesh, **more)


FIRST = ("heads", "fused", "experts", "norm")
REST = ("kv", "table", "one", "scale")


def whole_state(steps: int) -> dict[str, torch.Tensor]:
    """Weights and states of the whole model after some steps of one process."""
    made = Training("plain", None)
    made.step(steps)
    found = {name: p.detach() for name, p in made.model.named_parameters()}
    for name, p in made.model.named_parameters():
        found |= {f"{key}/{name}": value for key, value in made.optimizer.state[p].items()}
    return {**found, "mean": made.model.mean}
