"""The choice of a transport for each pair of ranks.

    ipc      both map the other's GPU memory: on one host, with the same GPU or with GPUs that reach each other
    aware    the MPI library takes device addresses
    staged   through host memory: always

`ipc` and `aware` are tried once a group, by a transfer whose result is checked. `auto` takes for an operation the first
that serves all pairs of the group; or, where ipc serves islands of ranks, such as hosts, ipc inside of each and
another transport between them (`levels`). MPIDL_CUDA names one transport instead, the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ArgumentError
from .task import Enqueue

VARIABLE = "MPIDL_CUDA"
TRANSPORTS = ("ipc", "aware", "staged")


class Transport(Protocol):
    """The operations of one group by one transport; what GPUs have in place of a `backends.backend.Backend`."""

    def serves(self, operation: str, algorithm: str) -> bool:
        """Returns whether it takes the operation where `algorithm=` is that."""

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """The operation, to be run again and again on the same arrays. arguments: as Backend has them. Collective."""

    def close(self) -> None:
        """Gives back what it has, when all operations have been begun. Collective."""


@dataclass(frozen=True)
class Transports:
    """pairs[a][b]: the transport between ranks a and b. common: the one that operations of all ranks take.

    island: number of consecutive ranks that ipc connects; 0 if there are no islands.
    """

    pairs: tuple[tuple[str, ...], ...]
    common: str
    island: int = 0


def requested() -> str:
    """The choice that the environment asks for: "auto" or a transport."""
    found = os.environ.get(VARIABLE) or "auto"
    if found not in ("auto", *TRANSPORTS):
        raise ArgumentError(f"{VARIABLE}: got {found!r}; needs one of auto, {', '.join(TRANSPORTS)}")
    return found


def decide(asked: Sequence[str], works: Sequence[dict[str, Sequence[bool]]]) -> Transports:
    """The transports of a group, from what every rank asks for and has found to work; the same on all ranks.

    works[a][transport][b]: whether rank a reaches rank b so.
    """
    ranks = range(len(asked))
    if len(set(asked)) > 1:
        found = ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(asked))
        raise ArgumentError(f"{VARIABLE} differs over the ranks ({found}); needs to be the same on all")
    open_to = TRANSPORTS if asked[0] == "auto" else (asked[0],)

    def transport(a: int, b: int) -> str | None:
        return next((transport for transport in open_to if works[a][transport][b] and works[b][transport][a]), None)

    pairs = [[transport(a, b) for b in ranks] for a in ranks]
    for a in ranks:
        for b in ranks:
            if pairs[a][b] is None:
                raise ArgumentError(f"{VARIABLE}={asked[0]}: does not work between ranks {a} and {b}")
    whole = next(transport for transport in open_to if all(works[a][transport][b] for a in ranks for b in ranks))
    return Transports(tuple(tuple(str(transport) for transport in row) for row in pairs), whole, _island(pairs))


def _island(pairs: Sequence[Sequence[str | None]]) -> int:
    """The number of ranks of each island, if all have as many; 0 unless there are several of several ranks."""
    reached = [{b for b, transport in enumerate(row) if transport == "ipc"} for row in pairs]
    size = len(reached[0])
    expected = [set(range(a - a % size, a - a % size + size)) if size else set() for a in range(len(pairs))]
    return size if 1 < size < len(pairs) and reached == expected else 0
