"""Python objects between the ranks of a group, pickled into arrays of bytes.

Objects of collectives go in two operations: sizes first, then bytes. An object that one rank cannot pickle has size -1,
so that every rank raises. A message with an object is one of uint8 elements, whose length the receiver probes.

Unpickling runs what the sender has written: the ranks of a job trust each other. What fails in it is raised on the rank
on which it fails, after the operation.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..base import arguments
from ..base.arguments import TimeLimit
from ..errors import ArgumentError, ArgumentTypeError, OperationError
from .messages import GroupMessages

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_NONE: Bytes = np.empty(0, np.uint8)


class GroupObjects(GroupMessages):
    """A group whose ranks exchange objects that pickle takes.

    Every operation but `send_object` and `recv_object` is collective, and raises ArgumentTypeError on every rank if one
    cannot pickle what it gives.

    timeout: as of operations on arrays, for all that it takes.
    """

    # Defined by the Communicator, which derives from this class:
    all_gather: Callable[..., Any]
    broadcast: Callable[..., Any]
    gather: Callable[..., Any]
    scatter: Callable[..., Any]

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank."""
        limit = TimeLimit("all_gather_object", timeout)
        mine, sizes = self._sizes("all_gather_object", value, limit)
        everything = np.empty(sum(sizes), np.uint8)
        self.all_gather(everything, mine, sizes, timeout=limit.left())
        return _unpickled(everything, sizes)

    def gather_object(self, value: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """Every rank's value, in the order of ranks, on the root; None on the others."""
        root, limit = arguments.root_rank("gather_object", root, self.size), TimeLimit("gather_object", timeout)
        mine, sizes = self._sizes("gather_object", value, limit)
        everything = np.empty(sum(sizes), np.uint8) if self.rank == root else None
        self.gather(everything, mine, root, sizes, timeout=limit.left())
        return None if everything is None else _unpickled(everything, sizes)

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """The root's value on every rank; what the others give is ignored."""
        root, limit = arguments.root_rank("broadcast_object", root, self.size), TimeLimit("broadcast_object", timeout)
        mine, error = _pickled([value]) if self.rank == root else ([_NONE], None)
        size = np.array([-1 if error else mine[0].size], np.int64)
        self.broadcast(size, root, timeout=limit.left())
        _refuse("broadcast_object", [root] if size[0] < 0 else [], error)
        data = mine[0] if self.rank == root else np.empty(int(size[0]), np.uint8)
        self.broadcast(data, root, timeout=limit.left())
        return value if self.rank == root else pickle.loads(data.tobytes())

    def scatter_object(
        self, values: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None
    ) -> Any:
        """Value r of the root's list on rank r.

        values: on the root as many as there are ranks; ignored on the others. Raises ArgumentError or ArgumentTypeError
        on every rank if the root gives another number, or no list.
        """
        root, limit = arguments.root_rank("scatter_object", root, self.size), TimeLimit("scatter_object", timeout)
        mine = _listed(values) if self.rank == root else []
        given, error = _pickled(mine or [])
        header = np.array([-1 if mine is None else len(mine), -1 if error else 0], np.int64)
        self.broadcast(header, root, timeout=limit.left())
        if header[0] < 0:
            kind = f" ({type(values).__name__})" if self.rank == root else ""
            raise ArgumentTypeError(
                f"scatter_object: values: those of rank {root}{kind} are no list; needs {self.size}, one for each rank"
            )
        _refuse("scatter_object", [root] if header[1] < 0 else [], error)
        if header[0] != self.size:
            raise ArgumentError(
                f"scatter_object: got {header[0]} values on rank {root}; needs {self.size}, one for each rank"
            )
        sizes = np.array([data.size for data in given] or [0] * self.size, np.int64)
        self.broadcast(sizes, root, timeout=limit.left())
        own = np.empty(int(sizes[self.rank]), np.uint8)
        self.scatter(own, np.concatenate(given) if given else None, root, sizes.tolist(), timeout=limit.left())
        return mine[root] if mine else pickle.loads(own.tobytes())

    def send_object(self, value: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Sends a value to rank `dest`, which must call `recv_object` with the same tag."""
        (data,), error = _pickled([value])
        _refuse("send_object", [self.rank] if error else [], error)
        self.send(data, dest, tag, timeout=timeout)

    def recv_object(self, source: int | None = None, tag: int = 0, *, timeout: float | None = None) -> tuple[Any, int]:
        """The value of the next message of the tag from a rank, or from any (None), and its sender.

        timeout: seconds. WorkTimeout if no message has come by then, which leaves all as it was. OperationTimeout if a
            message has come and its elements are not complete by then; the communicator cannot be used any more.

        Raises OperationError if the message is an array of another dtype than uint8, which is then still to be
        received, or cannot be unpickled.
        """
        limit = TimeLimit("recv_object", timeout)
        found = self.probe(source, tag, timeout=limit.left())
        if found.dtype != "uint8":
            raise OperationError(
                f"recv_object: got {found.size} elements of {found.dtype} from rank {found.source}; needs an object of "
                "send_object"
            )
        data = np.empty(found.size, np.uint8)
        self.recv(data, found.source, tag, timeout=limit.left())
        try:
            return pickle.loads(data.tobytes()), found.source
        except Exception as error:  # unpickling runs functions of any module
            raise OperationError(
                f"recv_object: the {found.size} uint8 from rank {found.source} cannot be unpickled: {error!r}; needs "
                "an object of send_object"
            ) from error

    def _sizes(self, operation: str, value: Any, limit: TimeLimit) -> tuple[Bytes, list[int]]:
        """This rank's value in bytes, and the bytes of every rank's."""
        mine, error = _pickled([value])
        sizes = np.empty(self.size, np.int64)
        self.all_gather(sizes, np.array([-1 if error else mine[0].size], np.int64), timeout=limit.left())
        _refuse(operation, [rank for rank, size in enumerate(sizes.tolist()) if size < 0], error)
        return mine[0], sizes.tolist()


def _listed(values: Any) -> list[Any] | None:
    """The values as a list, which is empty for None; None for what cannot be listed."""
    try:
        return [] if values is None else list(values)
    except Exception:  # to iterate runs methods of any class
        return None


def _pickled(values: Sequence[Any]) -> tuple[list[Bytes], Exception | None]:
    try:
        return [np.frombuffer(pickle.dumps(value), np.uint8) for value in values], None
    except Exception as error:  # pickling runs methods of any class
        return [_NONE] * len(values), error


def _unpickled(everything: Bytes, sizes: Sequence[int]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [pickle.loads(everything[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def _refuse(operation: str, ranks: list[int], error: Exception | None) -> None:
    if ranks:
        where = ", ".join(map(str, ranks))
        why = f": {error}" if error is not None else ""
        raise ArgumentTypeError(f"{operation}: the value of rank {where} cannot be pickled{why}") from error
