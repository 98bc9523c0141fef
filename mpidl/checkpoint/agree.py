"""One outcome of all ranks: what goes wrong on one is the same error on every one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collectives import Communicator

from ..errors import CheckpointError, CheckpointMismatch, ConfigurationError, MpidlError, TrainingError
from ..objects import all_gather_object, broadcast_object

Result = TypeVar("Result")

_CLASSES: dict[str, type[MpidlError]] = {
    known.__name__: known for known in (CheckpointError, CheckpointMismatch, ConfigurationError, TrainingError)
}
Failure = tuple[str, str]  # the class's name, and the message


def failure_of(error: BaseException) -> Failure:
    """What to tell the other ranks of an error; those of the system become CheckpointError."""
    if isinstance(error, OSError):
        # The system's own text begins with a number and ends with the path.
        where = f"{error.filename}: " if error.filename else ""
        return "CheckpointError", f"{where}{error.strerror or error}"
    name = type(error).__name__
    return (name, str(error)) if name in _CLASSES else ("CheckpointError", f"{name}: {error}")


def raised(failures: list[Failure | None]) -> MpidlError | None:
    """The error that all ranks raise for what failed on some of them: the lowest such rank's, and where it was."""
    wrong = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not wrong:
        return None
    first = failures[wrong[0]]
    assert first is not None
    name, text = first
    where = "" if len(wrong) == len(failures) else f" (on rank {', '.join(map(str, wrong))})"
    return _CLASSES[name](f"{text}{where}")


def together(comm: Communicator, action: Callable[[], Result]) -> Result:
    """What `action()` returns; an error of any rank is raised alike on every one. Collective."""
    result, failure, cause = attempt(action)
    error = raised(all_gather_object(comm, failure))
    if error is not None:
        raise error from cause
    return result  # type: ignore[return-value]


def on_rank_0(comm: Communicator, action: Callable[[], Result]) -> Result:
    """Rank 0's `action()`, its result or its error on every rank. Collective."""
    result, failure, cause = attempt(action) if comm.rank == 0 else (None, None, None)
    result, failure = broadcast_object(comm, (result, failure))
    if failure is not None:
        raise _CLASSES[failure[0]](failure[1]) from cause
    return result  # type: ignore[return-value]


def gather(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value`, of what JSON can hold, on rank 0; nothing on the others. Collective."""
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = all_gather_object(comm, mine.size)
    everything = np.empty(sum(sizes), np.uint8) if comm.rank == 0 else None
    comm.gather(everything, mine, counts=sizes)
    if everything is None:
        return []
    ends = np.cumsum(sizes)
    return [json.loads(everything[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Failure | None, Any]:
    """The result, or what went wrong and the exception itself."""
    try:
        return action(), None, None
    except Exception as error:
        return None, failure_of(error), error
