"""The exceptions that collectives raise; each derives from the built-in that fits."""

from __future__ import annotations


class CollectivesError(Exception):
    """Base of every error that this package raises by itself."""


class ArgumentError(CollectivesError, ValueError):
    """A value that an operation cannot work with: a wrong shape, size, root, operator, algorithm, ..."""


class ArgumentTypeError(CollectivesError, TypeError):
    """An object of a kind that an operation cannot work with: no array, an array of text, ..."""


class ScheduleError(CollectivesError, RuntimeError):
    """An algorithm's schedule that does not compute its operation, or waits for itself."""


class OperationError(CollectivesError, RuntimeError):
    """An operation that failed while it ran; the cause is chained."""


class OperationTimeout(OperationError, TimeoutError):
    """An operation's own `timeout` has passed; the communicator cannot be used any more."""


class MismatchError(CollectivesError, RuntimeError):
    """The ranks are in different operations, or in one with arguments that do not fit.

    Raised on all ranks of a group that is on one node, or with MPIDL_DEBUG=1. Otherwise on all ranks of the node whose
    ranks differ, where the Communicator cannot be used any more.
    """


class WorkTimeout(CollectivesError, TimeoutError):
    """`Work.wait(timeout)` ended before the operation was complete, or `probe` before a message came; all goes on."""
