"""Content of a checkpoint: the tensors that this rank writes, and the rest as JSON.

model/transformer.wte.weight          parameters (fp32 masters where there are any) and buffers
optimizer/exp_avg/transformer.wte...  states of the optimizer that have the parameter's shape
seen/transformer.wte.weight           while a delayed update waits for the next step: what passes compute with
gradient/transformer.wte.weight       of micro-steps that no step has used yet
extra/0, scheduler/0, ...             tensors inside other states; those of a module's extra state under model/NAME/
rank00001/...                         what each rank has of its own: random states, a hook's state, weights that
                                      differ between the ranks for a while (post-local SGD, no_sync)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ..errors import ConfigurationError
from ..models.published import published_files
from ..optim.elementwise import elementwise, is_slice
from . import random_states, tree
from .engine import Engine, HeldTensor
from .schema import SLICES
from .tensorfile import code_of

# How the update is computed, not what it computes: the loading run chooses for its own device.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_PARTS = ("scheduler", "scaler", "sampler")
ONE_CLASS = ("scheduler",)  # parts whose states another class may take without noticing that they mean something else


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements start..stop of a tensor, which this rank writes. values: returns them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    values: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Bytes that the elements take in the file."""
        return (self.stop - self.start) * self.dtype.itemsize

    def copy(self) -> Piece:
        """Returns a piece that holds the present values, copied to the CPU."""
        values = self.values().detach().to("cpu", copy=True)
        return replace(self, values=lambda: values)

    @property
    def key(self) -> str:
        """Name in the file; that of a part ends with its range, such as "[0:1024]"."""
        whole = self.stop - self.start == math.prod(self.shape)
        return self.name if whole else f"{self.name}[{self.start}:{self.stop}]"


def rank_name(rank: int) -> str:
    """Prefix of the names of tensors that belong to one rank."""
    return f"rank{rank:05d}"


@dataclass(eq=False)
class Collected:
    """Content of a checkpoint, not yet written.

    pieces: what this rank writes. about: JSON, equal on every rank. own: JSON of this rank. shared: tensors that every
    rank holds and of which each writes a part.
    """

    pieces: list[Piece]
    about: dict[str, Any]
    own: dict[str, Any]
    shared: dict[str, torch.Tensor]


