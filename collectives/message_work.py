"""One message under way.

    up to INLINE_BYTES      header and elements             in one MPI message
    longer                  header | piece | piece ...      pieces straight from memory to memory

The header holds the dtype and the length. Headers of one peer and tag match receives one to one, whatever their
lengths, and pieces have an MPI tag of their own, by the number of their message: none is taken for the next one's.
So a receiver tells a message that does not fit, takes its pieces away, and the next one is in its place.

MPI reads and writes an array until the message ends. `under_way` refers to every message until then, so that its
array lives on where the handle or the communicator is dropped, a wait is interrupted, or the program ends.
"""

from __future__ import annotations

import atexit
import contextlib
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from .buffers import DTYPES, Buffer
from .errors import OperationError
from .forked import is_forked, refuse_if_forked
from .lifetime import keep_for_ever
from .progress import Work

INLINE_BYTES = 8 << 10
PIECE_BYTES = 1 << 30  # not every MPI counts past 2^31
_HEADER = struct.Struct("=2q")  # number of the dtype, bytes
_TAGS = 1 << 15  # MPI tags of headers are below, those of pieces above
_DTYPES = list(DTYPES.values())
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}

under_way: set[Message] = set()  # of this process


class Channel:
    """The messages to or from one peer with one tag, in their order.

    comm: for messages alone. messages: how many there were; as both ends count them, a message has one number.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int) -> None:
        self.comm, self.peer, self.tag = comm, peer, tag
        self.messages = 0
        largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int)
        self._slots = max(1, (largest + 1) // _TAGS - 1)

    def next(self) -> int:
        """The number of the next message."""
        self.messages += 1
        return self.messages

    def pieces_tag(self, number: int) -> int:
        """The MPI tag of that message's pieces; it comes again when the message has long ended."""
        return (1 + number % self._slots) * _TAGS + self.tag


