"""The channels of one rank in one group: which message is which, from and to whom, in which order.

MPI cannot take a receive from any rank at once. The tag of a long message's pieces depends on the message's number in
its channel, and the channel is known only when the message comes. So the receive is kept here in a queue, one for each
tag, and takes the first message that `MPI_Improbe` finds. Later receives of that tag queue behind it, also those that
name a rank, so that messages meet receives in the order in which they are posted, as MPI promises.

    posted      recv from any | recv from 1 | recv from any         all with tag 5
    comes       5 from 1      | 5 from 1    | 5 from 2

The queues move while any message is waited for or asked, in any thread, one at a time (`lock`). What a probe finds
it takes from MPI, and keeps it in its channel, where the next receive of that channel begins with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from mpi4py import MPI

from .message import Channel, Header, Message, Receiving, nothing, under_way


class Channels:
    """The channels of one rank in one group. comm: for messages alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.lock = threading.RLock()
        self._outgoing: dict[tuple[int, int], Channel] = {}  # by peer and tag
        self._incoming: dict[tuple[int, int], Channel] = {}
        self._queued: dict[int, deque[tuple[Receiving, int | None]]] = {}  # by tag, with the rank that each names
        self._turns: dict[int, Callable[[], None]] = {}  # by tag: what begins its queue
        self._probed: list[Channel] = []  # that may hold a header

    def outgoing(self, dest: int, tag: int) -> Channel:
        """The channel to a rank."""
        return self._channel(self._outgoing, dest, tag)

    def incoming(self, source: int, tag: int) -> Channel:
        """The channel from a rank."""
        return self._channel(self._incoming, source, tag)

    def has(self, work: Any) -> bool:
        """Returns whether it is a message of the group."""
        return isinstance(work, Message) and work.comm is self.comm

    def begin(self, message: Message, peer: int | None, tag: int) -> None:
        """Begins a message to a rank, or from one, or from any (None), behind those that were begun before."""
        with self.lock:
            if not isinstance(message, Receiving):
                assert peer is not None
                message.begin(self.outgoing(peer, tag))
            elif peer is None or self._queued.get(tag):
                message.queue(self._turns.setdefault(tag, partial(self.begin_queued, tag)))
                self._queued.setdefault(tag, deque()).append((message, peer))
                self.begin_queued(tag)
            else:
                message.begin(self.incoming(peer, tag))

    def begin_queued(self, tag: int) -> None:
        """Begins the queued receives of a tag as far as messages have come for those from any rank."""
        with self.lock:
            queue = self._queued.get(tag)
            while queue:
                message, source = queue[0]
                channel = self._next_with_header(None, tag) if source is None else self.incoming(source, tag)
                if channel is None:
                    return
                queue.popleft()
                message.begin(channel)

    def probe(self, source: int | None, tag: int) -> tuple[int, Header] | None:
        """The sender and the header of the next message from a rank, or from any, that no posted receive takes.

        None if none has come; never blocks.
        """
        with self.lock:
            self.begin_queued(tag)
            if self._queued.get(tag):
                return None
            channel = self._next_with_header(source, tag)
            if channel is None or channel.probed is None or not channel.probed.request.Test():
                return None
            return channel.peer, channel.probed

    def has_sent_to_itself(self, rank: int, tag: int) -> bool:
        """Returns whether there is a message of the rank to itself that it has not begun to receive."""
        with self.lock:
            return self.outgoing(rank, tag).messages > self.incoming(rank, tag).messages

    def close(self) -> None:
        """Ends every message of the group: what was sent is delivered, a receive that nothing was sent for cancelled.

        Collective. A message that its receiver has not asked for is dropped. All ranks say how many they have sent,
        then each knows which of its receives are still to be filled, and takes the messages that are left over.
        """
        numbers: list[dict[int, int]] = [{} for _ in range(self.comm.Get_size())]
        for (dest, tag), channel in self._outgoing.items():
            numbers[dest][tag] = channel.messages
        sent = self.comm.alltoall(numbers)
        self._end_queues(sent)
        ending = [message for message in list(under_way) if message.comm is self.comm]
        for message in ending:
            channel = message.channel
            if isinstance(message, Receiving) and message.number > sent[channel.peer].get(channel.tag, 0):
                message.cancel()
        for source, counts in enumerate(sent):
            for tag, count in counts.items():
                for _ in range(count - self.incoming(source, tag).messages):
                    left_over = Receiving("close", self.comm, None, nullcontext, nothing)
                    left_over.begin(self.incoming(source, tag))
                    ending.append(left_over)
        while ending := [message for message in ending if not message.is_completed()]:
            time.sleep(1e-4)

    def _end_queues(self, sent: list[dict[int, int]]) -> None:
        """Begins the queued receives for which messages have been sent, and drops the others."""
        for tag, queue in self._queued.items():
            while queue and any(
                counts.get(tag, 0) > self.incoming(source, tag).messages for source, counts in enumerate(sent)
            ):
                self.begin_queued(tag)
                time.sleep(1e-4)
        self.drop_queued()

    def drop_queued(self) -> None:
        """Ends the queued receives, which MPI does not know of, with an error. Not collective."""
        with self.lock:
            for queue in self._queued.values():
                while queue:
                    queue.popleft()[0].drop()

    def _next_with_header(self, source: int | None, tag: int) -> Channel | None:
        """The channel whose next message has come, with the header taken from MPI."""
        self._probed = [channel for channel in self._probed if channel.probed is not None]
        for channel in self._probed:
            if channel.tag == tag and source in (None, channel.peer):
                return channel
        status = MPI.Status()
        found = self.comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        if found is None:
            return None
        channel = self.incoming(status.Get_source(), tag)
        channel.probed = Header(channel, found)
        self._probed.append(channel)
        return channel

    def _channel(self, channels: dict[tuple[int, int], Channel], other: int, tag: int) -> Channel:
        if (other, tag) not in channels:
            channels[other, tag] = Channel(self.comm, other, tag)
        return channels[other, tag]
