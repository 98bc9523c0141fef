"""The contributions to a reduction: where a node's ranks read each other's, and how the nodes' are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.buffers import Buffer
from ...base.reduction import Reduction
from ..meeting import Meeting

Array = np.ndarray[Any, Any]


def others(node: int, nodes: int) -> list[int]:
    """The other nodes, from the next one on, so that not all send to the same one first."""
    return [(node + step) % nodes for step in range(1, nodes)]


def travels_as_it_is(local_ranks: int, op: Reduction) -> bool:
    """Returns whether a node contributes the array of one rank as it is, which its own dtype holds exactly."""
    return local_ranks == 1 and not op.premultiplied


def readable(meeting: Meeting, x: Buffer) -> list[Array] | None:
    """Every local rank's x, if all of them lie where the node's ranks can read them."""
    if not meeting.pull:
        return None
    places = enumerate(meeting.arrays(x, outputs=False))
    return [memory.view(peer, start, x.size, x.dtype.storage) for peer, (memory, start, _) in places]


def add(op: Reduction, contributions: Sequence[Array], out: Buffer, ranks: int) -> None:
    """out = the complete reduction of at least two contributions, in the order of nodes.

    contributions: partial results in the accumulating dtype, the first of which is overwritten.
    ranks: of all nodes.
    """
    accumulated, last = contributions[0], len(contributions) - 1
    for number, contribution in enumerate(contributions[1:], 1):
        target = out.flat if number == last and not out.dtype.widened else contributions[0]
        op.combine_two(accumulated, contribution, target)
        accumulated = target
    op.finish(accumulated, ranks, out)
