"""What all nodes have contributed to a part of a reduction, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..buffers import Buffer
from ..reduction import Reduction


def add(op: Reduction, contributions: Sequence[np.ndarray[Any, Any]], out: Buffer, ranks: int) -> None:
    """out = the complete reduction of at least two contributions, in the order of nodes.

    contributions: partial results in the accumulating dtype, the first of which is overwritten. ranks: of all nodes.
    """
    accumulated, last = contributions[0], len(contributions) - 1
    for number, contribution in enumerate(contributions[1:], 1):
        target = out.flat if number == last and not out.dtype.widened else contributions[0]
        op.pair(accumulated, contribution, target)
        accumulated = target
    op.finish(accumulated, ranks, out)
