"""State of `compress=` in a checkpoint: mean remainders over the ranks, by parameter, and the compressor's own states.

    remainder/NAME      the mean remainder of a parameter, of its shape, fp32; cut over a mesh as the parameter
    compression         JSON: method, steps, names of the remainders; states: small tensors of the compressor; in_step:
                        passes of the step under way are in them

Means are made bucket by bucket, and each rank keeps the elements that it writes. So it is with the means of a
compressor's arrays, such as velocities, which are among the states: their ranks write a share each. On load a rank
reads its part of each parameter's mean (`CompressedReduction.mean_part`), and the sections gather what they need: under
ZeRO as the load ends, with DDP in the next pass.

The mean is what moves: on any number of ranks, and in any engine, all ranks together go on with the same sum. What does
not fit the training here begins anew, and rank 0 says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CheckpointError, listed
from ..gradients.compression.remainders import MeanPart, OwnPart
from ..job.objects import all_gather_object
from ..mesh.placement import Cut, Run
from . import cuts, json_encoding
from .engine import Engine
from .held_tensor import HeldTensor, Share
from .index import Index
from .joining import share_range
from .tensorfile import blocks_of, checksum

Add = Callable[[str, Share, torch.Tensor, int], None]


def gather(engine: Engine) -> dict[str, Any] | None:
    """Returns the state of the engine's `CompressedReduction` without means; None without a reduction. Collective."""
    return None if engine.compressed is None else engine.compressed.state_without_means()


@dataclass(frozen=True, eq=False)
class KeptMean:
    """Shares that this rank writes of the mean remainder of a parameter, and of the compressor's arrays, on the CPU.

    compared: of what other parts of the model hold too, its name and the checksum of all of it, as a tensor.
    """

    remainder: Sequence[tuple[Share, torch.Tensor]]
    arrays: Mapping[str, Sequence[tuple[Share, torch.Tensor]]]
    compared: Mapping[str, torch.Tensor]


def written_means(engine: Engine) -> dict[str, KeptMean]:
    """Makes the means over all ranks of the engine, bucket by bucket, and keeps what this rank writes. Collective.

    Means are those over all ranks of the engine, also where each node reduces gradients by itself (DiLoCo).
    """
    reduction = engine.compressed
    if reduction is None:
        return {}
    arrays = reduction.compressor.arrays
    held = {each.parameter: each for each in engine.parameters}
    if engine.ddp is None or engine.ddp.process_group.size == engine.comm.size:
        return reduction.of_means(lambda p, rows: _kept(engine, held[p], arrays, rows))
    # Nodes may have other buckets, so that a rank has whole means of its node before all are averaged.
    rows_of = ("", *arrays)
    means = {
        (array, name): row
        for name, rows in reduction.of_means(lambda _, rows: [row.clone() for row in rows]).items()
        for array, row in zip(rows_of, rows, strict=True)
    }
    shapes = {key: shape for own in all_gather_object(engine.comm, _shapes(means)) for key, shape in own.items()}
    by_name = {each.name: each for each in engine.parameters}
    over_all: dict[tuple[str, str], torch.Tensor] = {}
    for key in sorted(shapes):
        device = by_name[key[1]].values.device
        over_all[key] = means[key] if key in means else torch.zeros(shapes[key], dtype=torch.float32, device=device)
    if over_all:
        engine.comm.all_reduce([*over_all.values()], "avg")
    names = [name for array, name in over_all if not array]
    return {name: _kept(engine, by_name[name], arrays, [over_all[array, name] for array in rows_of]) for name in names}


