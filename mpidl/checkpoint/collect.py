"""Content of a checkpoint: the tensors that this rank writes, and the rest as JSON.

Names of tensors:

    model/transformer.wte.weight          parameters (fp32 masters where there are any) and buffers
    optimizer/exp_avg/transformer.wte...  states of the optimizer that have the parameter's shape
    remainder/transformer.wte.weight      what `compress=` has not sent, the mean over the ranks
    seen/transformer.wte.weight           while a delayed update is pending: the values with which passes still compute
    gradient/transformer.wte.weight       of micro-steps that no step has used yet
    WHOSE/0, WHOSE/1, ...                 tensors inside other states, numbered. WHOSE is extra, scheduler, scaler,
                                          sampler, averager, model/NAME (a module's extra state), optimizer.group0,
                                          optimizer.STATE (of another shape than the parameter) or
                                          compression.STATE.PARAMETER; of another part of a mesh than the first one
                                          behind part1., part2., ...
    rank00001/...                         what each rank has of its own: random states, a hook's state, weights that
                                          differ between the ranks for a while (post-local SGD, no_sync), with their
                                          states

Of a model that lies over a mesh, a rank writes what `joining` assigns to it of its part's cuts. Each parameter's
states are described by one part; `join_descriptions` puts the parts' descriptions together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from ..digest import digest
from ..errors import ConfigurationError
from ..job.agreement import is_anywhere
from ..mesh.placement import Cut
from ..models.published import published_files
from ..optim.elementwise_state import elementwise, is_slice, saved_state
from ..replicas.checksums import checksum
from . import compression_state, cuts, json_encoding, random_states
from .engine import Engine
from .held_tensor import HeldTensor, Share
from .joining import JoinedParts
from .schema import SLICES
from .tensorfile import code_of

# How the update is computed, not what it computes: the loading run chooses for its own device.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_STATEFUL = ("scheduler", "scaler", "sampler")
ONE_CLASS = ("scheduler",)  # those whose states another class may take without noticing that they mean something else


@dataclass(frozen=True, eq=False)
class PieceToWrite:
    """Elements start..stop of a flattened cut of a tensor, which this rank writes. values: returns them.

    number: among its cuts of the tensor.
    """

    name: str
    cut: Cut
    dtype: torch.dtype
    start: int
    stop: int
    values: Callable[[], torch.Tensor]
    number: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that the elements take in the file."""
        return (self.stop - self.start) * self.dtype.itemsize

    def copy(self) -> PieceToWrite:
        """Returns a piece that holds the present values, copied to the CPU."""
        values = self.values().detach().to("cpu", copy=True)
        return replace(self, values=lambda: values)

    @property
    def complete(self) -> bool:
        """True if it is all of the cut."""
        return self.stop - self.start == cuts.element_count(self.cut)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.cut.part_shape if self.complete else (self.stop - self.start,)

    @property
    def key(self) -> str:
        """Name in the file; that of a part ends with its range, such as "[0:1024]"."""
        name = f"{self.name}#{self.number}" if self.number else self.name
        return name if self.complete else f"{name}[{self.start}:{self.stop}]"


def rank_name(rank: int) -> str:
    """Prefix of the names of tensors that belong to one rank."""
    return f"rank{rank:05d}"


@dataclass(eq=False)
class Collected:
    """Content of a checkpoint, not yet written.

    pieces: what this rank writes.
    about: JSON, equal on every rank of a part.
    own: JSON of this rank.
    shared: tensors that every rank holds and of which each writes a part.
    copied: what other parts may hold too.
    buffers: those of `copied` that are buffers.
    first: tensors that the first part writes for all.
    extra_states: of this part's modules, as JSON and its tensors by name.
    uncut: a state of the optimizer that cannot be cut as its parameter is.
    """

    pieces: list[PieceToWrite]
    about: dict[str, Any]
    own: dict[str, Any]
    shared: dict[str, torch.Tensor]
    copied: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    extra_states: dict[str, tuple[Any, dict[str, torch.Tensor]]]
    uncut: str | None


