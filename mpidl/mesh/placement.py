"""Placement of a parameter: the axes of a mesh along which the ranks hold different elements of it.

    none      the same on all ranks of pp, tp and ep (the default): for example a LayerNorm's weight
    ("tp",)   each tp rank holds a part: a cut weight
    ("pp",)   each stage holds parameters of its own
    ("ep",)   each ep rank holds experts of its own

What is derived from it: whether a norm adds the ranks' parts or takes one rank's (`norm`), and what an engine that
works over dp x cp must refuse. ZeRO's cut over dp x cp is its own matter and not declared.

A `Cut` says which elements of the whole parameter a rank holds. A fused weight of queries, keys and values [in, 3 * 4]
over two ranks, rank 0:

    whole   q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3       runs of its last dimension   (0, 2), (4, 6), (8, 10)
    part    q0 q1       k0 k1       v0 v1             which follow one another in the part
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError
from ..job.objects import all_gather_object
from .layout import MODEL_AXES, Layout

_ATTRIBUTE = "_mpidl_placement"
_CUT_AXES = frozenset({"tp", "ep"})  # stages of pp have parameters of their own, not parts

Run = tuple[int, int]  # indices start..stop of a dimension


@dataclass(frozen=True)
class Cut:
    """The elements of a whole tensor that a rank holds.

    shape: of the whole tensor.
    runs: of every dimension, the indices that the rank holds, in the order in which they follow one another in its
        part; ((0, n),) for a dimension of n that is not cut.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def along(cls, shape: Iterable[int], dim: int, runs: Iterable[Run]) -> Cut:
        """Cuts one dimension, and leaves the others whole."""
        shape = tuple(shape)
        whole: list[tuple[Run, ...]] = [((0, size),) for size in shape]
        whole[dim] = tuple(runs)
        return cls(shape, tuple(whole))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Copies the rank's part of a whole tensor into new memory."""
        part = whole
        for dim, (runs, size) in enumerate(zip(self.runs, self.shape, strict=True)):
            if runs != ((0, size),):
                part = torch.cat([part.narrow(dim, start, stop - start) for start, stop in runs], dim)
        return part.clone() if part is whole else part

    def write(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes the rank's part to its place in a whole tensor."""
        cut = [dim for dim, (runs, size) in enumerate(zip(self.runs, self.shape, strict=True)) if runs != ((0, size),)]
        if not cut:
            whole.copy_(part)
            return
        first, *others = cut
        index = torch.cat([torch.arange(start, stop, device=whole.device) for start, stop in self.runs[first]])
        if others:
            rest = Cut(
                (*self.shape[:first], len(index), *self.shape[first + 1 :]),
                tuple(((0, len(index)),) if dim == first else runs for dim, runs in enumerate(self.runs)),
            )
            target = whole.index_select(first, index)
            rest.write(part, target)
            part = target
        whole.index_copy_(first, index, part)


@dataclass(frozen=True)
class Placement:
    """Axes along which the ranks hold different elements. counted: False for a copy that another rank counts.

    cut: which elements of the whole parameter this rank holds; None if it is not known, or all.
    """

    axes: frozenset[str] = frozenset()
    counted: bool = True
    cut: Cut | None = None


_SAME_EVERYWHERE = Placement()


def place(parameter: torch.Tensor, *axes: str, counted: bool = True, cut: Cut | None = None) -> None:
    """Declares along which of pp, tp and ep the ranks hold different elements of the parameter.

    counted: False for a copy of a parameter that ranks of another stage hold and count, as of tied embeddings.
    cut: which elements this rank holds.

    The tensor keeps the declaration as an attribute, which copy.deepcopy and pickle copy.
    """
    wrong = [axis for axis in axes if axis not in MODEL_AXES]
    if wrong:
        raise ConfigurationError(f"place: got axis {wrong[0]!r}; needs any of {', '.join(MODEL_AXES)}")
    if cut is not None and cut.part_shape != tuple(parameter.shape):
        raise ConfigurationError(
            f"place: cut: is of a part of shape {cut.part_shape}, and the parameter has {tuple(parameter.shape)}"
        )
    _set(parameter, Placement(frozenset(axes), counted, cut))


def placement(parameter: torch.Tensor) -> Placement:
    """The declared placement; by default the same elements on all ranks."""
    found: Placement = getattr(parameter, _ATTRIBUTE, _SAME_EVERYWHERE)
    return found


def part_axes(parameter: torch.Tensor) -> frozenset[str]:
    """The axes of the placement, without those of a cut that leaves the parameter whole, as over tp=1."""
    declared = placement(parameter)
    whole = declared.cut is not None and declared.cut.part_shape == declared.cut.shape
    return declared.axes - _CUT_AXES if whole else declared.axes


def cuts_over(comm: Communicator, parameters: Iterable[torch.Tensor]) -> list[list[Cut]]:
    """Lists for each parameter, all of which are cut, the cuts of the ranks of tp. Collective. comm: these ranks."""
    everyone = all_gather_object(comm, [placement(p).cut for p in parameters])
    return [list(cuts) for cuts in zip(*everyone, strict=True)]


def join_parts(comm: Communicator, part: torch.Tensor, cuts: list[Cut]) -> torch.Tensor:
    """Makes the whole of the ranks' parts, on every rank. Collective. cuts: of all ranks, as `cuts_over` lists them."""
    counts = [math.prod(cut.part_shape) for cut in cuts]
    everything = part.new_empty(sum(counts))
    comm.all_gather(everything, part.contiguous().view(-1), counts=counts)
    whole = part.new_empty(cuts[0].shape)
    for cut, values in zip(cuts, everything.split(counts), strict=True):
        cut.write(values.view(cut.part_shape), whole)
    return whole


def _set(parameter: torch.Tensor, declared: Placement) -> None:
    setattr(parameter, _ATTRIBUTE, declared)
    parameter.__dict__["__deepcopy__"] = _DeepCopy(parameter)


class _DeepCopy:
    """Makes the deep copies of a parameter; torch's own leave out its attributes.

    A pickled one is None, with which copy.deepcopy goes by pickle's protocol, and that keeps the attributes.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, memo: dict[int, Any]) -> torch.Tensor:
        parameter = self._parameter()
        assert parameter is not None
        made: torch.Tensor = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
        _set(made, placement(parameter))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def without_cut(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Finds the first parameter that is placed on tp and whose cut is not declared; returns its name."""
    return next((name for name, p in named if "tp" in placement(p).axes and placement(p).cut is None), None)


def refuse_unknown_cut(optimizer: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for a cut parameter whose cut is not declared. optimizer: needs whole ones."""
    if (name := without_cut(named)) is not None:
        raise ConfigurationError(
            f"optimizer_class: a step of {optimizer} needs whole parameters, and {name} is cut over tp; needs "
            "place(..., cut=), which says how, or an optimizer that updates each element by itself, such as AdamW"
        )


def refuse_parts_without_mesh(engine: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for a parameter whose placement only a mesh can follow. engine: has no mesh."""
    for name, p in named:
        for axis in sorted(part_axes(p)):
            raise ConfigurationError(
                f"{engine}: {name} is placed on {axis}, and without its mesh norms and steps would be of the elements "
                "that this rank holds; needs mesh="
            )


def refuse_other_mesh(what: str, layout: Layout, named: Iterable[tuple[str | None, torch.Tensor]]) -> None:
    """Raises ConfigurationError for a parameter that is cut over axes which have size 1 in the mesh given.

    what: whose mesh it is.
    layout: of the mesh.
    named: parameters with their names, None if they are not known.
    """
    for name, p in named:
        declared = placement(p)
        axes = sorted(part_axes(p) & _CUT_AXES) if declared.cut is not None else []
        if axes and all(getattr(layout, axis) == 1 for axis in axes):
            assert declared.cut is not None
            raise ConfigurationError(
                f"{what}: mesh: has {'=1, '.join(axes)}=1, and {name or 'a parameter'} of shape {tuple(p.shape)} is a "
                f"part of one of shape {declared.cut.shape}; needs the mesh over which it was cut"
            )


def refuse_offload(optimizer: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigurationError for a cut parameter. optimizer: class that needs norms of whole parameters."""
    for name, p in named:
        if "tp" in placement(p).axes:
            raise ConfigurationError(
                f"offload: {optimizer} needs norms of whole parameters, and {name} is cut over tp; needs offload=None"
            )
