"""The algorithm that serves an operation: the one that is asked for, if a backend has it, or for "auto" the fastest.

`auto` looks the operation up in the group's tables (`tables`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

from ..base.buffers import DType
from ..base.reduction import Reduction
from ..errors import ArgumentError, ArgumentTypeError
from .backend import Backend
from .tables import LIBRARY, NO_LIMIT, Table, Tables, served_tables


class Selection:
    """The choices of one group.

    backends: all that it has, in the order of preference where no table knows better.
    measured: tables that replace the defaults, for some operations or all.
    defaults: those of the MPI library; the fallback where they are None.

    tables: by operation; the library's own is the last row of each.
    choose: see `_choose`.
    """

    def __init__(self, backends: Mapping[str, Backend], measured: Tables, defaults: Tables | None = None) -> None:
        self._backends = backends
        found = {**served_tables(backends, defaults), **measured}
        self.tables: dict[str, Table] = {o: (*table, (NO_LIMIT, LIBRARY)) for o, table in found.items()}
        self.choose = lru_cache(maxsize=4096)(partial(_choose, backends, self.tables))

    def names(self, operation: str) -> list[str]:
        """The values that `algorithm=` may have."""
        return ["auto", *_serving(self._backends, operation)]


def _serving(backends: Mapping[str, Backend], operation: str) -> list[str]:
    return [name for name, backend in backends.items() if backend.serves(operation)]


def _choose(
    backends: Mapping[str, Backend],
    tables: Tables,
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
        for limit, name in tables.get(operation, ((NO_LIMIT, LIBRARY),)):
            fits = nbytes <= limit if even else limit == NO_LIMIT
            if fits and name in serving and backends[name].suits(operation, dtype, elements, op, even):
                return name
        others = [name for name in serving if name != LIBRARY]
        suitable = (name for name in others if backends[name].suits(operation, dtype, elements, op, even))
        return next(suitable, others[0])
    if requested not in serving:
        raise ArgumentError(f"{operation}: got algorithm {requested!r}; needs one of {', '.join(['auto', *serving])}")
    if op is not None and not backends[requested].reduces(dtype, op):
        others = ["auto", *(name for name in serving if name != requested)]
        raise ArgumentTypeError(
            f"{operation}: got algorithm {requested!r} for op {op.name!r} on {dtype.name}, which "
            f"{backends[requested].title} cannot reduce; needs one of {', '.join(others)}"
        )
    return requested
