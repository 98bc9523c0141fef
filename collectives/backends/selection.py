"""The algorithm that serves an operation: the one that is asked for, if a backend has it, or for "auto" the fastest.

`auto` looks the operation up in a table of its layout (nodes x ranks a node): up to so many bytes this algorithm, up
to so many that one. The table is the one that `python -m collectives.tune` measured and wrote, if it covers the
layout, else the defaults below. The bytes are those of the operation's larger buffer, whose size every rank knows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from mpi4py import MPI

from ..buffers import DType
from ..errors import ArgumentError, ArgumentTypeError
from ..reduction import Reduction
from ..topology import Topology
from .backend import Backend, in_shared_memory

TUNING = "MPIDL_TUNING"
Table = Sequence[tuple[float, str]]  # bytes up to which an algorithm is taken, and its name; ascending
_ALWAYS = float("inf")
_LIBRARY = "mpi"  # where no table says otherwise

# One node. The library's own is some microseconds of Python faster, and copies as often as `symmetric` in movements.
# Arrays in symmetric memory gain from less than other arrays do; a limit lies between what is best for both.
_NODE: dict[str, Table] = {
    "all_reduce": ((128 << 10, "mpi"), (_ALWAYS, "symmetric")),
    "reduce_scatter": ((32 << 10, "mpi"), (_ALWAYS, "symmetric")),
    "all_gather": ((8 << 20, "mpi"), (_ALWAYS, "symmetric")),
    "all_to_all": ((512 << 10, "mpi"), (_ALWAYS, "symmetric")),
    "broadcast": ((4 << 20, "mpi"), (_ALWAYS, "symmetric")),
    "reduce": ((64 << 10, "mpi"), (_ALWAYS, "symmetric")),
    "scatter": ((8 << 20, "mpi"), (_ALWAYS, "symmetric")),
}
# One node of several ranks, by the library and whether they are more than its cores. Ranks with small arrays meet once
# in shared memory, and one that waits lets others run; only a quick library, with a core for each rank, is as fast.
_GATHERED: Table = ((512 << 10, "symmetric"), (8 << 20, "mpi"), (_ALWAYS, "symmetric"))
_REDUCED: Table = ((_ALWAYS, "symmetric"),)
_BROADCAST: Table = ((1 << 20, "symmetric"), (4 << 20, "mpi"), (_ALWAYS, "symmetric"))
_ON_CROWDED_NODE = {"all_reduce": _REDUCED, "reduce_scatter": _REDUCED, "all_gather": _GATHERED}
_OF_LIBRARY: dict[tuple[str, bool], dict[str, Table]] = {
    ("MPICH", False): {
        **_ON_CROWDED_NODE,
        "all_gather": ((8 << 10, "mpi"), *_GATHERED),
        "broadcast": ((8 << 10, "mpi"), *_BROADCAST),
    },
    ("MPICH", True): {
        **_ON_CROWDED_NODE,
        "broadcast": _BROADCAST,
        "all_to_all": ((256 << 10, "symmetric"), (512 << 10, "mpi"), (_ALWAYS, "symmetric")),
    },
    ("Intel MPI", False): {
        "all_reduce": ((8 << 10, "mpi"), (_ALWAYS, "symmetric")),
        "reduce_scatter": ((8 << 10, "mpi"), (_ALWAYS, "symmetric")),
    },
    ("Intel MPI", True): _ON_CROWDED_NODE,
}
# Several nodes on a network that is slower than memory.
_NODES: dict[str, Table] = {
    "all_reduce": ((1 << 20, "mpi"), (_ALWAYS, "hierarchical")),
    "reduce_scatter": ((1 << 20, "mpi"), (_ALWAYS, "hierarchical")),
    "all_gather": ((2 << 20, "mpi"), (_ALWAYS, "hierarchical")),
    "reduce": ((256 << 10, "mpi"), (_ALWAYS, "hierarchical")),
}
# Messages alone. Ring reductions meet MPICH's at about 4 MiB on one node.
_MESSAGES: dict[str, Table] = {
    "all_reduce": ((4 << 20, "mpi"), (_ALWAYS, "ring")),
    "reduce_scatter": ((4 << 20, "mpi"), (_ALWAYS, "ring")),
    "broadcast": ((8 << 20, "mpi"), (_ALWAYS, "double_tree")),
    "reduce": ((1 << 20, "mpi"), (_ALWAYS, "double_tree")),
}


def _defaults(backends: Mapping[str, Backend], place: Topology | None) -> dict[str, Table]:
    """The tables of a group that has measured none."""
    shared = in_shared_memory(backends)
    if shared is None:
        return _MESSAGES
    tables = _NODES
    if shared == "symmetric":
        tables = _NODE
        if place is not None and place.local_size > 1:
            tables = {**_NODE, **_OF_LIBRARY.get((MPI.get_vendor()[0], place.crowded), {})}
    served = {operation: table for operation, table in tables.items() if backends[shared].serves(operation)}
    if len(served) == len(tables):
        return {operation: (*table, (_ALWAYS, _LIBRARY)) for operation, table in served.items()}
    # Nodes of different sizes: the other operations have messages alone.
    return {**_MESSAGES, **{o: (*table, *_MESSAGES.get(o, ())) for o, table in served.items()}}


def tuning_path() -> Path:
    """The path of the file with the measured tables."""
    given = os.environ.get(TUNING)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(given) if given else Path(base) / "mpidl" / "tuning.json"


def read_tables(nodes: int, local_size: int) -> dict[str, Table]:
    """The measured tables of a layout, by operation; empty where there are none."""
    path = tuning_path()
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["tables"].get(f"{nodes}x{local_size}", {})
        return {
            operation: tuple((_ALWAYS if limit is None else float(limit), str(name)) for limit, name in rows)
            for operation, rows in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path} is no table of `python -m collectives.tune`: {error}; make it anew") from error


class Selection:
    """The choices of one group.

    backends: all that it has, in the order of preference where no table knows better. tables: by operation, in place of
    the defaults for the backend that shares memory. place: of this rank.
    """

    def __init__(
        self, backends: Mapping[str, Backend], tables: Mapping[str, Table], place: Topology | None = None
    ) -> None:
        self._backends = backends
        tables = {**_defaults(backends, place), **tables}
        self.choose = lru_cache(maxsize=4096)(partial(_choose, backends, tables))

    def names(self, operation: str) -> list[str]:
        """The values that `algorithm=` may have."""
        return ["auto", *_serving(self._backends, operation)]


def _serving(backends: Mapping[str, Backend], operation: str) -> list[str]:
    return [name for name, backend in backends.items() if backend.serves(operation)]


def _choose(
    backends: Mapping[str, Backend],
    tables: Mapping[str, Table],
    operation: str,
    requested: str,
    dtype: DType,
    nbytes: int,
    op: Reduction | None = None,
    even: bool = True,
) -> str:
    """The algorithm's name: the requested one, or for "auto" the one expected to be fastest.

    even: False where ranks may differ in nbytes (splits of all_to_all). The choice is then that for the most bytes,
    as all ranks must choose the same.

    Raises ArgumentError for a name that the operation does not have here, ArgumentTypeError for one whose backend
    cannot reduce with the operator on the element type.
    """
    serving = _serving(backends, operation)
    if requested == "auto":
        elements = nbytes // dtype.itemsize
        for limit, name in tables.get(operation, ((_ALWAYS, _LIBRARY),)):
            fits = nbytes <= limit if even else limit == _ALWAYS
            if fits and name in serving and backends[name].suits(operation, dtype, elements, op, even):
                return name
        return next(name for name in serving if name != _LIBRARY)
    if requested not in serving:
        raise ArgumentError(f"{operation}: got algorithm {requested!r}; needs one of {', '.join(['auto', *serving])}")
    if op is not None and not backends[requested].reduces(dtype, op):
        others = ["auto", *(name for name in serving if name != requested)]
        raise ArgumentTypeError(
            f"{operation}: got algorithm {requested!r} for op {op.name!r} on {dtype.name}, which "
            f"{backends[requested].title} cannot reduce; needs one of {', '.join(others)}"
        )
    return requested
