"""Messages from one rank to another. They do not queue behind collectives, nor behind each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..base import buffers
from ..base.arguments import TimeLimit, integer, refuse_overlap, wrong_type
from ..base.buffers import Buffer, DeviceBuffer
from ..errors import ArgumentError, OperationError, WorkTimeout
from ..process.topology import reported_ranks
from ..runtime.positions import ANY, Positions
from ..runtime.progress import Work
from ..runtime.watchdog import TAGS
from .channels import Channels
from .message import INLINE_BYTES, Header, Message, Receiving, Sending, begin_in_turn, nothing, poll, under_way

if TYPE_CHECKING:
    from ..backends.cuda.messages import HostSide

_LARGEST_TAG = min(TAGS) - 1


@dataclass(frozen=True)
class Envelope:
    """A message that has come and is not received yet.

    source: its sender.
    dtype: the name of its elements' type.
    size: how many elements.
    """

    source: int
    tag: int
    dtype: str
    size: int


@dataclass(frozen=True, eq=False)
class P2POp:
    """One message of `Communicator.batch_isend_irecv`.

    kind: "send" or "recv".
    peer: the other rank; None: from any.
    """

    kind: str
    x: Any
    peer: int | None
    tag: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("send", "recv"):
            raise ArgumentError(f"P2POp: kind: got {self.kind!r}; needs 'send' or 'recv'")


class Messages:
    """One rank's messages in one group.

    comm: for nothing else.
    positions: where its waits are written.
    takes_device_addresses: whether the MPI library has been seen to move GPU memory between this rank and another one.
    name: of the group, may be empty.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        positions: Positions,
        takes_device_addresses: Callable[[int], bool] = lambda other: False,
        name: str = "",
    ) -> None:
        self._takes_device_addresses = takes_device_addresses
        self._positions = positions
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._names = reported_ranks(comm)
        self._own_name = (
            f"communicator {name!r}, " if name else ""
        ) + f"rank {self._names[self.rank]} of {MPI.COMM_WORLD.size}"
        self._host_sides: dict[int, HostSide] = {}
        self.channels = Channels(comm)

    def send(
        self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Sends x to a rank; see `Communicator.send`. To itself a copy, unless asynchronously."""
        message = self._outgoing("send: x", x, dest, tag, to_itself_by_copy=not async_op)
        if dest == self.rank and not async_op:
            return None  # it has been copied
        return self._issued(message, async_op, timeout)

    def recv(
        self, x: Any, source: int | None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Receiving:
        """Fills x with a message; see `Communicator.recv`. The message has arrived unless async_op."""
        if not async_op:
            self._refuse_endless_wait("recv", source, tag)
        message = self._incoming("recv: x", x, source, tag)
        self._issued(message, async_op, timeout)
        return message

    def sendrecv(
        self, x: Any, dest: int, out: Any, source: int | None, tag: int, recv_tag: int, timeout: float | None = None
    ) -> int:
        """Sends x and fills out, at once; see `Communicator.sendrecv`."""
        data = self._checked(x, "sendrecv: x", dest, tag, writable=False)
        target = self._checked(out, "sendrecv: out", source, recv_tag, writable=True)
        refuse_overlap("sendrecv", target, data)
        if (dest, tag) != (self.rank, recv_tag):  # which would be what is received
            self._refuse_endless_wait("sendrecv", source, recv_tag)
        arriving = self._incoming("sendrecv: out", out, source, recv_tag)
        leaving = self._outgoing("sendrecv: x", x, dest, tag)
        limit = TimeLimit("sendrecv", timeout)
        try:
            _wait(arriving, timeout)
        except WorkTimeout:
            leaving.give_up()
            raise
        except OperationError:  # of what came; x must not be touched before it has left
            _wait(leaving, limit.left())
            raise
        _wait(leaving, limit.left())
        return arriving.sender

    def batch(self, operations: Sequence[P2POp]) -> list[Work]:
        """Begins all messages of a list; see `Communicator.batch_isend_irecv`."""
        for number, op in enumerate(operations):
            name = f"batch_isend_irecv: operation {number}"
            if not isinstance(op, P2POp):
                raise wrong_type(name, op, "a P2POp")
            self._checked(op.x, f"{name}: x", op.peer, op.tag, writable=op.kind == "recv")
        begun: dict[int, Message] = {}
        for kind in ("recv", "send"):  # so that what is sent finds its receive
            for number, op in enumerate(operations):
                if op.kind == kind:
                    begin = self._incoming if kind == "recv" else self._outgoing
                    begun[number] = begin("batch_isend_irecv: x", op.x, op.peer, op.tag)  # type: ignore[arg-type]
        return [begun[number] for number in range(len(operations))]

    def probe(self, source: int | None, tag: int, *, seconds: float = inf) -> Envelope | None:
        """The next message that comes within so many seconds, or None; see `Communicator.probe`."""
        source, tag = self._checked_peer("probe: source", source), self._checked_tag("probe: tag", tag)
        if seconds:
            self._refuse_endless_wait("probe", source, tag)
        found: list[tuple[int, Header]] = []

        def is_there() -> bool:
            begin_in_turn()
            message = self.channels.probe(source, tag)
            found.extend([message] if message is not None else [])
            return bool(found)

        if not is_there() and seconds:
            with self._positions.waiting("probe", ANY if source is None else source):
                poll(is_there, seconds)
        if not found:
            return None
        ((sender, header),) = found
        dtype, nbytes = header.read()
        return Envelope(sender, tag, dtype.name, nbytes // dtype.itemsize)

    def _outgoing(self, name: str, x: Any, dest: int | None, tag: int, *, to_itself_by_copy: bool = False) -> Message:
        data = self._checked(x, name, dest, tag, writable=False)
        done: Callable[[], None] = nothing
        if isinstance(data, DeviceBuffer):
            if dest != self.rank and self._goes_directly(data, dest):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).outgoing(x, data)
        elif to_itself_by_copy and dest == self.rank:
            data = Buffer(data.flat.copy(), data.dtype)
        return self._begin(Sending, data, dest, tag, done)

    def _incoming(self, name: str, x: Any, source: int | None, tag: int) -> Receiving:
        data = self._checked(x, name, source, tag, writable=True)
        done: Callable[[], None] = nothing
        if isinstance(data, DeviceBuffer):
            if source not in (None, self.rank) and self._goes_directly(data, source):
                data = self._host_side(data).direct(x, data)
            else:
                data, done = self._host_side(data).incoming(x, data)
        message = self._begin(Receiving, data, source, tag, done)
        assert isinstance(message, Receiving)
        return message

    def _begin(
        self, kind: type[Message], data: Buffer, other: int | None, tag: int, done: Callable[[], None]
    ) -> Message:
        word, way = ("send", "to") if kind is Sending else ("recv", "from")
        who = "any rank" if other is None else f"rank {self._names[other]}"
        waiting = partial(self._positions.waiting, word, ANY if other is None else other)
        message = kind(f"{word} {way} {who} ({self._own_name})", self.channels.comm, data, waiting, done)
        self.channels.begin(message, other, tag)
        return message

    @staticmethod
    def _issued(message: Message, async_op: bool, timeout: float | None = None) -> Work | None:
        """The handle of a message that has begun, or None when it has ended."""
        if async_op:
            for other in list(under_way):
                other.is_completed()  # and what it kept is freed
            return message
        _wait(message, timeout)
        return None

    def _checked(self, array: Any, name: str, other: Any, tag: Any, *, writable: bool) -> Buffer:
        """The array, when all arguments of a message are right. name: of the array, behind that of the operation."""
        operation = name.rpartition(":")[0]
        data = buffers.inspect(array, name, writable=writable)
        self._checked_peer(f"{operation}: {'source' if writable else 'dest'}", other, any_rank=writable)
        self._checked_tag(f"{operation}: tag", tag)
        return data

    def _checked_peer(self, name: str, value: Any, *, any_rank: bool = True) -> int | None:
        return None if value is None and any_rank else integer(name, value, 0, self.size - 1)

    @staticmethod
    def _checked_tag(name: str, value: Any) -> int:
        return integer(name, value, 0, _LARGEST_TAG)

    def _refuse_endless_wait(self, operation: str, source: Any, tag: Any) -> None:
        """Raises ArgumentError where this rank would wait for a message that it alone can send, and has not sent."""
        if source != self.rank and not (source is None and self.size == 1):
            return
        self._checked_tag(f"{operation}: tag", tag)
        if not self.channels.has_sent_to_itself(self.rank, tag):
            raise ArgumentError(
                f"{operation}: source: got {source}, and rank {self.rank} has no message of tag {tag} to itself left "
                "to receive; needs the send first, or async_op=True"
            )

    def _goes_directly(self, data: DeviceBuffer, other: int | None) -> bool:
        return other is not None and data.nbytes > INLINE_BYTES and self._takes_device_addresses(other)

    def _host_side(self, data: DeviceBuffer) -> HostSide:
        if data.device not in self._host_sides:
            from ..backends.cuda.messages import HostSide

            self._host_sides[data.device] = HostSide(data.device)
        return self._host_sides[data.device]


def _wait(message: Message, timeout: float | None) -> None:
    """Waits for a message that is given up when the seconds pass."""
    try:
        message.wait(timeout)
    except WorkTimeout:
        message.give_up()
        raise
