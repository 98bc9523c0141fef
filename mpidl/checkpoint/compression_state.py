"""State of `compress=` in a checkpoint: mean remainders over the ranks, by parameter, and the compressor's own states.

    remainder/NAME      the mean remainder of a parameter, of its shape, fp32; cut over a mesh as the parameter
    compression         JSON: method, steps, names of the remainders; states: small tensors of the compressor; in_step:
                        passes of the step under way are in them

The mean is what moves: on any number of ranks, and in any engine, all ranks together go on with the same sum. What does
not fit the training here begins anew, and rank 0 says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CheckpointError
from ..job.objects import all_gather_object
from . import cuts, json_encoding
from .engine import Engine
from .held_tensor import HeldTensor
from .index import Index

Add = Callable[[str, HeldTensor, torch.Tensor, bool], None]


def gather(engine: Engine) -> dict[str, Any] | None:
    """Returns the state of the engine's `CompressedReduction`; None without one. Collective.

    Means are those over all ranks of the engine, also where each node reduces gradients by itself (DiLoCo).
    """
    reduction = engine.compressed
    if reduction is None:
        return None
    state = reduction.state_dict()
    if engine.ddp is None or engine.ddp.process_group.size == engine.comm.size:
        return state
    means = {("", name): mean for name, mean in state["remainders"].items()}
    for array in reduction.compressor.arrays:
        means |= {(array, name): kept[array] for name, kept in state["states"].items() if array in kept}
    shapes = {key: shape for own in all_gather_object(engine.comm, _shapes(means)) for key, shape in own.items()}
    over_all = {key: means[key] if key in means else torch.zeros(shapes[key]) for key in sorted(shapes)}
    if over_all:
        engine.comm.all_reduce([*over_all.values()], "avg")
    for (array, name), mean in over_all.items():
        kept = state["remainders"] if array == "" else state["states"].setdefault(name, {})
        kept[array or name] = mean
    return state


def _shapes(tensors: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {key: tuple(values.shape) for key, values in tensors.items()}


def describe(engine: Engine, state: Mapping[str, Any], add: Add, spoken: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Describes the state of a `CompressedReduction` as JSON. Collective on no rank.

    add: takes what this rank writes of a tensor that all ranks hold.
    spoken: gets the tensors of states, which rank 0 of the part writes.
    """
    number = engine.join.number
    part = f"part{number}." if number else ""
    states = {}
    for held in engine.parameters:
        if held.name in state["remainders"]:
            whole = replace(held, start=0, stop=cuts.count(held.cut))
            if held.per_rank:  # each rank would write its own, and there is one mean
                whole = replace(whole, writes=held.own if engine.comm.rank == 0 else [], per_rank=False)
            add(f"remainder/{held.name}", whole, state["remainders"][held.name], False)
        if held.name in state["states"] and _keeps_states(engine, held):
            kept = state["states"][held.name]
            states[held.name] = {
                key: json_encoding.encode(value, f"{part}compression.{key}.{held.name}", spoken)
                for key, value in kept.items()
            }
    names = [held.name for held in engine.parameters if held.name in state["remainders"]]
    about = {name: state[name] for name in ("method", "steps", "in_step")}
    return {**about, "remainders": names, "states": states}


def joined(abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the descriptions of parts that join together."""
    every = [about["compression"] for about in abouts]
    names = dict.fromkeys(name for each in every for name in each["remainders"])
    states = {name: state for each in reversed(every) for name, state in each["states"].items()}
    return {**every[0], "remainders": [*names], "states": states}


def common(about: Mapping[str, Any]) -> Any:
    """Returns what has to be the same in parts that join."""
    kept = about.get("compression")
    return None if kept is None else (kept["method"], kept["steps"], kept["in_step"])


@dataclass(eq=False)
class KeptCompression:
    """State of a checkpoint's compression, as far as it is read here.

    targets: memory for whole mean remainders, by name of the parameter.
    held: the parameters.
    states: encoded.
    said: what begins anew, or is dropped.
    """

    method: str = ""
    steps: int = 0
    in_step: bool = False
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    held: dict[str, HeldTensor] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def install(self, engine: Engine, tensor: Callable[[str], torch.Tensor], factor: float) -> None:
        """Gives the engine's reduction what was read, or an empty state.

        tensor: reads one by its name.
        factor: the loss scale here as a multiple of the saved one.
        """
        if engine.compressed is None or engine.compressed.chooses_none:
            return
        states = {
            name: {key: json_encoding.decode(value, tensor) for key, value in kept.items()}
            for name, kept in self.states.items()
        }
        about = {"method": self.method, "steps": self.steps, "in_step": self.in_step}
        engine.compressed.load_state_dict({**about, "remainders": self.targets, "states": states})
        if factor != 1.0:
            engine.compressed.rescale(factor)


def plan(engine: Engine, index: Index) -> KeptCompression:
    """Compares what was saved with the compression here; changes nothing. Raises CheckpointError for damage."""
    about, here = index.about.get("compression"), engine.compressed
    found = KeptCompression()
    if about is None:
        if here is not None:
            found.said.append("was saved without compress=: remainders begin at zero, and start_step counts from here")
        return found
    if here is None or here.chooses_none:
        if about["remainders"] or about["states"]:
            why = "without compress=" if here is None else "as 'auto' chose none"
            found.said.append(f"holds what compress={about['method']!r} has not sent, which is dropped {why}")
        return found
    found.method, found.steps, found.in_step = about["method"], about["steps"], about.get("in_step", False)
    if about["remainders"] and not here.feeds_back:
        found.said.append(f"holds remainders of {about['method']}, which are dropped, as errors are not fed back here")
    for held in engine.parameters:
        name = f"remainder/{held.name}"
        if held.name in about["remainders"] and here.feeds_back:
            if index.tensors[name].shape != held.shape:
                raise CheckpointError(f"{index.file}: {name} has another shape than {held.name}")
            found.targets[held.name] = torch.zeros(held.cut.part_shape, dtype=torch.float32)
            found.held[held.name] = held
    name = here.compressor.name
    if about["method"] == name:
        found.states = {
            held.name: about["states"][held.name]
            for held in engine.parameters
            if held.name in about["states"] and _keeps_states(engine, held)
        }
        if cut := _cut_states(engine, index):
            more = f" and {len(cut) - 1} more" if cut[1:] else ""
            found.said.append(f"states of {name} begin anew for parameters that are cut over a mesh: {cut[0]}{more}")
    elif about["states"]:
        found.said.append(f"holds states of {about['method']}, which begin anew with {name}")
    return found


def _cut_states(engine: Engine, index: Index) -> list[str]:
    """Lists the parameters, of all parts of the model, whose states the compressor keeps and cannot take over."""
    about, here = index.about["compression"], engine.compressed
    assert here is not None
    found: dict[str, None] = {}
    for content in engine.join.contents:
        for name, declared in content.parameters.items():
            keeps = here.compressor.arrays or here.compressor.state_bytes([torch.Size(declared.cut.part_shape)])
            remainder = index.tensors.get(f"remainder/{name}")
            was_cut = remainder is not None and bool(remainder.cuts)
            is_cut = declared.cut != cuts.whole(declared.cut.shape)
            began = remainder is not None or name in about["states"]
            if keeps and began and (was_cut or is_cut):
                found[name] = None
    return [*found]


def _keeps_states(engine: Engine, held: HeldTensor) -> bool:
    """Returns True for a whole parameter: states of parts do not join, and begin anew."""
    return held.cut == cuts.whole(held.shape)
