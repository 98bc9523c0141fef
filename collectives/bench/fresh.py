"""Speeds of copies between the cores of a node, which decide how arrays that were just written reach other ranks.

A core that has just written memory has it in its cache alone. Another core that reads it takes it from there, and one
that writes it takes it away first. Both cost more than a copy inside a core's own cache.
"""

from __future__ import annotations

import time

import numpy as np

from ..communicator import Communicator

_BYTES = 256 << 10  # fits a core's own cache
_ROUNDS = 41


def measure_core_to_core_copies(comm: Communicator) -> tuple[float, float, float]:
    """Measures copies of 256 KiB by all ranks at once, in 10^9 bytes a second. Collective; of several ranks a node.

    Returns those inside a core's own cache, of what the next local rank has written, and onto what the local rank
    before has read.
    """
    size = _BYTES // 4
    whole = comm.shared(size * comm.local_size, np.float32)
    given, taken = (whole[size * rank :][:size] for rank in (comm.local_rank, (comm.local_rank + 1) % comm.local_size))
    own, seconds = np.ones(size, np.float32), np.zeros((_ROUNDS, 3))
    for row in seconds:
        for column, (target, source) in ((2, (given, own)), (1, (own, taken)), (0, (own, taken))):
            if column:
                comm.barrier()
            begin = time.perf_counter()
            np.copyto(target, source)
            row[column] = time.perf_counter() - begin
    inside, read, written = (_BYTES / np.median(seconds[1:], axis=0) / 1e9).tolist()
    return inside, read, written
