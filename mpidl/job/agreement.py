"""Makes a failure on one rank an error on every rank, so that no rank waits for one that has failed.

    rank 0   action() -> result              every rank learns of every failure
    rank 1   action() raises                 every rank raises; the error names the ranks on which it failed

    check_everywhere   a check that may fail on some ranks        refuse_everywhere  a problem that some ranks found
    run_everywhere     an action of all ranks                     on_rank_0          an action of rank 0
    kept_on_rank_0     one of rank 0, which keeps the result      agree_or_exit      of programs: one line, and exit
    is_anywhere        a flag: is it set on any rank?

Each is one or two small collectives, which every rank must call. What they run must communicate nothing that a rank
could leave out by failing: the others would wait there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from collectives import Communicator

from .. import errors
from ..errors import CheckpointError, CheckpointMismatch, ConfigurationError, MpidlError, TrainingError, UsageError
from .pickled import broadcast_pickled, gather_pickled

Result = TypeVar("Result")
Failure = tuple[str, str]  # the name of a class in `errors`, and the message
_CLASSES: dict[str, type[MpidlError]] = {
    name: known for name, known in vars(errors).items() if isinstance(known, type) and issubclass(known, MpidlError)
}


# ---- an action of every rank ---------------------------------------------------------------------------------------


def check_everywhere(comm: Communicator, check: Callable[[], Result]) -> Result:
    """Returns `check()`; what it raises on any rank ends it on every rank. Collective.

    A rank's own exception is raised as it is, that of another rank as an error which names the ranks; an exception of
    a class that is not in `mpidl.errors` becomes a ConfigurationError there.
    """
    result, failure, exception = attempt(check, ConfigurationError)
    found = error_of(gather_pickled(comm, failure))
    if exception is not None:
        raise exception
    if found is not None:
        raise found
    return result  # type: ignore[return-value]


def run_everywhere(comm: Communicator, action: Callable[[], Result]) -> Result:
    """Returns `action()`; if it raises on any rank, raises one error, the same on every rank. Collective.

    An exception of a class that is not in `mpidl.errors` becomes a CheckpointError, also on the rank itself.
    """
    result, failure, cause = attempt(action)
    found = error_of(gather_pickled(comm, failure))
    if found is not None:
        raise found from cause
    return result  # type: ignore[return-value]


def on_rank_0(comm: Communicator, action: Callable[[], Result], fallback: type[MpidlError] = CheckpointError) -> Result:
    """Returns rank 0's `action()`, or raises its error as `run_everywhere` does, on every rank. Collective.

    fallback: what an exception of a class that is not in `mpidl.errors` becomes.
    """
    return _run_on_rank_0(comm, action, fallback, shares_result=True)  # type: ignore[return-value]


def kept_on_rank_0(comm: Communicator, action: Callable[[], Result], fallback: type[MpidlError]) -> Result | None:
    """Returns rank 0's `action()` there and None elsewhere; raises its error on every rank. Collective.

    fallback: as of `on_rank_0`.
    """
    return _run_on_rank_0(comm, action, fallback, shares_result=False)


def _run_on_rank_0(
    comm: Communicator, action: Callable[[], Result], fallback: type[MpidlError], shares_result: bool
) -> Result | None:
    result, failure, cause = attempt(action, fallback) if comm.rank == 0 else (None, None, None)
    shared, failure = broadcast_pickled(comm, (result if shares_result else None, failure))
    if failure is not None:
        raise _CLASSES[failure[0]](failure[1]) from cause
    return shared if shares_result else result


def agree_or_exit(comm: Communicator, check: Callable[[], Result]) -> Result:
    """Returns `check()`, if it raises UsageError or CheckpointError on no rank. Collective.

    Otherwise rank 0 prints the first rank's message as one line, "error: ...", and every rank exits, also those that
    saw nothing wrong: with status 2 for wrong use, which stays wrong, such as a checkpoint of another model, and 1 for
    a checkpoint that cannot be read or written, which another start may cure.
    """
    result: Result | None = None
    failure: Failure | None = None
    try:
        result = check()
    except (UsageError, CheckpointError) as error:
        failure = failure_of(error, UsageError)
    found = error_of(gather_pickled(comm, failure))
    if found is None:
        return result  # type: ignore[return-value]
    if comm.rank == 0:
        from collectives.command_line import print_error  # which a start need not import

        print_error(found)
    sys.exit(2 if isinstance(found, UsageError | CheckpointMismatch) else 1)


# ---- a problem that a rank may have found --------------------------------------------------------------------------


def refuse_everywhere(comm: Communicator, problem: str | None) -> None:
    """Raises TrainingError on every rank if any has a problem, which the error tells. Collective."""
    if is_anywhere(comm, problem is not None):
        raise_everywhere(comm, problem)


def is_anywhere(comm: Communicator, found: bool) -> bool:
    """Tells if any rank has found something. Collective."""
    flag = np.array([found], np.uint8)
    comm.all_reduce(flag, "max")
    return bool(flag[0])


def raise_everywhere(comm: Communicator, problem: str | None) -> NoReturn:
    """Raises this rank's problem, or that of the first rank which has one, as some rank has. Collective."""
    rank, text = first_problem(comm, problem)
    raise TrainingError(f"{text} (on rank {rank})" if problem is None else problem)


def first_problem(comm: Communicator, problem: str | None) -> tuple[int, str]:
    """Returns the first rank that has a problem, and the problem, as some rank has one. Collective."""
    problems = gather_pickled(comm, problem)
    return next((rank, text) for rank, text in enumerate(problems) if text is not None)


# ---- failures as data ----------------------------------------------------------------------------------------------


def attempt(
    action: Callable[[], Result], fallback: type[MpidlError] = CheckpointError
) -> tuple[Result | None, Failure | None, BaseException | None]:
    """Returns the result, or what to tell the other ranks and the exception itself."""
    try:
        return action(), None, None
    except Exception as error:
        return None, failure_of(error, fallback), error


def failure_of(error: BaseException, fallback: type[MpidlError] = CheckpointError) -> Failure:
    """Returns what to tell the other ranks of an exception. fallback: what one becomes that is not of this package."""
    if isinstance(error, OSError):
        # The system's own text begins with a number and ends with the path.
        where = f"{error.filename}: " if error.filename else ""
        return fallback.__name__, f"{where}{error.strerror or error}"
    name = type(error).__name__
    return (name, str(error)) if name in _CLASSES else (fallback.__name__, f"{name}: {error}")


def error_of(failures: Sequence[Failure | None]) -> MpidlError | None:
    """Returns the error for what failed on some ranks: that of the lowest one, with the ranks if not all failed.

    failures: of each rank.
    """
    wrong = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not wrong:
        return None
    first = failures[wrong[0]]
    assert first is not None
    name, text = first
    where = "" if len(wrong) == len(failures) else f" (on rank {', '.join(map(str, wrong))})"
    return _CLASSES[name](f"{text}{where}")