class Channels:
    """The channels of one rank in one group. comm: for messages alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._outgoing: dict[tuple[int, int], Channel] = {}  # by peer and tag
        self._incoming: dict[tuple[int, int], Channel] = {}

    def outgoing(self, dest: int, tag: int) -> Channel:
        """The channel to a rank."""
        return self._channel(self._outgoing, dest, tag)

    def incoming(self, source: int, tag: int) -> Channel:
        """The channel from a rank."""
        return self._channel(self._incoming, source, tag)

    def has(self, work: Any) -> bool:
        """Returns whether it is a message of the group."""
        return isinstance(work, Message) and work.channel.comm is self.comm

    def close(self) -> None:
        """Ends every message of the group: what was sent is delivered, a receive that nothing was sent for cancelled.

        Collective. A message that its receiver has not asked for is dropped. All ranks say how many they have sent,
        then each knows which of its receives are still to be filled, and takes the messages that are left over.
        """
        numbers: list[dict[int, int]] = [{} for _ in range(self.comm.Get_size())]
        for (dest, tag), channel in self._outgoing.items():
            numbers[dest][tag] = channel.messages
        sent = self.comm.alltoall(numbers)
        ending = [message for message in list(under_way) if message.channel.comm is self.comm]
        for message in ending:
            channel = message.channel
            if isinstance(message, Receiving) and message.number > sent[channel.peer].get(channel.tag, 0):
                message.cancel()
        for source, counts in enumerate(sent):
            for tag, count in counts.items():
                channel = self.incoming(source, tag)
                left_over = count - channel.messages
                ending += [Receiving("close", channel, None, nullcontext, _nothing) for _ in range(left_over)]
        while ending := [message for message in ending if not message.is_completed()]:
            time.sleep(1e-4)

    def _channel(self, channels: dict[tuple[int, int], Channel], other: int, tag: int) -> Channel:
        if (other, tag) not in channels:
            channels[other, tag] = Channel(self.comm, other, tag)
        return channels[other, tag]


class Message(Work):
    """A Work that is MPI requests, which do not wait for the turn of other operations.

    number: in its channel. waiting: a context for blocking. finish: called when the array is sent or filled.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        data: Buffer | None,
        waiting: Callable[[], AbstractContextManager[None]],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(name)
        self.channel, self.number = channel, channel.next()
        self._data, self._waiting, self._finish = data, waiting, finish
        self._requests: list[MPI.Request] = []
        self._pieces: list[MPI.Request] = []
        self._lock = threading.Lock()
        self._started = self._cancelled = False
        under_way.add(self)  # before MPI knows of the array
        self._start()
        self._started = True

    def is_completed(self) -> bool:
        """True when the message has been sent or has arrived, or has failed; never blocks."""
        if not self._done.is_set():
            refuse_if_forked(self.name)
        if self._started and not self._done.is_set() and self._lock.acquire(blocking=False):
            try:
                self._advance(MPI.Request.Testall)
            finally:
                self._lock.release()
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the message has been sent or has arrived; see Work.wait."""
        if not self._done.is_set():
            refuse_if_forked(self.name)
        if timeout is None:
            with self._lock, self._waiting():
                self._advance(MPI.Request.Waitall)
        else:
            pause, limit = threading.Event(), MPI.Wtime() + timeout
            while not self.is_completed() and MPI.Wtime() < limit:
                pause.wait(1e-4)
        self._raise(timeout)

    def cancel(self) -> None:
        """Gives up a message that the other rank has not begun; it then ends with an error."""
        self._cancelled = True
        for request in [*self._requests, *self._pieces]:
            request.Cancel()

    def _start(self) -> None:
        raise NotImplementedError

    def _arrive(self) -> list[MPI.Request]:
        """Called when all requests are complete; returns those that are to be waited for next."""
        return []

    def _advance(self, complete: Callable[..., Any]) -> None:
        """Goes on as far as `complete`, Testall or Waitall, has it. An error is kept for the caller that waits."""
        if self._done.is_set():
            return
        error: OperationError | None = None
        try:
            while self._requests:
                if not complete(self._requests) or (self._cancelled and not complete(self._pieces)):
                    return
                if self._cancelled:
                    raise OperationError(f"{self.name}: the communicator was closed, and no message had been sent")
                self._requests = self._arrive()
            self._finish()
        except OperationError as failure:
            error = failure
        except Exception as failure:  # MPI may still use the memory: the message stays in `under_way`
            self._end(failure)
            return
        self._data = None
        under_way.discard(self)
        self._end(error, expected=self._cancelled)


class Sending(Message):
    """A message that leaves."""

    def _start(self) -> None:
        data, channel = self._data, self.channel
        assert data is not None
        header = _HEADER.pack(_NUMBERS[data.dtype], data.nbytes)
        if data.nbytes <= INLINE_BYTES:
            header += data.flat.tobytes()
        self._requests.append(channel.comm.Isend([header, MPI.BYTE], channel.peer, channel.tag))
        if data.nbytes > INLINE_BYTES:
            tag = channel.pieces_tag(self.number)
            for piece in _pieces_of(data):
                self._requests.append(channel.comm.Isend([piece, MPI.BYTE], channel.peer, tag))


class Receiving(Message):
    """A message that arrives. data: None: whatever comes is dropped."""

    def _start(self) -> None:
        data, channel = self._data, self.channel
        self._header: np.ndarray[Any, Any] | None = np.empty(_HEADER.size + INLINE_BYTES, np.uint8)
        self._requests.append(channel.comm.Irecv([self._header, MPI.BYTE], channel.peer, channel.tag))
        if data is not None and data.nbytes > INLINE_BYTES:
            tag = channel.pieces_tag(self.number)
            for piece in _pieces_of(data):  # now, as they come while this rank is in other operations
                self._pieces.append(channel.comm.Irecv([piece, MPI.BYTE], channel.peer, tag))

    def _arrive(self) -> list[MPI.Request]:
        if self._header is None:  # then these were the pieces
            return []
        data, header, self._header = self._data, self._header, None
        number, nbytes = _HEADER.unpack_from(header.data)
        dtype = _DTYPES[number]
        if data is None or dtype is not data.dtype or nbytes != data.nbytes:
            self._take_away(nbytes)
        if data is None:
            return []
        if dtype is not data.dtype or nbytes != data.nbytes:
            raise OperationError(
                f"{self.name}: x has {data.size} elements of {data.dtype.name}, and a message of "
                f"{nbytes // dtype.itemsize} of {dtype.name} came; needs as many of the same dtype"
            )
        if not self._pieces:
            data.flat.view(np.uint8)[:] = header[_HEADER.size : _HEADER.size + nbytes]
        return self._pieces

    def _take_away(self, nbytes: int) -> None:
        """Receives what follows the header of a message of so many bytes, which its sender has begun to send."""
        matched = 0
        for request in self._pieces:
            status = MPI.Status()
            request.Cancel()
            with contextlib.suppress(MPI.Exception):  # the piece is longer than the memory for it
                request.Wait(status)
            matched += not status.Is_cancelled()
        rest = nbytes - matched * PIECE_BYTES if nbytes > INLINE_BYTES else 0
        while rest > 0:
            memory = np.empty(min(rest, PIECE_BYTES), np.uint8)
            self.channel.comm.Recv([memory, MPI.BYTE], self.channel.peer, self.channel.pieces_tag(self.number))
            rest -= memory.size


def _nothing() -> None:
    pass


def _pieces_of(data: Buffer) -> list[np.ndarray[Any, Any]]:
    """The bytes of an array in pieces that every MPI can count."""
    flat = data.flat.view(np.uint8)
    return [flat[i : i + PIECE_BYTES] for i in range(0, flat.size, PIECE_BYTES)]


@atexit.register
def _keep_until_mpi_ends() -> None:
    """Keeps what is under way beyond the end of the interpreter, after which MPI_Finalize comes."""
    for message in list(under_way):
        if not is_forked() and not MPI.Is_finalized() and not message.is_completed():
            keep_for_ever(message)
