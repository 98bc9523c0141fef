"""Draws a mesh: each node's ranks with their coordinates, and which axes cross nodes.

mesh      pp=1, dp=2, cp=1, tp=2 on 4 ranks; rank (dp, tp):
node1     0 (0, 0)  1 (0, 1)
node2     2 (1, 0)  3 (1, 1)
dp        2 ranks each, across nodes: 0 2, 1 3
tp        2 ranks each, inside nodes: 0 1, 2 3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..mesh import AXES, Layout
from .advice import Finding

_GROUPS = 8  # listed of an axis


def sizes(text: str) -> dict[str, int]:
    """An argparse type: sizes of axes, as in "dp=2,tp=2"."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in (*AXES, "ep") or axis in found:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs sizes of {', '.join((*AXES, 'ep'))}, as in dp=2,tp=2"
            )
        try:
            found[axis] = int(size)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {part!r}; needs an integer for {axis}") from None
    return found


def picture(layout: Layout, hosts: Sequence[str]) -> list[str]:
    """The lines above. hosts: the name of each rank's node."""
    axes = [axis for axis in layout.shown_axes if layout.sizes[axis] > 1]
    shown = ", ".join(f"{axis}={layout.sizes[axis]}" for axis in layout.shown_axes)
    of_rank = f"; rank ({', '.join(axes)}):" if axes else ""
    text = [f"mesh      {shown} on {len(hosts)} rank{'s' * (len(hosts) != 1)}{of_rank}"]
    for node in dict.fromkeys(layout.nodes):
        ranks = [rank for rank, other in enumerate(layout.nodes) if other == node]
        places = (", ".join(str(layout.coordinates(rank)[axis]) for axis in axes) for rank in ranks)
        placed = [f"{rank} ({place})" if axes else str(rank) for rank, place in zip(ranks, places, strict=True)]
        text.append(f"{hosts[ranks[0]]:9} {'  '.join(placed)}")
    for axis in axes:
        groups, crossing = layout.groups(axis), len(layout.across_nodes(axis))
        where = (
            "across nodes" if crossing == len(groups) else f"{crossing} across nodes" if crossing else "inside nodes"
        )
        listed = ", ".join(" ".join(map(str, group)) for group in groups[:_GROUPS])
        more = f" and {len(groups) - _GROUPS} more" if len(groups) > _GROUPS else ""
        text.append(f"{axis:9} {layout.size(axis)} ranks each, {where}: {listed}{more}")
    return text


def findings(layout: Layout) -> list[Finding]:
    """A remark where tp groups cross nodes."""
    slow = layout.slow_tp()
    return [] if slow is None else [Finding(False, *slow)]
