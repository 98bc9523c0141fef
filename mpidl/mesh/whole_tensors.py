"""Whole tensors of a model that is cut over tp, by the parameters' names, and a rank's parts of them.

    parts     0.weight [4, 4] of rank 0    0.weight [4, 4] of rank 1    2.bias [4], the same on both
    whole     0.weight [8, 4]                                           2.bias [4]

A value has the shape of its parameter, whose `placement` says which elements of the whole one it holds. `join` is
collective over tp: what is wrong on one of its ranks is told on all of them before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collectives import Communicator

from ..errors import ConfigurationError
from ..job.agreement import check_everywhere
from ..job.objects import all_gather_object
from .groups import DATA
from .mesh import Mesh, open_meshes
from .placement import Cut, join_parts, placement, without_cut


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Returns the elements of the whole parameter that this rank of tp holds; None for one that is not cut over tp."""
    found = placement(parameter)
    return found.cut if "tp" in found.axes else None


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the parameter without a cut over tp."""
    cut = cut_of(parameter)
    return tuple(parameter.shape) if cut is None else cut.shape


def part_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a whole tensor of the parameter."""
    cut = cut_of(parameter)
    return whole if cut is None else cut.of(whole)


def group_of_tp(parameters: Mapping[str, torch.Tensor], data: Communicator | None, what: str) -> Communicator | None:
    """Finds the ranks over which parameters are cut, in the meshes that are open; None if no parameter is.

    data: the ranks that hold the same parameters, by which one of several meshes is chosen; None: not known.
    what: whose parameters they are, for the message.

    Raises ConfigurationError where no mesh, or none of several, is the one.
    """
    meshes = [mesh for mesh in open_meshes() if mesh.size("tp") > 1]
    cut = [name for name, p in parameters.items() if whole_shape(p) != tuple(p.shape)]
    placed = [name for name, p in parameters.items() if "tp" in placement(p).axes]
    if not cut and not (placed and meshes):
        return None
    if len(meshes) > 1:
        meshes = [mesh for mesh in meshes if data is not None and _has(mesh, data)]
    if len(meshes) != 1:
        raise ConfigurationError(
            f"{what}: {(cut or placed)[0]} is cut over tp, and {len(meshes)} open meshes may be the one; needs one "
            "with tp, or an engine that was made with mesh="
        )
    return meshes[0]["tp"]


def _has(mesh: Mesh, data: Communicator) -> bool:
    return data is mesh.along(*DATA) or data is mesh.along("edp")


def refuse_unknown_cuts(parameters: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ConfigurationError for a part of a tensor whose place in the whole one is not declared."""
    if (name := without_cut(parameters.items())) is not None:
        raise ConfigurationError(
            f"{what}: {name} is placed on tp without a cut, so that its parts make no whole tensor; needs "
            "place(..., cut=)"
        )


def join(
    tp: Communicator, values: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Returns the values with those whole whose parameters are cut over tp, on every rank of it. Collective.

    parameters: by the names of the values, and maybe more.
    what: who asks, for messages.

    Raises ConfigurationError on every rank of tp where ranks have values of other names, or a cut is not declared.
    """
    check_everywhere(tp, lambda: refuse_unknown_cuts({name: parameters[name] for name in values}, what))
    everyone = all_gather_object(tp, {name: cut_of(parameters[name]) for name in sorted(values)})
    cut = [[name for name, cut in each.items() if cut is not None] for each in everyone]
    if len({(*each,) for each in everyone}) > 1 or any(names != cut[0] for names in cut):
        raise ConfigurationError(f"{what}: the ranks of tp have or cut different parameters; needs the same on all")
    joined = {name: join_parts(tp, values[name], [each[name] for each in everyone]) for name in cut[0]}
    return {name: joined.get(name, value) for name, value in values.items()}
