"""Datagrams from processes of the same user, with open files.

The socket has a name that every user of the machine can find, so the kernel adds the sender's user id to each message,
and only those of this process's own user are returned. Other messages, incomplete ones, and the files that
came with them are dropped. One call reads a bounded number of messages: a sender that never stops cannot hold it.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST = 1 << 20  # bytes of a message
MESSAGES_AT_ONCE = 1000  # that one call reads
_FILES = 1  # of a message
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_INT = array.array("i").itemsize


def has_inboxes() -> bool:
    """Returns whether the system has sockets without a name in the file system, and names a message's sender."""
    return sys.platform == "linux"


@dataclass(frozen=True)
class Received:
    """One message and its file; the file is the receiver's to close. None: it came without a file."""

    content: bytes
    file: int | None


class Inbox:
    """A datagram socket of that name. Only where `has_inboxes`."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before any message can come
        self._socket.bind(_address(name))
        self._socket.setblocking(False)

    def receive(self) -> Iterator[Received]:
        """Yields the messages of this user that have arrived."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FILES * _INT)
        for _ in range(MESSAGES_AT_ONCE):
            try:
                content, ancillary, flags, _ = self._socket.recvmsg(LONGEST, room, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            user, files = _sender(ancillary)
            complete = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            if user == os.geteuid() and complete and len(files) <= _FILES:
                yield Received(content, files[0] if files else None)
                continue
            for file in files:
                os.close(file)

    def close(self) -> None:
        """Closes the socket; what has not been received is lost."""
        self._socket.close()


def send(name: str, content: bytes, file: int | None, timeout: float) -> None:
    """Sends one message to the inbox of that name, if there is one here and it takes the message in time.

    timeout: seconds.
    file: the receiver gets it for reading only.
    """
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out,
        _readable(file) as files,
    ):
        out.settimeout(timeout)
        out.connect(_address(name))
        socket.send_fds(out, [content], files)


@contextlib.contextmanager
def _readable(file: int | None) -> Iterator[list[int]]:
    """A descriptor of the same file that cannot write to it."""
    if file is None:
        yield []
        return
    opened = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield [opened]
    finally:
        os.close(opened)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int | None, list[int]]:
    """The user id and the open files that came with a message."""
    user, files = None, array.array("i")
    for level, kind, content in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(content) == _CREDENTIALS.size:
            _, user, _ = _CREDENTIALS.unpack(content)
        elif kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % _INT])
    return user, list(files)


def _address(name: str) -> str:
    return f"\0{name}"