def _shapes(tensors: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {key: tuple(values.shape) for key, values in tensors.items()}


def _kept(engine: Engine, held: HeldTensor, arrays: Sequence[str], rows: Sequence[torch.Tensor]) -> KeptMean:
    """Copies what this rank writes of a parameter's means."""
    whole = replace(held, start=0, stop=cuts.element_count(held.cut), per_rank=False)
    rank, size = engine.comm.rank, engine.comm.size
    writes = engine.join.shares(held.name, rank, size) if held.per_rank else held.writes  # there is one mean

    def copied(shares: Sequence[Share], mean: torch.Tensor) -> list[tuple[Share, torch.Tensor]]:
        return [(share, whole.elements(share, mean).to("cpu", copy=True)) for share in shares]

    compared = {}
    other = engine.comparison_label(whole, False)
    if other is not None:
        compared[f"remainder/{held.name}{other}"] = _digest(rows[0])
    own = _own_share(held.cut, rank, size, engine.join.turns[held.name]) if _keeps_states(engine, held) else []
    return KeptMean(
        copied(writes, rows[0]),
        {array: copied(own, row) for array, row in zip(arrays, rows[1:], strict=True)},
        compared,
    )


def _own_share(cut: Cut, rank: int, size: int, turn: int) -> list[Share]:
    """Returns what a rank writes of a tensor that each part writes by itself; of a small one in turn all or nothing."""
    count = cuts.element_count(cut)
    start, stop = share_range(count, rank, size, turn)
    return [Share(cut, start, stop)] if stop > start or (count == 0 and rank == 0) else []


def _digest(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor([int(checksum(block), 16) for block in blocks_of(values)])


def describe(
    engine: Engine, state: Mapping[str, Any], means: Mapping[str, KeptMean], add: Add, spoken: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Describes the state of a `CompressedReduction` as JSON. Not collective.

    add: takes a share that this rank writes of a tensor, its values, and its number among those.
    spoken: gets the tensors of states, which rank 0 of the part writes.
    """
    number = engine.join.number
    part = f"part{number}." if number else ""
    states: dict[str, dict[str, Any]] = {}
    for held in engine.parameters:
        if held.name in means:
            for at, (share, values) in enumerate(means[held.name].remainder):
                add(f"remainder/{held.name}", share, values, at)
        if not _keeps_states(engine, held):
            continue
        kept = {
            key: json_encoding.encode(value, f"{part}compression.{key}.{held.name}", spoken)
            for key, value in state["states"].get(held.name, {}).items()
        }
        for array, shares in means[held.name].arrays.items() if held.name in means else ():
            name = f"{part}compression.{array}.{held.name}/0"
            kept[array] = {"$tensor": name}
            for at, (share, values) in enumerate(shares):
                add(name, share, values, at)
        if kept:
            states[held.name] = kept
    names = [held.name for held in engine.parameters if held.name in means]
    about = {name: state[name] for name in ("method", "steps", "in_step")}
    return {**about, "remainders": names, "states": states}


def join_descriptions(abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the descriptions of parts that join together."""
    every = [about["compression"] for about in abouts]
    names = dict.fromkeys(name for each in every for name in each["remainders"])
    states = {name: state for each in reversed(every) for name, state in each["states"].items()}
    return {**every[0], "remainders": [*names], "states": states}


def values_that_must_agree(about: Mapping[str, Any]) -> Any:
    """Returns what has to be the same in parts that join."""
    kept = about.get("compression")
    return None if kept is None else (kept["method"], kept["steps"], kept["in_step"])


@dataclass(eq=False)
class KeptCompression:
    """State of a checkpoint's compression, as far as it is read here.

    targets: memory for this rank's part of mean remainders, by name of the parameter.
    held: the parameters, cut as their targets.
    parts: of each, and memory for the part of the remainder and of the compressor's arrays.
    states: encoded.
    said: what begins anew, or is dropped.
    """

    method: str = ""
    steps: int = 0
    in_step: bool = False
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    held: dict[str, HeldTensor] = field(default_factory=dict)
    parts: dict[str, tuple[MeanPart, torch.Tensor]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def install(self, engine: Engine, tensor: Callable[[str], torch.Tensor], factor: float) -> None:
        """Gives the engine's reduction what was read, or an empty state.

        tensor: reads one by its name.
        factor: the loss scale here as a multiple of the saved one.
        """
        if engine.compressed is None or engine.compressed.chooses_none:
            return
        arrays = engine.compressed.compressor.arrays
        states: dict[str, dict[str, Any]] = {}
        for name, kept in self.states.items():
            for key, value in kept.items():
                read = json_encoding.decode(value, tensor)
                part, rows = self.parts.get(name, (None, read))
                if key in arrays and part is not None and part.shape == (tuple(read.shape) or (1,)):
                    rows[1 + arrays.index(key)] = part.of(read)
                else:
                    states.setdefault(name, {})[key] = read
        means = {name: OwnPart(rows) for name, (_, rows) in self.parts.items()}
        about = {"method": self.method, "steps": self.steps, "in_step": self.in_step}
        engine.compressed.set_state({**about, "remainders": means, "states": states})
        if factor != 1.0:
            engine.compressed.rescale(factor)


def match_compression(engine: Engine, index: Index) -> KeptCompression:
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
            part = here.mean_part(held.cut.part_shape)
            rows = torch.zeros(1 + len(here.compressor.arrays), *part.part_shape, dtype=torch.float32)
            found.parts[held.name] = part, rows
            own = _narrowed(held.cut, part)
            found.held[held.name] = replace(held, cut=own, start=0, stop=cuts.element_count(own))
            found.targets[held.name] = rows[0]
    name = here.compressor.name
    if about["method"] == name:
        found.states = {
            held.name: about["states"][held.name]
            for held in engine.parameters
            if held.name in about["states"] and _keeps_states(engine, held)
        }
        if cut := _cut_states(engine, index):
            found.said.append(f"states of {name} begin anew for parameters that are cut over a mesh: {listed(cut, 1)}")
    elif about["states"]:
        found.said.append(f"holds states of {about['method']}, which begin anew with {name}")
    return found


def _narrowed(cut: Cut, part: MeanPart) -> Cut:
    """Returns the cut that has a part of what a cut has; the cut itself if it has no dimensions."""
    if not cut.shape:
        return cut
    runs: list[Run] = []
    at = 0
    for start, stop in cut.runs[part.dim]:
        low, high = max(part.start - at, 0), min(part.stop - at, stop - start)
        if low < high:
            runs.append((start + low, start + high))
        at += stop - start
    return Cut(cut.shape, (*cut.runs[: part.dim], tuple(runs), *cut.runs[part.dim + 1 :]))


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
