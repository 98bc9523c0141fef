"""Joins the parts of a model that lie over pp, tp and ep of a mesh to the whole one, and says which part writes what.

    tp=0    wte [rows 0..5]   ln   kv [heads 0, 1]   q [heads 0, 1, 2, 3]      declared by mpidl.mesh.place(cut=)
    tp=1    wte [rows 5..9]   ln   kv [heads 1, 2]   q [heads 4, 5, 6]
    whole   wte [rows 0..9]   ln   kv [heads 0..3]   q [heads 0..7]            shapes and names of one process

Every element is written once: a part does not write elements that a part before it holds, and parts that hold the same
elements of a tensor write a share each. A model joins if a name stands in one stage of pp (other copies are placed with
counted=False), if every parameter that is placed on tp or ep has a cut or stands in one part alone, and if shapes and
dtypes agree. Every rank computes this of the same declarations, so that all come to the same answer. What does not join
is a checkpoint for each part: `parts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..errors import ConfigurationError
from ..mesh.placement import Cut
from . import cuts
from .held_tensor import Share

SMALL = 1 << 16  # elements below which one part or rank writes all of a tensor, each in turn
_LINE = 1 << 10  # elements to which shares of larger ones are rounded


@dataclass(frozen=True)
class DeclaredTensor:
    """Declaration of a part's tensor.

    cut: what the part holds.
    stated: by `place(cut=)`, not by default.
    axes, counted: those of its `Placement`.
    """

    cut: Cut
    dtype: torch.dtype
    axes: frozenset[str] = frozenset()
    counted: bool = True
    stated: bool = False


@dataclass(frozen=True)
class PartContent:
    """Names in a part of a model, the same on its ranks. groups: the optimizer's, of parameters' names."""

    coordinates: Mapping[str, int]
    parameters: Mapping[str, DeclaredTensor]
    buffers: Mapping[str, DeclaredTensor]
    tied: Mapping[str, str]
    extra_states: Sequence[str] = ()
    groups: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class OwnedCuts:
    """Cuts of a tensor that a part writes, together with all `parts` that hold the same."""

    cuts: tuple[Cut, ...]
    parts: tuple[int, ...]


@dataclass
class JoinedParts:
    """The whole of some parts.

    contents: of all, by number.
    number: this rank's.
    reason: why they do not join; None if they do.
    owned: by name and part.
    state_writers: by parameter name, the number of the part that writes its small states.
    turns: counts small tensors.
    """

    contents: Sequence[PartContent]
    number: int
    reason: str | None = None
    owned: dict[str, dict[int, OwnedCuts]] = field(default_factory=dict)
    state_writers: dict[str, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, in the order of parts."""
        return [*dict.fromkeys(name for content in self.contents for name in content.parameters)]

    @property
    def buffers(self) -> list[str]:
        """Names of all buffers, in the order of parts."""
        return [*dict.fromkeys(name for content in self.contents for name in content.buffers)]

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tensors, and the first of each."""
        return {name: first for content in reversed(self.contents) for name, first in content.tied.items()}

    @property
    def groups(self) -> list[list[str]]:
        """The names in each group of the optimizer."""
        most = max(len(content.groups) for content in self.contents)
        found: list[dict[str, None]] = [{} for _ in range(most)]
        for content in self.contents:
            for names, own in zip(found, content.groups, strict=False):
                names.update(dict.fromkeys(own))
        return [[*names] for names in found]

    def declared(self, name: str) -> DeclaredTensor:
        """Returns the first declaration of a tensor."""
        content = self.contents[self.state_writers[name]]
        return content.parameters.get(name) or content.buffers[name]

    def shares(self, name: str, number: int = 0, of: int = 1) -> list[Share]:
        """Lists what this part writes of a tensor, or the number-th of `of` ranks that hold the same of it."""
        own_cuts = self.owned[name].get(self.number)
        found: list[Share] = []
        if own_cuts is None:
            return found
        for cut in own_cuts.cuts:
            elements = cuts.element_count(cut)
            place = own_cuts.parts.index(self.number) * of + number
            start, stop = share_range(elements, place, len(own_cuts.parts) * of, self.turns[name])
            if start < stop or (elements == 0 and number == 0):
                found.append(Share(cut, start, stop))
        return found

    def parts_with_same(self, name: str) -> tuple[int, ...]:
        """Lists the parts that hold the same elements of a tensor as this one."""
        own_cuts = self.owned[name].get(self.number)
        return () if own_cuts is None else own_cuts.parts


def join_model_parts(contents: Sequence[PartContent], number: int) -> JoinedParts:
    """Joins parts. Raises ConfigurationError for cuts that contradict each other."""
    joined = JoinedParts(contents, number)
    axes = [axis for axis in contents[0].coordinates if len({content.coordinates[axis] for content in contents}) > 1]
    small = 0
    for name in [*joined.parameters, *joined.buffers]:
        holders = {
            part: content.parameters.get(name) or content.buffers[name]
            for part, content in enumerate(contents)
            if name in content.parameters or name in content.buffers
        }
        joined.reason = joined.reason or _reason(name, holders, contents, axes)
        if joined.reason is not None:
            return joined
        held = tuple((part, declared.cut) for part, declared in holders.items())
        joined.owned[name], problem = _owners(held)
        if problem is not None:
            where = f"on all ranks of {', '.join(axes)} together" if axes else "on this rank alone; needs mesh="
            raise ConfigurationError(f"place: cut: {name} {problem}, {where}")
        joined.state_writers[name] = next((part for part, cut in held if cuts.element_count(cut)), held[0][0])
        joined.turns[name] = small
        small += math.prod(held[0][1].shape) < SMALL
    for part, content in reversed([*enumerate(contents)]):
        joined.state_writers |= dict.fromkeys(content.extra_states, part)
    return joined


def _reason(
    name: str, holders: Mapping[int, DeclaredTensor], contents: Sequence[PartContent], axes: Sequence[str]
) -> str | None:
    """Explains why the parts of a tensor do not join."""
    everyone = [*holders.values()]
    for axis in axes:
        places = {contents[part].coordinates[axis] for part, declared in holders.items() if declared.counted}
        if len(places) < 2:
            continue
        if axis == "pp" and name in contents[min(holders)].parameters:
            return f"{name} stands in several stages of pp"
        if any(axis in declared.axes and not declared.stated for declared in everyone):
            return f"{name} is placed on {axis} without a cut"
    shapes = [*dict.fromkeys(declared.cut.shape for declared in everyone)]
    if len(shapes) > 1 and any(declared.stated for declared in everyone):
        raise ConfigurationError(
            f"place: cut: {name} has the whole shape {shapes[0]} on one rank and {shapes[1]} on another"
        )
    if len(shapes) > 1:
        return f"{name} has the shape {shapes[0]} in one part and {shapes[1]} in another"
    dtypes = sorted({str(declared.dtype) for declared in everyone})
    return f"{name} is {dtypes[0]} in one part and {dtypes[1]} in another" if len(dtypes) > 1 else None


@lru_cache(maxsize=1024)
def _owners(held: tuple[tuple[int, Cut], ...]) -> tuple[dict[int, OwnedCuts], str | None]:
    """Shares a tensor out, each element to one part, and tells what is wrong with the cuts. held: by part."""
    shape = held[0][1].shape
    if math.prod(shape) == 0:
        return {held[0][0]: OwnedCuts((cuts.whole(shape),), held[0][:1])}, None
    by_cut: dict[Cut, list[int]] = {}
    for part, cut in held:
        if cuts.element_count(cut):
            by_cut.setdefault(cut, []).append(part)
    owned: dict[int, OwnedCuts] = {}
    before: list[Cut] = []
    for cut, parts in by_cut.items():
        remaining = [cut]
        for other in before if sum(map(cuts.element_count, by_cut)) > math.prod(shape) else ():
            remaining = [rest for piece in remaining for rest in cuts.without(piece, other)]
        before.append(cut)
        owned |= dict.fromkeys(parts, OwnedCuts(tuple(remaining), tuple(parts)))
    return owned, cuts.coverage_problem(shape, [cut for parts in by_cut.values() for cut in owned[parts[0]].cuts])


def share_range(elements: int, number: int, of: int, turn: int) -> tuple[int, int]:
    """Returns the range of elements that the number-th of `of` takes. turn: number of small tensors before this one."""
    if elements < SMALL:
        return (0, elements) if turn % of == number else (0, 0)
    each = -(-elements // (of * _LINE)) * _LINE
    return min(number * each, elements), min((number + 1) * each, elements)
