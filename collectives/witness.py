"""Shows whoever started the job who its ranks are and where they are, for when none of them is left to say it.

A rank that is killed takes the others with it within milliseconds, as the launcher ends them, and what they were in is
on a page of memory that goes with the last of them. So the first rank of each group on a node sends the page's
descriptor to the process that waits for the job's end, if that is on this node: it has the page from there on, no name
or file is left behind, and nothing is added to an operation.

    first rank of a node -- descriptor, ranks --> socket of the job's name -- `Witness.look` --> who started the job

In the same way it tells which process is which rank, as launchers may know a rank by its process alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpi4py import MPI

from .positions import Position, Positions
from .symmetric.shared_memory import JOB, SharedMemory

_PATIENCE = 1.0  # seconds for the other side to take what is queued
_KEPT = 256  # pages; each is a descriptor and some kilobytes
_LONGEST = 1 << 20  # bytes of a message
_AT_ONCE = 1000  # ranks in a message; the system takes some hundred kilobytes in one


def witnessed() -> bool:
    """Whether somebody has started this job who wants to see it."""
    return bool(os.environ.get(JOB)) and _has_sockets()


def show(memory: SharedMemory, comm: MPI.Intracomm, members: Sequence[int]) -> None:
    """Sends the page of a group. Only where `witnessed`.

    memory: begins with the positions of members, the group's ranks on this node; has its `file`.
    """
    _send({"members": list(members), "world": _world_ranks(comm)}, [memory.file])


def tell(processes: Sequence[tuple[str, int]]) -> None:
    """Sends every rank's node and process number, in the order of ranks. Only where `witnessed`; one of a node does."""
    for first in range(0, len(processes), _AT_ONCE):
        _send({"first": first, "processes": processes[first : first + _AT_ONCE]})


def _send(message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:  # it is elsewhere
        out.settimeout(_PATIENCE)
        out.connect(_address(os.environ[JOB]))
        socket.send_fds(out, [json.dumps(message).encode()], files)


@dataclass(frozen=True)
class _Page:
    """members: the group's ranks that it is of. world: the number in the world of each rank of the group."""

    members: list[int]
    world: list[int]
    file: int

    def positions(self) -> dict[int, Position]:
        """By numbers in the world, also of peers."""
        found = Positions.decode(os.pread(self.file, Positions.nbytes_seen(len(self.members)), 0))
        return {
            self.world[member]: replace(there, peer=self.world[there.peer]) if there.message else there
            for member, there in zip(self.members, found, strict=True)
        }


class Witness:
    """The other side: keeps the pages of one job, by its token. To `look` now and then, and once after its end.

    processes: node and process number of each rank, as far as they have been told; kept.
    """

    def __init__(self, token: str) -> None:
        self.processes: dict[int, tuple[str, int]] = {}
        self._pages: list[_Page] = []
        self._socket: socket.socket | None = None
        if _has_sockets():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(_address(token))
            self._socket.setblocking(False)

    def look(self) -> None:
        """Takes what has been sent."""
        while self._socket is not None:
            try:
                message, files, _, _ = socket.recv_fds(self._socket, _LONGEST, 1)
            except OSError:
                return
            told = json.loads(message)
            for rank, (node, process) in enumerate(told.get("processes", ()), told.get("first", 0)):
                self.processes[rank] = node, process
            self._pages += [_Page(**told, file=file) for file in files]
            if len(self._pages) > _KEPT:
                os.close(self._pages.pop(1).file)  # the first is of the world

    def groups(self) -> list[dict[int, Position]]:
        """Where the ranks of this node are, or were at their end: of each group, by their numbers in the world."""
        return [page.positions() for page in self._pages]

    def close(self) -> None:
        """Lets go of all."""
        if self._socket is not None:
            self._socket.close()
        for page in self._pages:
            os.close(page.file)
        self._pages.clear()


def _world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The number in MPI.COMM_WORLD of each of a group's ranks."""
    ours, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return list(MPI.Group.Translate_ranks(ours, range(ours.size), world))
    finally:
        ours.Free()
        world.Free()


def _has_sockets() -> bool:
    """Whether the system has sockets without a name in the file system."""
    return sys.platform == "linux"


def _address(token: str) -> str:
    return f"\0mpidl-{token}"
