"""Opens and reads regular files only: in a directory that others can write to, a pipe would block its reader."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def open_regular(path: Path) -> int:
    """Opens a file to read, without waiting, and returns its descriptor. Raises OSError, also for a special file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def size_of(path: Path) -> int:
    """Returns a file's size in bytes. Raises OSError, also for a special file."""
    return _regular(path, path.stat()).st_size


def _regular(path: Path, about: os.stat_result) -> os.stat_result:
    kind = stat.S_IFMT(about.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"is a {_KINDS.get(kind, 'special file')}, no regular file", str(path))
    return about


def read_regular(path: Path, most: int) -> bytes:
    """Reads all bytes of a file. Raises OSError, also for a file of more than `most` bytes."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, more than the {most} that it may have", str(path))
        return file.read(most)
