"""A message in flight, from its first bytes to its last.

    up to INLINE_BYTES      header and elements             in one MPI message
    longer                  header | piece | piece ...      pieces straight from memory to memory

The header holds the dtype and the length. Headers of one peer and tag match receives one to one, whatever their
lengths, and pieces have an MPI tag of their own, by the number of their message: none is taken for the next one's. So a
receiver detects a message that does not fit by its header, receives and discards the pieces, and raises an error; the
next message is not affected.

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
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base.arguments import seconds
from ..base.buffers import DTYPES, Buffer, DType
from ..errors import OperationError
from ..memory.lifetime import keep_for_ever
from ..process.forked import is_forked, refuse_if_forked
from ..runtime.progress import Work, after_all_operations

INLINE_BYTES = 8 << 10
PIECE_BYTES = 1 << 30  # not every MPI counts past 2^31
_HEADER = struct.Struct("=2q")  # number of the dtype, bytes
_LAST_SENDS_S = 10.0  # that Intel MPI's may take at the end of the program
_EAGER_S, _SHORTEST_NAP_S, _LONGEST_NAP_S = 1e-4, 2e-5, 2e-4
_TAGS = 1 << 15  # MPI tags of headers are below, those of pieces above
_DTYPES = list(DTYPES.values())
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}

under_way: set[Message] = set()  # of this process
_not_begun: set[Message] = set()  # those that wait for their turn in `Channels`


class Channel:
    """The messages to or from one peer with one tag, in their order.

    comm: for messages alone.
    messages: how many there were; as both ends count them, a message has one number.
    probed: the header of the next message to come in, if a probe has taken it.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int) -> None:
        self.comm, self.peer, self.tag = comm, peer, tag
        self.messages = 0
        self.probed: Header | None = None
        largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int)
        self._slots = max(1, (largest + 1) // _TAGS - 1)

    def next(self) -> int:
        """The number of the next message."""
        self.messages += 1
        return self.messages

    def take_header(self) -> Header:
        """The header of the next message to come in, as a probe has left it or to be received."""
        header, self.probed = self.probed or Header(self), None
        return header

    def pieces_tag(self, number: int) -> int:
        """The MPI tag of that message's pieces; it comes again when the message has long ended."""
        return (1 + number % self._slots) * _TAGS + self.tag


class Header:
    """A message's header, and its elements where they are few. request: completes when they are there.

    found: what a probe has found of the message; None: the next one of the channel.
    """

    def __init__(self, channel: Channel, found: MPI.Message | None = None) -> None:
        self._memory = np.empty(_HEADER.size + INLINE_BYTES, np.uint8)
        target = [self._memory, MPI.BYTE]
        if found is None:
            self.request = channel.comm.Irecv(target, channel.peer, channel.tag)
        else:
            self.request = found.Irecv(target)

    def read(self) -> tuple[DType, int]:
        """The element type of the message and its bytes."""
        number, nbytes = _HEADER.unpack_from(self._memory.data)
        return _DTYPES[number], nbytes

    def elements(self, nbytes: int) -> np.ndarray[Any, Any]:
        """The bytes that came with it."""
        return self._memory[_HEADER.size : _HEADER.size + nbytes]


class Message(Work):
    """A Work that is MPI requests, which do not wait for the turn of other operations. `begin` starts it.

    channel: where it is, once it has begun.
    number: in its channel.
    waiting: a context for blocking.
    finish: called when the array is sent or filled.
    """

    def __init__(
        self,
        name: str,
        comm: MPI.Comm,
        data: Buffer | None,
        waiting: Callable[[], AbstractContextManager[None]],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(name)
        self.comm = comm
        self.channel: Channel
        self.number = 0
        self._data, self._waiting, self._finish = data, waiting, finish
        self._requests: list[MPI.Request] = []
        self._pieces: list[MPI.Request] = []
        self._lock = threading.Lock()
        self._started = self._cancelled = False
        self._begin_in_turn: Callable[[], None] = nothing
        under_way.add(self)  # before MPI knows of the array

    def begin(self, channel: Channel) -> None:
        """Makes it the channel's next message. With the lock of `Channels`, so that MPI has them in that order too."""
        try:
            self.channel, self.number = channel, channel.next()
            self._start()
            self._started = True
        finally:
            _not_begun.discard(self)  # last: a thread that waits for it goes to MPI as soon as nothing is left to begin

    def queue(self, begin_in_turn: Callable[[], None]) -> None:
        """Registers the function that will begin it; every wait or test of a message calls it."""
        self._begin_in_turn = begin_in_turn
        _not_begun.add(self)

    def is_completed(self) -> bool:
        """Returns whether the message has been sent or has arrived, or has failed; never blocks."""
        if not self._done.is_set():
            refuse_if_forked(self.name)
        begin_in_turn()
        if self._started and not self._done.is_set() and self._lock.acquire(blocking=False):
            try:
                self._advance(MPI.Request.Testall)
            finally:
                self._lock.release()
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the message has been sent or has arrived; see Work.wait."""
        if timeout is not None:
            timeout = seconds(f"{self.name}: wait", timeout)
        if not self._done.is_set():
            refuse_if_forked(self.name)
        if timeout is None:
            if _not_begun:  # the other rank may wait for this one to take a message that it sends
                with self._waiting():
                    poll(self._has_ended_or_is_last)
            with self._lock, self._waiting():
                self._advance(MPI.Request.Waitall)
        else:
            pause, limit = threading.Event(), MPI.Wtime() + timeout
            while not self.is_completed() and MPI.Wtime() < limit:
                pause.wait(1e-4)
        self._raise(timeout)

    def _has_ended_or_is_last(self) -> bool:
        """Returns whether it has ended, or MPI alone can complete it."""
        return self.is_completed() or (self._started and not _not_begun)

    def drop(self) -> None:
        """Ends a message that has not begun, with an error."""
        self._data = None
        under_way.discard(self)
        _not_begun.discard(self)
        self._end(OperationError(self._unsent()), expected=True)

    def _unsent(self) -> str:
        return f"{self.name}: the communicator was closed, and no message had been sent"

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
                    raise OperationError(self._unsent())
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
    """A message that this rank sends."""

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

    @property
    def sender(self) -> int:
        """The rank from which it comes. Raises OperationError while that is open, as of a receive from any rank."""
        if not self._started:
            raise OperationError(f"{self.name}: no message has come yet; needs a wait() before its sender is known")
        return self.channel.peer

    def _start(self) -> None:
        data, channel = self._data, self.channel
        self._header: Header | None = channel.take_header()
        self._requests.append(self._header.request)
        if data is not None and data.nbytes > INLINE_BYTES:
            tag = channel.pieces_tag(self.number)
            for piece in _pieces_of(data):  # now, as they come while this rank is in other operations
                self._pieces.append(channel.comm.Irecv([piece, MPI.BYTE], channel.peer, tag))

    def _arrive(self) -> list[MPI.Request]:
        if self._header is None:  # then these were the pieces
            return []
        data, header, self._header = self._data, self._header, None
        dtype, nbytes = header.read()
        if data is None or dtype is not data.dtype or nbytes != data.nbytes:
            self._discard_elements(nbytes)
        if data is None:
            return []
        if dtype is not data.dtype or nbytes != data.nbytes:
            raise OperationError(
                f"{self.name}: x has {data.size} elements of {data.dtype.name}, and a message of "
                f"{nbytes // dtype.itemsize} of {dtype.name} came; needs as many of the same dtype"
            )
        if not self._pieces:
            data.flat.view(np.uint8)[:] = header.elements(nbytes)
        return self._pieces

    def _discard_elements(self, nbytes: int) -> None:
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


def nothing() -> None:
    """Does nothing; for a message that ends without more ado."""


def begin_in_turn() -> None:
    """Begins what waits for its turn, as far as messages have come for it."""
    for begin in {message._begin_in_turn for message in list(_not_begun)}:  # one for all of a queue
        begin()


def poll(is_there: Callable[[], bool], seconds: float = inf) -> bool:
    """Calls the function until it returns True, after a moment with naps in between; False when the seconds pass."""
    begin, nap = time.monotonic(), 0.0
    while not is_there():
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        if waited > _EAGER_S:
            nap = min(max(2 * nap, _SHORTEST_NAP_S), _LONGEST_NAP_S)
        time.sleep(nap)
    return True


def _pieces_of(data: Buffer) -> list[np.ndarray[Any, Any]]:
    """The bytes of an array in pieces that every MPI can count."""
    flat = data.flat.view(np.uint8)
    return [flat[i : i + PIECE_BYTES] for i in range(0, flat.size, PIECE_BYTES)]


@after_all_operations
def _send_the_last_messages() -> None:
    """Completes sends that Intel MPI's MPI_Finalize would drop; other libraries complete them there."""
    if not is_forked() and not MPI.Is_finalized() and MPI.get_vendor()[0].startswith("Intel"):
        poll(lambda: all(m.is_completed() for m in list(under_way) if isinstance(m, Sending)), _LAST_SENDS_S)


@atexit.register
def _keep_until_mpi_ends() -> None:
    """Keeps what is under way beyond the end of the interpreter, after which MPI_Finalize comes."""
    for message in list(under_way):
        if not is_forked() and not MPI.Is_finalized() and not message.is_completed():
            keep_for_ever(message)
