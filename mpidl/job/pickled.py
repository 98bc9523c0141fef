"""Objects of all ranks as pickled bytes, over a Communicator that is given; `objects` is what users call."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives import Communicator

from ..errors import ConfigurationError


def gather_pickled(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective.

    Raises ConfigurationError on every rank if one's value cannot be pickled.
    """
    mine, error = _pickled(value)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(sizes, np.array([-1 if error else mine.size], np.int64))
    _refuse(error, [rank for rank, size in enumerate(sizes.tolist()) if size < 0])
    everything = np.empty(int(sizes.sum()), np.uint8)
    comm.all_gather(everything, mine, sizes.tolist())
    ends = np.cumsum(sizes)
    return [pickle.loads(everything[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def broadcast_pickled(comm: Communicator, value: Any, root: int = 0) -> Any:
    """The root's `value` on every rank; what the others give is ignored. Collective.

    Raises ConfigurationError on every rank if it cannot be pickled.
    """
    data, error = _pickled(value) if comm.rank == root else (np.empty(0, np.uint8), None)
    size = np.array([-1 if error else data.size], np.int64)
    comm.broadcast(size, root)
    _refuse(error, [root] if size[0] < 0 else [])
    if comm.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    comm.broadcast(data, root)
    return value if comm.rank == root else pickle.loads(data.tobytes())


def _pickled(value: Any) -> tuple[np.ndarray[Any, Any], Exception | None]:
    try:
        return np.frombuffer(pickle.dumps(value), np.uint8), None
    except Exception as error:  # pickling runs methods of any class
        return np.empty(0, np.uint8), error


def _refuse(error: Exception | None, ranks: list[int]) -> None:
    if ranks:
        where = ", ".join(map(str, ranks))
        why = f": {error}" if error is not None else ""
        raise ConfigurationError(f"objects: the value of rank {where} cannot be pickled{why}") from error
