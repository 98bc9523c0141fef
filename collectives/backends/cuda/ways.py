"""The choice of a transport for each pair of ranks.

    ipc      both map the other's GPU memory: on one host, with the same GPU or with GPUs that reach each other
    aware    the MPI library takes device addresses
    staged   through host memory: always

A way is not believed but tried, once a group, by a transfer whose result is looked at. `auto` takes for an operation
the first that serves all pairs of the group; or, where ipc serves islands of ranks, such as hosts, ipc inside of each
and another way between them (`levels`). MPIDL_CUDA names one way instead, the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ArgumentError
from .task import Run

WAY = "MPIDL_CUDA"
WAYS = ("ipc", "aware", "staged")


class Way(Protocol):
    """The operations of one group by one way; what GPUs have in place of a `backends.backend.Backend`."""

    def serves(self, operation: str, algorithm: str) -> bool:
        """Returns whether it takes the operation where `algorithm=` is that."""

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Run:
        """The operation, to be run again and again on the same arrays. arguments: as Backend has them. Collective."""

    def close(self) -> None:
        """Gives back what it has, when all operations have been begun. Collective."""


@dataclass(frozen=True)
class Ways:
    """pairs[a][b]: the way between ranks a and b. all: the one that operations of all ranks take.

    island: of so many ranks, one behind the other, each is one of an island that ipc serves; 0 if there are no such.
    """

    pairs: tuple[tuple[str, ...], ...]
    all: str
    island: int = 0


def wanted() -> str:
    """The choice that the environment asks for: "auto" or a way."""
    found = os.environ.get(WAY) or "auto"
    if found not in ("auto", *WAYS):
        raise ArgumentError(f"{WAY}: got {found!r}; needs one of auto, {', '.join(WAYS)}")
    return found


def decide(asked: Sequence[str], works: Sequence[dict[str, Sequence[bool]]]) -> Ways:
    """The ways of a group, from what every rank asks for and has found to work; the same on all ranks.

    works[a][way][b]: whether rank a reaches rank b so.
    """
    ranks = range(len(asked))
    if len(set(asked)) > 1:
        found = ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(asked))
        raise ArgumentError(f"{WAY} differs over the ranks ({found}); needs to be the same on all")
    open_to = WAYS if asked[0] == "auto" else (asked[0],)

    def way(a: int, b: int) -> str | None:
        return next((way for way in open_to if works[a][way][b] and works[b][way][a]), None)

    pairs = [[way(a, b) for b in ranks] for a in ranks]
    for a in ranks:
        for b in ranks:
            if pairs[a][b] is None:
                raise ArgumentError(f"{WAY}={asked[0]}: does not work between ranks {a} and {b}")
    whole = next(way for way in open_to if all(works[a][way][b] for a in ranks for b in ranks))
    return Ways(tuple(tuple(str(way) for way in row) for row in pairs), whole, _island(pairs))


def _island(pairs: Sequence[Sequence[str | None]]) -> int:
    """The number of ranks of each island, if all have as many; 0 unless there are several of several ranks."""
    reached = [{b for b, way in enumerate(row) if way == "ipc"} for row in pairs]
    size = len(reached[0])
    expected = [set(range(a - a % size, a - a % size + size)) if size else set() for a in range(len(pairs))]
    return size if 1 < size < len(pairs) and reached == expected else 0
