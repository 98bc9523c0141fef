"""Messages from one rank to another. They do not queue behind collectives, nor behind each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from . import buffers
from .arguments import integer, peer
from .backends.cuda.messages import HostSide
from .buffers import Buffer, DeviceBuffer
from .message_work import INLINE_BYTES, Channel, Channels, Message, Receiving, Sending, under_way
from .positions import Positions
from .progress import Work
from .topology import names
from .watchdog import TAGS

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
        self._positions = positions
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._names = names(comm)
        self._own_name = f"rank {self._names[self.rank]} of {MPI.COMM_WORLD.size}"
        self._host_sides: dict[int, HostSide] = {}
        self.channels = Channels(comm)

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Sends x to rank `dest`, which must receive as many elements of the same dtype with the same tag.

        Messages do not queue behind collectives: two ranks may both receive first and then send, asynchronously.
        """
        data = buffers.inspect(x, "send: x", writable=False)
        dest, tag = peer("send: dest", dest, self.rank, self.size), integer("send: tag", tag, 0, _LARGEST_TAG)
        done: Callable[[], None] = _nothing
        if isinstance(data, DeviceBuffer):
            if self._goes_directly(data, dest):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).outgoing(x, data)
        channel = self.channels.outgoing(dest, tag)
        return _ended(self._begin(Sending, data, channel, done), async_op)

    def recv(self, x: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Fills x with the next message of the same tag from rank `source`.

        Raises OperationError if the message is longer or shorter than x, or of another dtype.
        """
        data = buffers.inspect(x, "recv: x", writable=True)
        source, tag = peer("recv: source", source, self.rank, self.size), integer("recv: tag", tag, 0, _LARGEST_TAG)
        done: Callable[[], None] = _nothing
        if isinstance(data, DeviceBuffer):
            if self._goes_directly(data, source):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).incoming(x, data)
        channel = self.channels.incoming(source, tag)
        return _ended(self._begin(Receiving, data, channel, done), async_op)

    def _begin(self, kind: type[Message], data: Buffer, channel: Channel, done: Callable[[], None]) -> Message:
        word, way = ("send", "to") if kind is Sending else ("recv", "from")
        name = f"{word} {way} rank {self._names[channel.peer]} ({self._own_name})"
        return kind(name, channel, data, partial(self._positions.waiting, word, channel.peer), done)

    def _goes_directly(self, data: DeviceBuffer, other: int) -> bool:
        return data.nbytes > INLINE_BYTES and self._takes_addresses(other)

    def _host_side(self, data: DeviceBuffer) -> HostSide:
        if data.device not in self._host_sides:
            self._host_sides[data.device] = HostSide(data.device)
        return self._host_sides[data.device]


def _ended(message: Message, async_op: bool) -> Work | None:
    """The handle of a message that has begun, or None when it has ended."""
    if async_op:
        for other in list(under_way):
            other.is_completed()  # and what it kept is freed
        return message
    message.wait()
    return None


def _nothing() -> None:
    pass
