"""Objects of all ranks as pickled bytes, over a Communicator that is given; `objects` is what users call."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives import Communicator


def gather_pickled(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective."""
    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(sizes, np.array([mine.size], np.int64))
    everything = np.empty(int(sizes.sum()), np.uint8)
    comm.all_gather(everything, mine, sizes.tolist())
    ends = np.cumsum(sizes)
    return [pickle.loads(everything[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def broadcast_pickled(comm: Communicator, value: Any, root: int = 0) -> Any:
    """The root's `value` on every rank; what the others give is ignored. Collective."""
    data = np.frombuffer(pickle.dumps(value), np.uint8) if comm.rank == root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    comm.broadcast(size, root)
    if comm.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    comm.broadcast(data, root)
    return value if comm.rank == root else pickle.loads(data.tobytes())