def collect(
    engine: Engine,
    parts: Mapping[str, Any],
    step: int,
    micro_step: int,
    gradients: Mapping[str, torch.Tensor],
    extra: Any,
    random: bool,
) -> Collected:
    """Collects the content without a copy.

    parts: scheduler, scaler and sampler, or None. gradients: the engine's, by name of the parameter.
    """
    pieces: list[Piece] = []
    shared: dict[str, torch.Tensor] = {}
    own_prefix = rank_name(engine.comm.rank)

    def add(name: str, held: HeldTensor, values: torch.Tensor, per_rank: bool) -> None:
        low, high = held.writes
        if per_rank and engine.comm.size > 1:
            name, low, high = f"{own_prefix}/{name}", 0, values.numel()
        elif held.shared:
            shared[name] = values
        # A tensor without elements is written too, so that its shape is known.
        if high > low or (held.count == 0 and (per_rank or engine.comm.rank == 0)):
            pieces.append(Piece(name, held.shape, values.dtype, low, high, lambda: part(held, values, low, high)))

    def part(held: HeldTensor, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
        engine.forget()  # the tensor before this one
        return _part(held, values, low, high)

    tensors = [*engine.parameters, *engine.buffers]
    for held in tensors:
        add(f"model/{held.name}", held, held.values, held.per_rank)
    about: dict[str, Any] = {
        "step": step,
        "micro_step": micro_step,
        "ranks": engine.comm.size,
        "engine": engine.kind,
        "model": {
            "class": type(engine.model).__name__,
            "parameters": [held.name for held in engine.parameters],
            "buffers": [held.name for held in engine.buffers],
            "tied": engine.tied,
            "published": published_files(engine.model),
        },
    }
    whole: dict[str, torch.Tensor] = {}  # equal on every rank, and written by rank 0
    about["model"]["extra_state"] = {
        name: tree.encode(module.get_extra_state(), f"model/{name}", whole)
        for name, module in engine.extra_states.items()
    }
    if engine.optimizer is not None:
        about["optimizer"] = _optimizer(engine, add, whole)
        if engine.owned is not None and engine.owned.steps is not None:
            about["optimizer"]["steps"] = engine.owned.steps
            unseen = engine.owned.unseen()
            for held in engine.parameters:
                if held.parameter in unseen:
                    add(f"seen/{held.name}", held, engine.owned.seen(held.parameter), False)
    for held in engine.parameters:
        if held.name in gradients:
            add(f"gradient/{held.name}", held, gradients[held.name], engine.gradients_per_rank)
    for name in _PARTS:
        if parts.get(name) is not None:
            about[name] = tree.encode(state_of(name, parts[name]), name, whole)
            if name in ONE_CLASS:
                about[f"{name}_class"] = type(parts[name]).__name__
    if engine.averager is not None:
        about["averager"] = tree.encode(engine.averager.state_dict(), "averager", whole)
    about["extra"] = tree.encode(extra, "extra", whole)
    if engine.comm.rank == 0:
        pieces += [_whole(name, values) for name, values in whole.items()]
    mine: dict[str, torch.Tensor] = {}
    own: dict[str, Any] = {}
    if random:
        own["random"] = tree.encode(random_states.capture(), f"{own_prefix}/random", mine)
    hook = engine.hook_state()
    if hook is not None:
        own["hook"] = tree.encode(hook.state_dict(), f"{own_prefix}/hook", mine)
    pieces += [_whole(name, values) for name, values in mine.items()]
    for piece in pieces:
        code_of(piece.dtype, piece.name)  # before anything is written
    return Collected(pieces, about, own, shared)


def _part(held: HeldTensor, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    if high - low == values.numel():
        return values
    return values.detach().reshape(-1)[low - held.start : high - held.start]


def _whole(name: str, values: torch.Tensor) -> Piece:
    return Piece(name, tuple(values.shape), values.dtype, 0, values.numel(), lambda: values)


def state_of(name: str, part: Any) -> Any:
    """Returns a part's state_dict. Raises ConfigurationError for a part without one."""
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise ConfigurationError(f"{name}: got a {type(part).__name__}; needs state_dict() and load_state_dict()")
    return part.state_dict()


def _optimizer(
    engine: Engine, add: Callable[[str, HeldTensor, torch.Tensor, bool], None], whole: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Describes the optimizer: groups with the parameters' names, and the states of each parameter."""
    optimizer = cast("torch.optim.Optimizer", engine.optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", *IMPLEMENTATION)}
        names = [engine.names[p] for p in group["params"]]
        groups.append({"params": names, "settings": tree.encode(settings, f"optimizer.group{number}", whole)})
    state: dict[str, Any] = {}
    kept = [(held, held.key, optimizer.state.get(held.key)) for held in engine.parameters if held.key is not None]
    cut = elementwise((key.shape, entry) for _, key, entry in kept if entry)
    for held, _, entry in kept:
        if not entry:
            continue
        state[held.name] = {}
        for key, value in entry.items():
            if not isinstance(key, str) or "/" in key:
                raise ConfigurationError(f"optimizer: its state of {held.name} has the key {key!r}; needs a word")
            if key in cut and is_slice(value, cast(torch.Tensor, held.key)):
                add(f"optimizer/{key}/{held.name}", held, value.detach(), held.per_rank)
                state[held.name][key] = SLICES
            else:
                state[held.name][key] = tree.encode(value, f"optimizer.{key}", whole)
    return {"class": engine.optimizer_class, "groups": groups, "state": state}
