"""Coordinates of ranks on named axes: sizes and nodes in, groups of ranks out, without MPI.

    AXES, outermost first   pp  dp     cp  tp     each rank has one coordinate on each; their product is the world
    EXPERT_AXES             pp  edp    ep  tp     the same ranks as experts see them: edp * ep = dp * cp

    4 ranks, dp=2, tp=2     dp=0  dp=1            dp groups: 0 2, 1 3      tp groups: 0 1, 2 3
                     tp=0    0     2
                     tp=1    1     3

Order: the axis that communicates most is innermost, so that its groups lie inside a node: tp in every layer, cp in
every attention, dp once a step, pp only between two stages.

ep is no further factor of the world: an expert-parallel group is a run of ep ranks of dp x cp, which hold different
tokens. edp ("expert data parallel") counts the ranks that hold the same experts, over which their gradients are
reduced. Experts are cut over tp as other layers are.

Ranks are taken node by node, the last axis fastest. Where groups do not fill nodes evenly, as with tp=2 on nodes of
three ranks, as many as fit are formed inside nodes, then others across nodes, of the ranks that remain. A single axis,
which no shorter ep divides, keeps the order of the world.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UsageError

AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "tp")
MODEL_AXES = ("pp", "tp", "ep")  # along which ranks may hold different parameters


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the rank at each point. `Layout.of` checks and places.

    ranks: the rank at each point of AXES, in C order.
    nodes: a number for each rank, equal for ranks of one node.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[int], dp: int = -1, pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1) -> Layout:
        """Places `len(nodes)` ranks on axes of these sizes, one of which may be -1: what the others leave.

        nodes: the node of each rank.

        Raises UsageError for sizes that do not fit.
        """
        sizes = _completed({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}, len(nodes))
        cp, ep = sizes["cp"], sizes["ep"]
        in_cp = ep if cp % ep == 0 else cp  # the part of cp that is in ep, or all
        in_dp = ep // cp if ep % cp == 0 else 1  # the part of dp that is in ep
        factors = (sizes["tp"], in_cp, cp // in_cp, in_dp, sizes["dp"] // in_dp, sizes["pp"])
        single = sum(factor > 1 for factor in factors) <= 1
        return cls(**sizes, ranks=tuple(range(len(nodes))) if single else _placed(nodes, factors), nodes=tuple(nodes))

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.dp * self.cp // self.ep

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, those of experts at the end."""
        return {axis: getattr(self, axis) for axis in (*AXES, "edp", "ep")}

    @property
    def shown_axes(self) -> tuple[str, ...]:
        """The axes that texts name: AXES, and those of experts where there are any."""
        return tuple(axis for axis in self.sizes if axis in AXES or self.ep > 1)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes of MODEL_AXES that are longer than 1."""
        return tuple(axis for axis in MODEL_AXES if getattr(self, axis) > 1)

    def size(self, *axes: str) -> int:
        """Number of ranks of a group along these axes."""
        return math.prod(getattr(self, axis) for axis in self.in_order(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on every axis."""
        return {axis: int(values[rank]) for axis, values in self._coordinates.items()}

    def rank_along(self, rank: int, *axes: str) -> int:
        """The rank's number in its group along these axes."""
        found = 0
        for axis in self.in_order(axes):
            found = found * self.size(axis) + int(self._coordinates[axis][rank])
        return found

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in their coordinates on these axes alone, each in the order of AXES."""
        axes = self.in_order(axes)
        frame = _frame(axes)
        grid = np.array(self.ranks).reshape([self.size(axis) for axis in frame])
        last = [frame.index(axis) for axis in axes]
        rows = np.moveaxis(grid, last, range(-len(last), 0)).reshape(-1, self.size(*axes))
        return [tuple(row) for row in rows.tolist()]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group along these axes to which the rank belongs."""
        return next(group for group in self.groups(*axes) if rank in group)

    def across_nodes(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups along these axes whose ranks are on several nodes."""
        return [group for group in self.groups(*axes) if len({self.nodes[rank] for rank in group}) > 1]

    def slow_tp(self) -> tuple[str, str] | None:
        """Explains which tp groups lie across nodes, and the remedy; None if all lie inside nodes."""
        crossing = self.across_nodes("tp")
        if not crossing:
            return None
        return (
            f"{len(crossing)} of {len(self.groups('tp'))} tp groups cross nodes, the first of ranks "
            f"{', '.join(map(str, crossing[0]))}; tensor parallelism communicates in every layer",
            f"start as many ranks on each node as tp={self.tp} divides, or choose a smaller tp",
        )

    def in_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes, outermost first. Raises UsageError for unknown names, and for products that mean nothing."""
        for axis in axes:
            if axis not in (*AXES, *EXPERT_AXES):
                raise UsageError(f"Mesh: got axis {axis!r}; needs one of {', '.join((*AXES, 'ep', 'edp'))}")
        frame = _frame(axes)
        if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(frame):
            raise UsageError(
                f"Mesh: got axes {', '.join(axes) or '(none)'}; needs different ones of {', '.join(AXES)}, or of "
                f"{', '.join(EXPERT_AXES)}: ep and edp are parts of dp x cp"
            )
        return tuple(axis for axis in frame if axis in axes)

    @cached_property
    def _coordinates(self) -> dict[str, Any]:
        """Computes the coordinates of all ranks on every axis, by rank."""
        found: dict[str, Any] = {}
        places = np.empty(len(self.ranks), np.int64)
        places[list(self.ranks)] = np.arange(len(self.ranks))
        for frame in (AXES, EXPERT_AXES):
            unravelled = np.unravel_index(places, [getattr(self, axis) for axis in frame])
            found |= dict(zip(frame, unravelled, strict=True))
        return {axis: found[axis] for axis in self.sizes}


def _frame(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the list of axes to which these belong."""
    return EXPERT_AXES if {"ep", "edp"} & set(axes) else AXES


def _completed(given: dict[str, Any], world: int) -> dict[str, int]:
    """Replaces the -1 among the sizes. Raises UsageError."""
    sizes = {axis: _size(axis, value) for axis, value in given.items()}
    text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UsageError(f"Mesh: got {text}; needs -1 on one axis at most, and dp is -1 unless it is given")
    known = math.prod(sizes[axis] for axis in AXES if sizes[axis] > 0)
    fills = bool(set(open_axes) & set(AXES))
    if world % known or (known != world and not fills):
        needed = f"the others to divide {world}" if fills else f"pp * dp * cp * tp = {world}"
        raise UsageError(f"Mesh: got {text} on {world} ranks; needs {needed}")
    for axis in open_axes:
        sizes[axis] = sizes["dp"] * sizes["cp"] if axis == "ep" else world // known
    if sizes["dp"] * sizes["cp"] % sizes["ep"]:
        raise UsageError(
            f"Mesh: got {text} on {world} ranks; needs an ep that divides dp * cp = {sizes['dp'] * sizes['cp']}"
        )
    return sizes


def _size(axis: str, value: Any) -> int:
    try:
        size = -2 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = -2
    if size < 1 and size != -1:
        raise UsageError(f"Mesh: got {axis}={value!r}; needs an integer of at least 1, or -1 for what is left")
    return size


def _placed(nodes: Sequence[int], factors: Sequence[int]) -> tuple[int, ...]:
    """Orders all ranks so that runs of factors[0], of factors[0] * factors[1], ... cross few nodes.

    A block is a run of ranks with its node, None if it crosses nodes. Each round joins `factor` blocks to a larger one.
    """
    first_of_node = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    by_node = sorted(range(len(nodes)), key=lambda rank: (first_of_node[nodes[rank]], rank))
    place = {rank: number for number, rank in enumerate(by_node)}
    blocks: list[tuple[tuple[int, ...], int | None]] = [((rank,), nodes[rank]) for rank in by_node]
    for factor in factors:
        joined: list[tuple[list[tuple[tuple[int, ...], int | None]], int | None]] = []
        left = [block for block in blocks if block[1] is None]
        for node in first_of_node:
            inside = [block for block in blocks if block[1] == node]
            whole = len(inside) - len(inside) % factor
            joined += [(inside[i : i + factor], node) for i in range(0, whole, factor)]
            left += inside[whole:]
        left.sort(key=lambda block: place[block[0][0]])
        joined += [(left[i : i + factor], None) for i in range(0, len(left), factor)]
        blocks = sorted(
            ((tuple(rank for block in run for rank in block[0]), node) for run, node in joined),
            key=lambda block: place[block[0][0]],
        )
    return tuple(rank for block in blocks for rank in block[0])
