"""Gives the launcher the positions of its job's ranks, which it can read after all of them have ended.

A rank that is killed takes the others with it within milliseconds, as the launcher ends them, and what they were in is
on a page of memory that goes with the last of them. So the first rank of each group on a node sends the page's
descriptor to the process that waits for the job's end, if that is on this node: it has the page from there on, no name
or file is left behind, and nothing is added to an operation.

    first rank of a node -- descriptor, ranks --> socket of the job's name -- `Witness.look` --> who started the job

In the same way it tells which process is which rank, as launchers may know a rank by its process alone.

Only messages of the same user count (`inbox`), and a message that is not as above is ignored, as the launcher must not
end by what a process sends to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mpi4py import MPI

from ..memory.shared_memory import JOB, SharedMemory
from ..process.topology import world_ranks
from .inbox import LONGEST, Inbox, Received, has_inboxes, send
from .positions import Position, Positions

_SEND_TIMEOUT = 1.0  # seconds for the other side to take what is queued
KEPT_PAGES = 256  # pages; each is a descriptor and some kilobytes
_RANKS = 1 << 17  # of a group or a job; a longer list is malformed
_NAME = 255  # characters of a node's name
RANKS_AT_ONCE = 1000  # ranks in a message; the system takes some hundred kilobytes in one


def has_launcher() -> bool:
    """Returns whether a process that has started this job wants to see it."""
    return bool(os.environ.get(JOB)) and has_inboxes()


def send_page(memory: SharedMemory, comm: MPI.Intracomm, members: Sequence[int]) -> None:
    """Sends the page of a group. Only where `has_launcher`.

    memory: begins with the positions of members, the group's ranks on this node; has its `file`.
    """
    _send({"members": list(members), "world": world_ranks(comm)}, memory.file)


def send_processes(processes: Sequence[tuple[str, int]]) -> None:
    """Sends every rank's node and process number, in the order of ranks. Only where `has_launcher`, one of a node."""
    for first in range(0, len(processes), RANKS_AT_ONCE):
        _send({"first": first, "processes": processes[first : first + RANKS_AT_ONCE]})


def _send(message: Mapping[str, Any], file: int | None = None) -> None:
    content = json.dumps(message).encode()
    if len(content) <= LONGEST:
        send(_name(os.environ[JOB]), content, file, _SEND_TIMEOUT)


@dataclass(frozen=True)
class _Page:
    """A page of positions that is looked at.

    members: the group's ranks that it is of.
    world: the number in the world of each rank of the group.
    """

    members: list[int]
    world: list[int]
    file: int

    def positions(self) -> dict[int, Position]:
        """The positions by numbers in the world, also of peers. Empty if the file is not such a page."""
        try:
            found = Positions.decode(os.pread(self.file, Positions.nbytes_seen(len(self.members)), 0))
            return {
                self.world[member]: there.renumbered(self.world)
                for member, there in zip(self.members, found, strict=True)
            }
        except (OSError, ValueError, IndexError):
            return {}


class Witness:
    """The other side: keeps the pages of one job, by its token. To `look` now and then, and once after its end.

    processes: node and process number of each rank, as far as messages have told them; kept.
    pages: of the groups, in the order of arrival.
    inbox: where messages come; None where there can be none.
    """

    def __init__(self, token: str) -> None:
        self.processes: dict[int, tuple[str, int]] = {}
        self.pages: list[_Page] = []
        self.inbox = Inbox(_name(token)) if has_inboxes() else None

    def look(self) -> None:
        """Takes what has been sent, and ignores what is malformed."""
        for received in self.inbox.receive() if self.inbox is not None else ():
            if not self._take(received) and received.file is not None:
                os.close(received.file)
            if len(self.pages) > KEPT_PAGES:
                self._drop_one()

    def _drop_one(self) -> None:
        """Drops the oldest page but for the first of the largest group, which is that of the world if it has come."""
        kept = max(self.pages, key=lambda page: len(page.world))
        place = next(place for place, page in enumerate(self.pages) if page is not kept)
        os.close(self.pages.pop(place).file)

    def _take(self, received: Received) -> bool:
        """Takes one message; returns whether it keeps the file."""
        try:
            message = json.loads(received.content)
        except (ValueError, RecursionError):
            return False
        if not isinstance(message, dict):
            return False
        if received.file is None:
            self.processes.update(_processes(message))
            return False
        page = _page(message, received.file)
        if page is not None:
            self.pages.append(page)
        return page is not None

    def groups(self) -> list[dict[int, Position]]:
        """The positions of this node's ranks, or their last ones: of each group, by their numbers in the world."""
        return [group for page in self.pages if (group := page.positions())]

    def close(self) -> None:
        """Closes the inbox and all pages."""
        if self.inbox is not None:
            self.inbox.close()
        for page in self.pages:
            os.close(page.file)
        self.pages.clear()


def _processes(message: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """The node and process of each rank that a message tells; empty if a field is not as `send_processes` writes it."""
    first, processes = message.get("first"), message.get("processes")
    if set(message) != {"first", "processes"} or not _is_number(first, _RANKS):
        return {}
    if not isinstance(processes, list) or len(processes) > min(RANKS_AT_ONCE, _RANKS - first):
        return {}
    if not all(_is_process(entry) for entry in processes):
        return {}
    return {rank: (node, number) for rank, (node, number) in enumerate(processes, first)}


def _is_process(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    node, number = entry
    return isinstance(node, str) and 0 < len(node) <= _NAME and number != 0 and _is_number(number, 1 << 31)


def _page(message: Mapping[str, Any], file: int) -> _Page | None:
    """The page that a message shows; None if a field is not as `send_page` writes it, or the file is too small."""
    members, world = message.get("members"), message.get("world")
    if set(message) != {"members", "world"} or not isinstance(members, list) or not isinstance(world, list):
        return None
    if not 0 < len(members) <= len(world) <= _RANKS:
        return None
    if not all(_is_number(member, len(world)) for member in members):
        return None
    if not all(_is_number(rank, _RANKS) for rank in world):
        return None
    with contextlib.suppress(OSError):
        there = os.fstat(file)
        if stat.S_ISREG(there.st_mode) and there.st_size >= Positions.nbytes_seen(len(members)):
            return _Page(members, world, file)
    return None


def _is_number(value: Any, limit: int) -> TypeGuard[int]:
    """Returns whether it is an integer from 0 to below the limit."""
    return type(value) is int and 0 <= value < limit


def _name(token: str) -> str:
    return f"mpidl-{token}"
