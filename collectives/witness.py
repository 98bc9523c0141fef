"""Shows whoever started the job where its ranks are, for when none of them is left to say it.

A rank that is killed takes the others with it within milliseconds, as the launcher ends them, and what they were in is
on a page of memory that goes with the last of them. So the first rank of each group on a node sends the page's
descriptor to the process that waits for the job's end, if that is on this node: it has the page from there on, no name
or file is left behind, and nothing is added to an operation.

    first rank of a node -- descriptor, ranks --> socket of the job's name -- `Witness.look` --> who started the job
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpi4py import MPI

from .positions import Position, Positions
from .symmetric.shared_memory import JOB, SharedMemory

_PATIENCE = 1.0  # seconds for the other side to take what is queued
_KEPT = 256  # pages; each is a descriptor and some kilobytes
_LONGEST = 1 << 20  # bytes of a message


def witnessed() -> bool:
    """Whether somebody has started this job who wants to see it."""
    return bool(os.environ.get(JOB)) and _has_sockets()


def show(memory: SharedMemory, comm: MPI.Intracomm, members: Sequence[int]) -> None:
    """Sends the page of a group. Only where `witnessed`.

    memory: begins with the positions of members, the group's ranks on this node; has its `file`.
    """
    message = json.dumps({"members": list(members), "world": _world_ranks(comm)}).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:  # it is elsewhere
        out.settimeout(_PATIENCE)
        out.connect(_address(os.environ[JOB]))
        socket.send_fds(out, [message], [memory.file])


@dataclass(frozen=True)
class _Page:
    """members: the group's ranks that it is of. world: the number in the world of each rank of the group."""

    members: list[int]
    world: list[int]
    file: int

    def positions(self) -> dict[int, Position]:
        """By numbers in the world, also of peers."""
        found = Positions.decode(os.pread(self.file, Positions.nbytes(len(self.members)), 0))
        return {
            self.world[member]: replace(there, peer=self.world[there.peer]) if there.message else there
            for member, there in zip(self.members, found, strict=True)
        }


class Witness:
    """The other side: keeps the pages of one job, by its token. To `look` now and then, and once after its end."""

    def __init__(self, token: str) -> None:
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
            self._pages += [_Page(**json.loads(message), file=file) for file in files]
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