def collect(
    engine: Engine,
    stateful: Mapping[str, Any],
    step: int,
    micro_step: int,
    gradients: Mapping[str, torch.Tensor],
    extra: Any,
    random: bool,
    compressed: Mapping[str, Any] | None = None,
) -> Collected:
    """Collects the content without a copy, but for mean remainders, which are made for it. Collective.

    stateful: scheduler, scaler and sampler, or None.
    gradients: the engine's, by name of the parameter.
    compressed: the state of its `CompressedReduction` without means, if it has one.
    """
    pieces: list[PieceToWrite] = []
    shared: dict[str, torch.Tensor] = {}
    copied: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    own_prefix = rank_name(engine.part.rank)

    def add(name: str, held: HeldTensor, values: torch.Tensor, per_rank: bool) -> None:
        alone = per_rank and engine.comm.size > 1
        if alone:
            name = f"{rank_name(engine.comm.rank)}/{name}"
        elif held.shared:
            shared[name] = values
        other = engine.comparison_label(held, alone)
        if other is not None:
            (buffers if held.key is None else copied)[f"{name}{other}"] = values
        for number, share in enumerate(held.own if alone else held.writes):
            place = share.cut, values.dtype, share.start, share.stop
            pieces.append(PieceToWrite(name, *place, partial(part, held, share, values), number))

    def part(held: HeldTensor, share: Share, values: torch.Tensor) -> torch.Tensor:
        engine.forget()  # the tensor before this one
        return held.elements(share, values)

    def add_share(name: str, share: Share, values: torch.Tensor, number: int) -> None:
        pieces.append(PieceToWrite(name, share.cut, values.dtype, share.start, share.stop, lambda: values, number))

    # These may be collective, so they come before what may fail on one rank alone, a hook of the program among it.
    state_of_averager = None if engine.averager is None else engine.averager.state_dict()
    hook = engine.saved_hook()
    state_of_hook = None if hook is None else hook.state_dict()
    means = {} if compressed is None else compression_state.written_means(engine)
    unreduced = engine.gradients_per_rank
    if engine.ddp is not None and micro_step:  # a rank that left a join early may alone have such gradients
        unreduced = is_anywhere(engine.comm, unreduced)
    tensors = [*engine.parameters, *engine.buffers]
    for held in tensors:
        add(f"model/{held.name}", held, held.values, held.per_rank)
    about: dict[str, Any] = {
        "step": step,
        "micro_step": micro_step,
        "ranks": engine.comm.size if engine.part.names else engine.all_ranks.size,
        "engine": engine.kind,
        "model": {
            "class": type(engine.model).__name__,
            "parameters": [held.name for held in engine.parameters],
            "buffers": [held.name for held in engine.buffers],
            "tied": engine.tied,
            "published": published_files(engine.model),
        },
    }
    if engine.part.joined:
        about["mesh"] = engine.part.sizes
    elif engine.part.names and engine.join.reason:
        about["apart"] = engine.join.reason
    part_tensors: dict[str, torch.Tensor] = {}  # equal on every rank of the part, and written by its rank 0
    rank_tensors: dict[str, torch.Tensor] = {}  # of this rank alone
    own: dict[str, Any] = {}
    first: dict[str, torch.Tensor] = {}  # equal on every rank, and written by the first
    of_extra: dict[str, torch.Tensor] = {}  # the first rank's
    extra_states: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    for name, module in engine.extra_states.items():
        inside: dict[str, torch.Tensor] = {}
        extra_states[name] = json_encoding.encode(module.get_extra_state(), f"model/{name}", inside), inside
    about["model"]["extra_state"] = {}
    for name, (state, inside) in extra_states.items():
        if engine.join.state_writers[name] == engine.join.number:
            about["model"]["extra_state"][name] = state
            part_tensors |= inside
    uncut = None
    if engine.optimizer is not None:
        about["optimizer"], uncut = _describe_optimizer(engine, add, part_tensors, first)
        states = _states_of_the_rank(engine, f"{own_prefix}/optimizer", rank_tensors)
        if states:
            own["states"] = states
        if engine.owned is not None and engine.owned.steps is not None:
            about["optimizer"]["steps"] = engine.owned.steps
            unpublished = engine.owned.unpublished()
            for held in engine.parameters:
                if held.parameter in unpublished:
                    add(f"seen/{held.name}", held, engine.owned.published_values(held.parameter), False)
    own["unreduced"] = unreduced
    for held in engine.parameters:
        if held.name in gradients:
            alone = unreduced or held.per_rank or engine.gradients_differ
            add(f"gradient/{held.name}", held, gradients[held.name], alone)
    if compressed is not None:
        about["compression"] = compression_state.describe(engine, compressed, means, add_share, part_tensors)
        copied |= {name: known for mean in means.values() for name, known in mean.compared.items()}
    for name in _STATEFUL:
        if stateful.get(name) is not None:
            about[name] = json_encoding.encode(state_of(name, stateful[name]), name, first)
            if name in ONE_CLASS:
                about[f"{name}_class"] = type(stateful[name]).__name__
    if engine.averager is not None:
        about["averager"] = json_encoding.encode(state_of_averager, "averager", first)
    about["extra"] = json_encoding.encode(extra, "extra", of_extra)
    if engine.comm.rank == 0:
        tensors_to_write = {**part_tensors, **({**first, **of_extra} if engine.join.number == 0 else {})}
        pieces += [_whole_piece(name, values) for name, values in tensors_to_write.items()]
    if random:
        own["random"] = json_encoding.encode(random_states.capture(), f"{own_prefix}/random", rank_tensors)
    if hook is not None:
        own["hook"] = json_encoding.encode(state_of_hook, f"{own_prefix}/hook", rank_tensors)
    pieces += [_whole_piece(name, values) for name, values in rank_tensors.items()]
    for piece in pieces:
        code_of(piece.dtype, piece.name)  # before anything is written
    return Collected(pieces, about, own, shared, copied, buffers, first, extra_states, uncut)


