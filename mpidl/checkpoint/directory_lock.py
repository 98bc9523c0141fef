"""Lock of a directory of checkpoints, which one job at a time holds until its process ends.

    job A    claims DIR    save    save ...                      ends in any way: the kernel releases the lock
    job B         claims DIR: waits for a moment, as A may be ending; then CheckpointError, which names A

Two jobs in one directory would remove each other's older checkpoints, and what the other is writing. The lock is one of
`flock` on DIR/.lock, whose text names its holder. The job removes the file when it ends; one that was killed leaves
it behind unlocked. Reading needs no lock.

Threads of the program take and release locks, those that write in the background none; `_HELD_LOCK` guards changes
of the table. No other lock of threads is taken inside; the file's is waited for up to 5 s.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import platform
import threading
import time
import warnings
from pathlib import Path

from ..errors import CheckpointError

NAME = ".lock"
LOCK_TIMEOUT = 5.0  # seconds that a job which is ending has to be gone
_PAUSE = 0.05  # seconds between two attempts
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_HELD: dict[Path, int | None] = {}  # by this process: the lock file's descriptor; None where there are no locks
_HELD_LOCK = threading.Lock()


def hold(folder: Path) -> None:
    """Takes the directory for this process, which may have it already. Raises CheckpointError if another one has it.

    A file system that knows no locks is warned of, once, and taken.
    """
    path = folder.resolve() / NAME
    with _HELD_LOCK:
        if path in _HELD:
            descriptor = _HELD[path]
            if descriptor is None or _is_current_file(path, descriptor):
                return
            del _HELD[path]  # the file, or the whole directory, was removed
            os.close(descriptor)
        _HELD[path] = _lock_file(path)


def release(folder: Path | None = None) -> None:
    """Releases the lock of a directory, or all that this process holds."""
    with _HELD_LOCK:
        for path in [*_HELD] if folder is None else [folder.resolve() / NAME]:
            descriptor = _HELD.pop(path, None)
            if descriptor is not None:
                if _is_current_file(path, descriptor):
                    with contextlib.suppress(OSError):
                        path.unlink()  # before the lock is: it would be another's
                os.close(descriptor)


def is_held_elsewhere(folder: Path) -> bool:
    """Returns True if another process holds the directory. Removes the lock file of one that was killed."""
    path = folder.resolve() / NAME
    if path in _HELD:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current_file(path, descriptor):
            path.unlink()
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _lock_file(path: Path) -> int | None:
    """Locks the file and returns its descriptor; None where there are no locks. Raises CheckpointError."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder_text = os.pread(descriptor, 500, 0).decode(errors="replace").split()
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                with contextlib.suppress(OSError):
                    path.unlink()
                warnings.warn(
                    f"{path.parent}: its file system knows no locks ({error.strerror}): that no other job saves there "
                    "is not checked",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            if not isinstance(error, BlockingIOError):
                raise
            if time.monotonic() > deadline:
                holder = " ".join(holder_text) or "another process"
                raise CheckpointError(
                    f"{path.parent}: {holder} saves its checkpoints there, and two jobs would remove each other's; "
                    f"save elsewhere, or end it ({path} is its lock)"
                ) from None
            time.sleep(_PAUSE)
            continue
        if _is_current_file(path, descriptor):
            with contextlib.suppress(OSError):  # on a full disk: then it has no name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{_process_in_words()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # the one before has taken it away meanwhile


def _is_current_file(path: Path, descriptor: int) -> bool:
    """Returns True while the path is still that of the open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _process_in_words() -> str:
    """Names this process for an error in another one."""
    job = next((f" of job {os.environ[name]}" for name in _SCHEDULERS if os.environ.get(name)), "")
    return f"process {os.getpid()} on {platform.node()}{job}"


atexit.register(release)


def _close_inherited() -> None:
    """Closes the descriptors in a forked child, which would keep its parent's locks, and makes a lock of its own."""
    global _HELD_LOCK
    _HELD_LOCK = threading.Lock()  # a thread that the child lacks may have held the parent's
    for descriptor in _HELD.values():
        if descriptor is not None:
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)
