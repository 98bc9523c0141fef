"""Texts to train on: a file, a downloaded classic, or the sources of Python's standard library."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sysconfig
import urllib.request
from collections.abc import Callable
from pathlib import Path

from collectives import Communicator

from ..errors import UsageError
from ..job.agreement import on_rank_0

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB_BYTES = 4 << 20


def read_corpus(name: str, comm: Communicator) -> str:
    """Loads a text by name, the same on every rank. Collective; raises UsageError on every rank.

    name: "stdlib", the Python sources of the standard library (up to 4 MiB of them); "tinyshakespeare",
    downloaded once into the cache; else the path of a UTF-8 file.

    Rank 0 reads and broadcasts: hosts may have different Pythons or files, and only one needs to download.
    """
    named: dict[str, Callable[[], str]] = {"stdlib": standard_library, "tinyshakespeare": tiny_shakespeare}
    return on_rank_0(comm, named.get(name, lambda: read_text(Path(name))), UsageError)


def read_text(path: Path) -> str:
    """A UTF-8 file as it is."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def standard_library() -> str:
    """The top-level modules of the running Python's standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        nbytes = len(text.encode()) + bool(texts)  # a line between them
        if path.name.startswith("_sysconfigdata") or size + nbytes > STDLIB_BYTES:
            continue
        texts.append(text)
        size += nbytes
    if not texts:
        raise UsageError(f"{folder}: holds no Python sources; give a text with --data")
    return "\n".join(texts)


def tiny_shakespeare() -> str:
    """1.1 MB of Shakespeare's plays, downloaded once and kept in $XDG_CACHE_HOME/mpidl (~/.cache/mpidl)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpidl"
    path = cache / "tinyshakespeare.txt"
    data = path.read_bytes() if path.exists() else b""
    if _digest(data) == SHAKESPEARE_SHA256:
        return data.decode()
    try:
        with urllib.request.urlopen(SHAKESPEARE, timeout=30) as answer:
            data = answer.read()
    except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"tinyshakespeare: cannot be downloaded ({reason}); give a file with --data PATH, or put the text at {path}"
        ) from None
    if _digest(data) != SHAKESPEARE_SHA256:
        raise UsageError(f"tinyshakespeare: the text at {SHAKESPEARE} has another checksum than expected")
    # The cache saves a download, and the text is there where none can be written. A torn file has another checksum.
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return data.decode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
