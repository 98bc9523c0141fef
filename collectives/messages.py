"""Messages from one rank to another. They do not queue behind collectives, nor behind each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from . import buffers
from .arguments import integer, peer
from .buffers import Buffer, DeviceBuffer
from .cuda.messages import HostSide
from .errors import ArgumentError
from .positions import Positions
from .progress import RequestWork, Work
from .watchdog import TAGS

_LARGEST_MESSAGE = 1 << 30  # bytes; longer ones are cut, as not every MPI counts past 2^31
_LARGEST_TAG = min(TAGS) - 1


class Messages:
    """One rank's messages in one group.

    comm: for nothing else. positions: where its waits are written. takes_addresses: whether the MPI library has been
    seen to move GPU memory between this rank and another one.
    """

    def __init__(
        self, comm: MPI.Intracomm, positions: Positions, takes_addresses: Callable[[int], bool] = lambda other: False
    ) -> None:
        self._takes_addresses = takes_addresses
        self._messages = comm
        self._positions = positions
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._host_sides: dict[int, HostSide] = {}
        self._under_way: list[RequestWork] = []  # also those whose handle was dropped: MPI still uses their memory

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Sends x to rank `dest`, which must receive as many elements of the same dtype with the same tag.

        Messages do not queue behind collectives: two ranks may both receive first and then send, asynchronously.
        """
        data = buffers.inspect(x, "send: x", writable=False)
        dest, tag = peer("send: dest", dest, self.rank, self.size), integer("send: tag", tag, 0, _LARGEST_TAG)
        done: Callable[[], None] = _nothing
        if isinstance(data, DeviceBuffer):
            if self._takes_addresses(dest):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).outgoing(x, data)
        requests = [self._messages.Isend([s, MPI.BYTE], dest, tag) for s in _cut(data)]
        return self._message("send", dest, requests, data, done, async_op)

    def recv(self, x: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Fills x with the next message of the same tag from rank `source`.

        Raises OperationError if the message is longer or shorter than x.
        """
        data = buffers.inspect(x, "recv: x", writable=True)
        source, tag = peer("recv: source", source, self.rank, self.size), integer("recv: tag", tag, 0, _LARGEST_TAG)
        done: Callable[[], None] = _nothing
        if isinstance(data, DeviceBuffer):
            if self._takes_addresses(source):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).incoming(x, data)
        pieces = _cut(data)
        statuses = [MPI.Status() for _ in pieces]
        requests = [self._messages.Irecv([s, MPI.BYTE], source, tag) for s in pieces]

        def check() -> None:
            came = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if came != data.nbytes:
                raise ArgumentError(f"recv: x has {data.nbytes} bytes, and a message of {came} bytes came")
            done()

        return self._message("recv", source, requests, data, check, async_op, statuses)

    def _host_side(self, data: DeviceBuffer) -> HostSide:
        if data.device not in self._host_sides:
            self._host_sides[data.device] = HostSide(data.device)
        return self._host_sides[data.device]

    def _message(
        self,
        kind: str,
        other: int,
        requests: list[MPI.Request],
        data: Buffer,
        check: Callable[[], None],
        async_op: bool,
        statuses: list[MPI.Status] | None = None,
    ) -> Work | None:
        name = f"{kind} {'to' if kind == 'send' else 'from'} rank {other} (rank {self.rank} of {self.size})"
        waiting = partial(self._positions.waiting, kind, other)
        work = RequestWork(name, requests, data, check, waiting, statuses)
        if async_op:
            self._under_way = [other for other in self._under_way if not other.is_completed()]
            self._under_way.append(work)
            return work
        work.wait()
        return None


def _nothing() -> None:
    pass


def _cut(data: Buffer) -> list[np.ndarray[Any, Any]]:
    """The bytes of a message in pieces that every MPI can count; one empty piece for an empty message."""
    flat = data.flat.view(np.uint8)
    return [flat[i : i + _LARGEST_MESSAGE] for i in range(0, max(1, flat.size), _LARGEST_MESSAGE)]
