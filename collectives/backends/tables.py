"""The tables by which `auto` chooses an algorithm: up to so many bytes this one, up to so many that one.

A group takes, for each operation, the first of these that covers its MPI library and its layout (nodes x ranks a node,
or the ranks of each node, "3+1", where these differ):

    tuned        the file that `python -m collectives.tune` wrote
    default      what was measured for this MPI library, on one node
    calibrated   where neither covers the group: the file of an earlier calibration, else the group calibrates now
    fallback     for any library, by the memory that the ranks share; what is left where calibration is turned off

The bytes are those of the operation's larger buffer, whose size every rank knows.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..base.reduction import OPERATIONS as REDUCTIONS
from ..errors import ArgumentError
from ..native import is_compiled
from .backend import Backend, in_shared_memory

TUNING = "MPIDL_TUNING"
Table = Sequence[tuple[float, str]]  # bytes up to which an algorithm is taken, and its name; ascending
Tables = Mapping[str, Table]  # by operation
NO_LIMIT = float("inf")
LIBRARY = "mpi"  # where no table says otherwise


def _up_to(limit: int) -> Table:
    """The library's own up to so many bytes, and above that shared memory."""
    return ((limit, LIBRARY), (NO_LIMIT, "symmetric"))


def _between(first: int, last: float) -> Table:
    """Shared memory, but the library's own for private arrays above the first number of bytes, up to the last."""
    return ((first, "symmetric"), (last, "symmetric_or_mpi"), (NO_LIMIT, "symmetric"))


# One node. The library's own is some microseconds of Python faster where there is no part in C, and copies as often as
# `symmetric` in movements.
# Arrays in symmetric memory gain from less than other arrays do; a limit lies between what is best for both.
_NODE: Tables = {
    "all_reduce": _up_to(128 << 10),
    "reduce_scatter": _up_to(32 << 10),
    "all_gather": _up_to(8 << 20),
    "all_to_all": _up_to(512 << 10),
    "broadcast": _up_to(4 << 20),
    "reduce": _up_to(64 << 10),
    "scan": _up_to(64 << 10),
    "exscan": _up_to(64 << 10),
    "scatter": _up_to(8 << 20),
}
# Several nodes on a network that is slower than memory.
_NODES: Tables = {
    "all_reduce": ((1 << 20, "mpi"), (NO_LIMIT, "hierarchical")),
    "reduce_scatter": ((1 << 20, "mpi"), (NO_LIMIT, "hierarchical")),
    "all_gather": ((2 << 20, "mpi"), (NO_LIMIT, "hierarchical")),
    "reduce": ((256 << 10, "mpi"), (NO_LIMIT, "hierarchical")),
}
# Messages alone. Ring reductions meet MPICH's at about 4 MiB on one node.
_MESSAGES: Tables = {
    "all_reduce": ((4 << 20, "mpi"), (NO_LIMIT, "ring")),
    "reduce_scatter": ((4 << 20, "mpi"), (NO_LIMIT, "ring")),
    "broadcast": ((8 << 20, "mpi"), (NO_LIMIT, "double_tree")),
    "reduce": ((1 << 20, "mpi"), (NO_LIMIT, "double_tree")),
}
# One node: ranks meet in memory as fast as they send a message, and there is one copy less.
_REDUCED_IN_MEMORY: Tables = dict.fromkeys(REDUCTIONS, ((NO_LIMIT, "symmetric"),))
# By the library, and whether the ranks are more than the cores; measured with the part in C on private arrays, warm and
# cold, as symmetric ones take one copy in any case.
DEFAULTS: Mapping[tuple[str, bool], Tables] = {
    ("MPICH 5", False): {
        **_REDUCED_IN_MEMORY,
        "all_gather": ((NO_LIMIT, "symmetric"),),
        "all_to_all": _between(128 << 10, 2 << 20),
        "broadcast": _between(64 << 10, 2 << 20),
        "gather": _between(32 << 10, 256 << 10),
        "scatter": _between(128 << 10, 2 << 20),
    },
    ("MPICH 5", True): {
        **_REDUCED_IN_MEMORY,
        "all_gather": _between(512 << 10, 8 << 20),
        "all_to_all": _between(512 << 10, 8 << 20),
        "broadcast": _between(1 << 20, 4 << 20),
        "gather": ((NO_LIMIT, "symmetric"),),
        "scatter": ((NO_LIMIT, "symmetric"),),
    },
    ("Open MPI 5", False): {
        **_REDUCED_IN_MEMORY,
        "all_gather": _between(64 << 10, 2 << 20),
        "all_to_all": _between(64 << 10, 2 << 20),
        "broadcast": _between(64 << 10, 2 << 20),
        "gather": _between(32 << 10, 256 << 10),
        "scatter": _between(64 << 10, 2 << 20),
    },
    ("Open MPI 5", True): {
        **_REDUCED_IN_MEMORY,
        "all_gather": ((NO_LIMIT, "symmetric"),),
        "all_to_all": _between(512 << 10, NO_LIMIT),
        "broadcast": ((NO_LIMIT, "symmetric"),),
        "gather": _between(1 << 20, 2 << 20),
        "scatter": ((NO_LIMIT, "symmetric"),),
    },
    ("Intel MPI 2021", False): {
        **_REDUCED_IN_MEMORY,
        "all_gather": _between(64 << 10, NO_LIMIT),
        "all_to_all": _between(32 << 10, NO_LIMIT),
        "broadcast": _between(16 << 10, NO_LIMIT),
        "gather": _between(16 << 10, 2 << 20),
        "scatter": _between(64 << 10, 2 << 20),
    },
    ("Intel MPI 2021", True): {
        **_REDUCED_IN_MEMORY,
        "reduce_scatter": _between(512 << 10, 2 << 20),
        "all_gather": _between(512 << 10, NO_LIMIT),
        "all_to_all": _between(512 << 10, NO_LIMIT),
        "broadcast": _between(2 << 20, NO_LIMIT),
        "gather": _between(512 << 10, NO_LIMIT),
        "scatter": _between(512 << 10, 8 << 20),
    },
}
_MEASURED_RANKS = 4  # up to which the defaults hold


