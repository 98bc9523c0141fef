"""Which process is which rank, for `mpidl.launch` to name the rank that a launcher knows by its process alone.

`mpidl.launch` makes an empty file of the job's name in memory, and `mpidl.init` fills it in, on the one node where it
is: nothing is left on others.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TextIO

from collectives.symmetric.shared_memory import JOB, directories


class Roll:
    """The file, from its making to `take_away`."""

    def __init__(self, token: str) -> None:
        self._file: TextIO | None = None
        self._processes: list[list[object]] = []
        for path in _places(token):
            with contextlib.suppress(OSError):
                self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r")
                self._path = path
                break

    def take_away(self) -> None:
        """Removes it, and keeps what the ranks have written."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            with self._file, contextlib.suppress(ValueError):  # it is empty, or the job ended while it was written
                self._processes = json.load(self._file)
            self._file = None

    def rank(self, process: int, node: str) -> int | None:
        """Of a process on a node, which its launcher may call by another name than it does itself; None: not known."""
        found = {rank: name for rank, (name, number) in enumerate(self._processes) if number == process}
        there = [rank for rank, name in found.items() if str(name).split(".")[0] == node.split(".")[0]]
        return next(iter(there or (found if len(found) == 1 else ())), None)


def fill_in(processes: list[tuple[str, int]]) -> None:
    """Writes every rank's node and process number where this job's file is, if it is on this node.

    And takes away its name: the file goes with the process that has made it, however that ends.
    """
    token = os.environ.get(JOB)
    for path in _places(token) if token else ():
        with contextlib.suppress(OSError):
            with os.fdopen(os.open(path, os.O_WRONLY), "w") as out:
                json.dump(processes, out)
            path.unlink()
            return


def _places(token: str) -> list[Path]:
    return [Path(directory) / f"mpidl-{token}-ranks" for directory in directories()]
