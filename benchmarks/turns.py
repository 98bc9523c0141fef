"""Jobs that take turns: the ranks of one do something while those of the others sleep.

    Job(command)        of the program that starts them: begin, then turn() any number of times, then end
    Caller(path)        of each rank of a job: with turn(): ...

A job's ranks connect to a socket in the file system. A turn is a word to each of them, and an answer from each; a job
that ends too early, or a program that calls no more, is seen at once by the process that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_LOOK = 0.2  # seconds between looks at whether a job that has not connected yet is still there
_TIME_TO_END = 60  # seconds, after its last turn


class JobFailed(Exception):
    """A job that ended before its last turn; what it said."""


class _Line:
    """Messages to and from the other end of a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._file = connected, connected.makefile("rb")

    def say(self, what: Any) -> None:
        """Sends a message."""
        self._socket.sendall(json.dumps(what).encode() + b"\n")

    def hear(self) -> Any:
        """The next message. Raises ConnectionError if the other end has hung up."""
        heard = self._file.readline()
        if not heard.endswith(b"\n"):
            raise ConnectionError("the other end has hung up")
        return json.loads(heard)

    def close(self) -> None:
        """Hangs up."""
        self._file.close()
        self._socket.close()


class Caller:
    """A rank's end of it. path: of the socket. To be closed by leaving its context."""

    def __init__(self, path: Path, ranks: int) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        self._line = _Line(connected)
        self._line.say(ranks)

    def __enter__(self) -> Caller:
        """Returns the caller, which is connected."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hangs up."""
        self._line.close()

    @contextlib.contextmanager
    def turn(self) -> Iterator[dict[str, Any]]:
        """Waits until it is this job's turn; the turn ends with the context. What is put into the dict is answered.

        Raises ConnectionError if the program that calls has ended.
        """
        try:
            self._line.hear()
        except ConnectionError:
            raise ConnectionError("the program that calls this job's turns has ended") from None
        answer: dict[str, Any] = {}
        yield answer
        self._line.say(answer)


class Job:
    """A job, started.

    command: gets `--called` and the socket's path.
    directory: for the socket and what it says.

    To be ended by leaving its context, which kills what of it still runs.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        path, self._log = directory / f"{name}.socket", directory / f"{name}.log"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.settimeout(_LOOK)
        self._ranks: list[_Line] = []
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--called", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        """Returns the job, which is started."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what still runs of the job and closes its sockets."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session
        self._process.wait()
        for line in self._ranks:
            line.close()
        self._listener.close()

    def begin(self) -> None:
        """Waits until all of its ranks are ready for a turn. Raises JobFailed."""
        ranks = 1
        while len(self._ranks) < ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._failure() from None
                continue
            connection.settimeout(None)
            self._ranks.append(_Line(connection))
            ranks = self._hear(self._ranks[-1])

    def turn(self) -> list[dict[str, Any]]:
        """Gives every rank a turn and returns the ranks' answers, in no order. Raises JobFailed."""
        for line in self._ranks:
            with contextlib.suppress(ConnectionError):  # as is heard below
                line.say("turn")
        return [self._hear(line) for line in self._ranks]

    def end(self) -> None:
        """Waits for the end of the job, after its last turn. Raises JobFailed for a status that is not 0."""
        try:
            status = self._process.wait(_TIME_TO_END)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise self._failure()

    def _hear(self, line: _Line) -> Any:
        try:
            return line.hear()
        except ConnectionError:
            raise self._failure() from None

    def _failure(self) -> JobFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        said = self._log.read_text(errors="replace").strip().splitlines()[-30:]
        status = self._process.poll()
        how = "does not end" if status is None else f"ended too early, with status {status}"
        return JobFailed("\n".join([f"{self.name}: its job {how}", *said]))