@cache
def library() -> str:
    """The MPI library and its major version, by which tables are kept, such as "MPICH 5"."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {version[0]}"


def default_tables(mpi: str, nodes: int, local_size: int, oversubscribed: bool) -> Tables | None:
    """The default tables of a library for a layout; None where none was measured, as without the part in C.

    oversubscribed: whether the ranks of a node are more than its cores.
    """
    is_measured = is_compiled() and nodes == 1 and 1 < local_size <= _MEASURED_RANKS
    return DEFAULTS.get((mpi, oversubscribed)) if is_measured else None


def served_tables(backends: Mapping[str, Backend], defaults: Tables | None) -> dict[str, Table]:
    """The tables of a group that has measured none: the defaults, or the fallback where they are None."""
    shared = in_shared_memory(backends)
    if shared is None:
        return dict(_MESSAGES)
    fallback = _NODE if shared == "symmetric" else _NODES
    tables = fallback if defaults is None else defaults
    served = {operation: table for operation, table in tables.items() if backends[shared].serves(operation)}
    if len(served) == len(tables):
        return served
    # Nodes of different sizes: the other operations have messages alone.
    return {**_MESSAGES, **{o: (*table, *_MESSAGES.get(o, ())) for o, table in served.items()}}


# ---- files ---------------------------------------------------------------------------------------------------------


def user_folder(variable: str, name: str) -> Path:
    """The folder that the environment's variable names, else the one of that name in the home directory.

    A user who has no home directory, as in some containers, has it in the temporary directory, in a folder that is
    the user's own, or else in a new one.
    """
    given = os.environ.get(variable)
    if given:
        return Path(given)
    try:
        return Path.home() / name
    except RuntimeError:
        own = Path(tempfile.gettempdir()) / f"mpidl-{os.getuid()}"
    if own.exists() and own.stat().st_uid != os.getuid():  # another user's tables are not to be read
        own = Path(tempfile.mkdtemp(prefix="mpidl-"))
    return own / name


def tuning_path() -> Path:
    """The path of the file that the tuner writes."""
    given = os.environ.get(TUNING)
    return Path(given) if given else user_folder("XDG_CONFIG_HOME", ".config") / "mpidl" / "tuning.json"


def read_tables(path: Path, machine: str, layout: str) -> dict[str, Table]:
    """The tables of a file, by operation; empty where there are none.

    machine: what they hold for, such as the MPI library. Raises ArgumentError for a file that holds something else or
    cannot be read.
    """
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_text())["tables"].get(machine, {}).get(layout, {})
        return {
            operation: tuple((NO_LIMIT if limit is None else float(limit), str(name)) for limit, name in rows)
            for operation, rows in found.items()
        }
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{path} is no table of `python -m collectives.tune`: {error}; make it anew") from error


def write_tables(path: Path, machine: str, layout: str, tables: Tables) -> None:
    """Puts tables into the file, which is replaced as a whole; what it holds for other places and layouts stays."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    rows = {o: [(None if limit == NO_LIMIT else limit, name) for limit, name in table] for o, table in tables.items()}
    content.setdefault("tables", {}).setdefault(machine, {}).setdefault(layout, {}).update(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