def _whole_piece(name: str, values: torch.Tensor) -> PieceToWrite:
    return PieceToWrite(name, cuts.whole(tuple(values.shape)), values.dtype, 0, values.numel(), lambda: values)


def common_states(found: Collected, writes_states: bool, buffers: bool) -> dict[str, str]:
    """Returns digests of what only one of joined parts writes, and which so has to be the same in all that have it.

    writes_states: this rank is the first of its part, whose tensors and extra states are kept.
    buffers: compare them too.
    """
    sums = _sums_of_json(found.about)
    if writes_states:
        sums |= {f"tensor {name}": _sum(values) for name, values in found.first.items()}
        for name, (state, inside) in found.extra_states.items():
            tensors = [_sum(values) for values in inside.values()]
            sums[f"extra state {name}"] = _digest_of_json([state, tensors])
    if buffers:
        sums |= {f"buffer {name.replace('model/', '', 1)}": _sum(values) for name, values in found.buffers.items()}
    return sums


def _sum(values: torch.Tensor) -> str:
    return checksum(values).hex()


def _digest_of_json(value: Any) -> str:
    return digest(json.dumps(value, sort_keys=True)).hex()


def _sums_of_json(about: Mapping[str, Any]) -> dict[str, str]:
    """Returns digests of the states that stand in the index."""
    found = {name: about.get(name) for name in (*_STATEFUL, "averager")}
    found["compression"] = compression_state.values_that_must_agree(about)
    optimizer = about.get("optimizer", {"class": None, "groups": ()})
    found |= {"optimizer": [optimizer["class"], [group["settings"] for group in optimizer["groups"]]]}
    return {name: _digest_of_json(value) for name, value in found.items()}


