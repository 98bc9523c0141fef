"""Which algorithm serves an operation.

`auto` looks the operation up in a table of its layout (nodes x ranks a node): up to so many bytes this algorithm, up
to so many that one. The table is the one that `python -m collectives.tune` measured and wrote, if it covers the
layout, else the defaults below. The bytes are those of the operation's larger buffer, which every rank knows alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..algorithms import ALGORITHMS, EVEN_ONLY
from ..buffers import DType
from ..errors import ArgumentError, ArgumentTypeError
from ..reduction import Reduction
from . import mpi

TUNING = "MPIDL_TUNING"
COMPOSED = {
    "symmetric": frozenset(ALGORITHMS),
    "hierarchical": frozenset({"all_reduce", "reduce_scatter", "all_gather", "broadcast"}),
}
_MPI_COUNTS = 2**31 - 1  # elements; not every MPI counts further

Table = Sequence[tuple[float, str]]  # bytes up to which an algorithm is taken, and its name; ascending
_ALWAYS = float("inf")

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
# Several nodes, as many ranks on each, on a network that is slower than memory.
_NODES: dict[str, Table] = {
    "all_reduce": ((1 << 20, "mpi"), (_ALWAYS, "hierarchical")),
    "reduce_scatter": ((1 << 20, "mpi"), (_ALWAYS, "hierarchical")),
    "all_gather": ((2 << 20, "mpi"), (_ALWAYS, "hierarchical")),
}
# Messages alone. Ring reductions meet MPICH's at about 4 MiB on one node.
_MESSAGES: dict[str, Table] = {
    "all_reduce": ((4 << 20, "mpi"), (_ALWAYS, "ring")),
    "reduce_scatter": ((4 << 20, "mpi"), (_ALWAYS, "ring")),
    "broadcast": ((8 << 20, "mpi"), (_ALWAYS, "double_tree")),
    "reduce": ((1 << 20, "mpi"), (_ALWAYS, "double_tree")),
}
_DEFAULTS: dict[str | None, dict[str, Table]] = {"symmetric": _NODE, "hierarchical": _NODES, None: _MESSAGES}


def tuning_path() -> Path:
    """Where the measured tables are read from and written to."""
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
    """The choices of one group. composed: "symmetric", "hierarchical", or None where messages are all there is."""

    def __init__(self, composed: str | None, tables: Mapping[str, Table]) -> None:
        self._composed = composed
        self._tables = {**_DEFAULTS[composed], **tables}
        self.choose = lru_cache(maxsize=4096)(self._choose)

    def names(self, operation: str) -> list[str]:
        """What `algorithm=` may be."""
        own = [self._composed] if self._composed and operation in COMPOSED[self._composed] else []
        return ["auto", "mpi", *own, *ALGORITHMS[operation]]

    def _choose(
        self,
        operation: str,
        requested: str,
        dtype: DType,
        nbytes: int,
        op: Reduction | None = None,
        even: bool = True,
    ) -> str:
        """The algorithm's name: the requested one, or for "auto" the one expected to be fastest.

        even: False where ranks may differ in nbytes (splits of all_to_all). The choice is then that for the most bytes,
        as all ranks must choose alike.

        Raises ArgumentError for a name that the operation does not have here, ArgumentTypeError for "mpi" on what
        MPI cannot reduce.
        """
        names = self.names(operation)
        reduces = mpi.reduces(dtype, op) or op is None
        if requested == "auto":
            usable = reduces and not mpi.is_float_extremum(dtype, op)
            usable = usable and (not even or nbytes // dtype.itemsize <= _MPI_COUNTS)
            for limit, name in self._tables.get(operation, ((_ALWAYS, "mpi"),)):
                if not even and (limit < _ALWAYS or (operation, name) in EVEN_ONLY):
                    continue
                if nbytes <= limit and name in names and (name != "mpi" or usable):
                    return name
            return next(name for name in names if name not in ("auto", "mpi"))
        if requested == "mpi" and not reduces:
            what = f"op {op.name!r} on {dtype.name}" if op else dtype.name
            raise ArgumentTypeError(
                f"{operation}: got algorithm 'mpi' for {what}, which MPI cannot reduce; needs one of "
                f"{', '.join(n for n in names if n != 'mpi')}"
            )
        if requested not in names:
            raise ArgumentError(f"{operation}: got algorithm {requested!r}; needs one of {', '.join(names)}")
        return requested