def join_descriptions(of: JoinedParts, abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the descriptions of parts that join together. abouts: of all parts, by number."""
    about = dict(abouts[0])
    extra = {name: state for each in abouts for name, state in each["model"]["extra_state"].items()}
    names = {"parameters": of.parameters, "buffers": of.buffers, "tied": of.tied}
    about["model"] = {**about["model"], **names, "extra_state": extra}
    if "compression" in about:
        about["compression"] = compression_state.join_descriptions(abouts)
    if "optimizer" in about:
        groups = zip(about["optimizer"]["groups"], of.groups, strict=True)
        about["optimizer"] = {
            **about["optimizer"],
            "groups": [{**group, "params": params} for group, params in groups],
            "state": {name: kept for each in abouts for name, kept in each["optimizer"]["state"].items()},
        }
    return about


def state_of(name: str, stateful: Any) -> Any:
    """Returns the state_dict of a scheduler, scaler or sampler. Raises ConfigurationError for others without one."""
    if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
        raise ConfigurationError(f"{name}: got a {type(stateful).__name__}; needs state_dict() and load_state_dict()")
    return stateful.state_dict()


def _describe_optimizer(
    engine: Engine,
    add: Callable[[str, HeldTensor, torch.Tensor, bool], None],
    part_tensors: dict[str, torch.Tensor],
    first: dict[str, torch.Tensor],
) -> tuple[dict[str, Any], str | None]:
    """Describes the optimizer: groups with the parameters' names, and the states of each parameter.

    Returns also the first state that cannot be cut as its parameter is.
    """
    optimizer = cast("torch.optim.Optimizer", engine.optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", *IMPLEMENTATION)}
        names = [engine.names[p] for p in group["params"]]
        groups.append({"params": names, "settings": json_encoding.encode(settings, f"optimizer.group{number}", first)})
    state: dict[str, Any] = {}
    uncut = None
    part = f"part{engine.join.number}." if engine.join.number else ""
    kept, cut = _kept_states(engine)
    for held, entry in kept:
        writes_states = engine.join.state_writers[held.name] == engine.join.number
        entries: dict[str, Any] = {}
        for key, value in entry.items():
            if not isinstance(key, str) or "/" in key:
                raise ConfigurationError(f"optimizer: its state of {held.name} has the key {key!r}; needs a word")
            if _is_cut(held, key, value, cut):
                add(f"optimizer/{key}/{held.name}", held, value.detach(), held.per_rank)
                entries[key] = SLICES
                continue
            if torch.is_tensor(value) and value.dim() and engine.steps_on_part(held):
                uncut = uncut or f"{key} of {held.name} is not cut as its parameter is"
            entries[key] = json_encoding.encode(value, f"{part}optimizer.{key}", part_tensors if writes_states else {})
        if writes_states:
            state[held.name] = entries
    return {"class": engine.optimizer_class, "groups": groups, "state": state}, uncut


def _kept_states(engine: Engine) -> tuple[list[tuple[HeldTensor, dict[str, Any]]], set[str]]:
    """Returns the optimizer's states of each parameter with some, and the keys of those of its shape."""
    states = saved_state(cast("torch.optim.Optimizer", engine.optimizer))
    kept = [(held, states[held.key]) for held in engine.parameters if held.key is not None and states.get(held.key)]
    return kept, elementwise((cast(torch.Tensor, held.key).shape, entry) for held, entry in kept)


def _states_of_the_rank(engine: Engine, where: str, rank_tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Describes the states of another shape than their parameter, where the ranks' values differ."""
    found: dict[str, Any] = {}
    if not any(held.per_rank for held in engine.parameters):
        return found
    kept, cut = _kept_states(engine)
    for held, entry in kept:
        others = {key: value for key, value in entry.items() if not _is_cut(held, key, value, cut)}
        if held.per_rank and others:
            found[held.name] = {k: json_encoding.encode(v, f"{where}.{k}", rank_tensors) for k, v in others.items()}
    return found


def _is_cut(held: HeldTensor, key: str, value: Any, cut: set[str]) -> bool:
    """Tells whether a state is cut as its parameter is. cut: the keys of such states."""
    return key in cut and is_slice(value, cast(torch.Tensor, held.key))
