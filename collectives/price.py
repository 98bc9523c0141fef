"""Predicts how long a schedule takes on a modelled cluster, without running it.

All ranks' rounds are carried out in modelled time, event by event. A rank enters a round, posts its messages, and
ends the round when the last of them is done. A message of m bytes is ready when its sender and its receiver have
both posted it; it then passes, in order of arrival, the ports that it shares with other messages

    sender's rank -> network port of its node -> network port of the other node -> receiver's rank

each busy for m / bandwidth seconds, and is done one latency after it has passed the last of them. So the bytes of
messages begun together add up and their latencies overlap. A rank sends and receives at the same time, and so does
a network port. Messages inside a node pass the two ranks' ports alone. What has arrived is then reduced, at `gamma`
seconds a byte, one message after the other. For a message at a time this is the alpha-beta-gamma model of the
textbooks: alpha + m beta + m gamma, with alpha the latency and beta = 1 / bandwidth (Thakur, Rabenseifner and
Gropp 2005, "Optimization of collective communication operations in MPICH", section 2).

The model does not count: the time of the interpreter and of copies inside the MPI library; small messages that
are sent before the receiver asks (all wait for it here); transfer that overlaps with the reduction of what came before;
what the ranks of a node take from each other's cores, caches and memory; the shape of the network and its other users
(every pair of nodes is as near as any other); noise. Chunks are taken as equally large, and `finish` as free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .errors import ArgumentError, ScheduleError
from .schedules.layout import Cluster, Link, Receive, ScheduleLayout, Send
from .schedules.schedule import Schedule

__all__ = ["Cluster", "Pricing", "price"]


def price(schedule: Schedule, nbytes: float, cluster: Cluster) -> float:
    """Seconds from the start of all ranks to the end of the last; `Pricing` is cheaper for several sizes.

    nbytes: size of the operation's larger buffer (the gathered, the scattered, the reduced whole).
    """
    return Pricing(schedule, cluster).seconds(nbytes)


class Pricing:
    """A schedule laid out on a cluster, to be priced at any number of sizes.

    symmetry: False simulates every rank even where one node could stand for all (`layout`); the price is the same.
    Where the programs are too long to compare all ranks', those of a few stand for all.
    nodes: the ranks of each node, in place of the cluster's equal ones; then every rank is simulated.
    Raises ArgumentError for a schedule without symmetry that has more rounds than can be simulated.
    """

    def __init__(
        self,
        schedule: Schedule,
        cluster: Cluster,
        *,
        symmetry: bool = True,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._layout = ScheduleLayout(schedule, cluster, symmetry=symmetry, nodes=nodes)

    @property
    def simulated_ranks(self) -> int:
        """The number of ranks that are simulated: all, those of a node, or one."""
        return self._layout.simulated_ranks

    def seconds(self, nbytes: float) -> float:
        """The predicted time for an operation whose larger buffer has `nbytes`."""
        if not nbytes >= 0:
            raise ArgumentError(f"price: got {nbytes} bytes; needs 0 or more")
        return _ModelledRun(self._layout, nbytes / self._layout.schedule.chunks).carry_out()


@dataclass(frozen=True, slots=True)
class _PricedMessage:
    channel: Link
    send: Send
    reduces: bool
    path: tuple[int, ...]


# An event: when; 0 for the end of a message or a round, else how many ports of its path a message has come to; the
# order among equals; the message, or None for the rank that -order - 1 numbers.
_Event = tuple[float, int, int, "_PricedMessage | None"]


class _ModelledRun:
    """All ranks' rounds in modelled time."""

    def __init__(self, layout: ScheduleLayout, chunk_bytes: float) -> None:
        cluster, ranks = layout.cluster, layout.simulated_ranks
        self.layout = layout
        self.programs = layout.programs
        self.latency = {False: cluster.intra_latency, True: cluster.inter_latency}
        self.transfer = {  # seconds a chunk
            False: chunk_bytes / cluster.intra_bandwidth,
            True: chunk_bytes / cluster.inter_bandwidth,
        }
        self.reduction = chunk_bytes * cluster.gamma
        self.copying = chunk_bytes * cluster.copy
        self.position = [-1] * ranks
        self.open = [0] * ranks
        self.busy = [0.0] * ranks  # until when the rank reduces or copies
        self.end = [0.0] * ranks  # of its round, as far as known
        self.port_free = [0.0] * layout.ports
        self.sent: list[deque[Send]] = [deque() for _ in layout.channels]
        self.awaited: list[deque[Receive]] = [deque() for _ in layout.channels]
        self.events: list[_Event] = [(0.0, 0, -rank - 1, None) for rank in range(ranks)]

    def carry_out(self) -> float:
        events, last = self.events, 0.0
        heapify(events)
        while events:
            now, stage, order, message = heappop(events)
            if message is None:
                last = now
                self.advance(-order - 1, now)
            elif stage:
                self.pass_port(message, stage, now)
            else:
                self.arrive(message, now)
        stuck = [rank for rank, program in enumerate(self.programs) if self.position[rank] < len(program)]
        if stuck:
            s = self.layout.schedule
            raise ScheduleError(f"{s.name} {s.operation} on {s.ranks} ranks: ranks {stuck[:8]} wait for ever")
        return last

    def advance(self, rank: int, now: float) -> None:
        """Moves the rank to its next round."""
        self.position[rank] += 1
        if self.position[rank] == len(self.programs[rank]):
            return
        steps = self.programs[rank][self.position[rank]]
        self.busy[rank] = self.end[rank] = now + steps.copied * self.copying
        self.open[rank] = len(steps.sends) + len(steps.receives)
        if not self.open[rank]:
            heappush(self.events, (self.end[rank], 0, -rank - 1, None))
        for leaving in steps.sends:
            self.sent[leaving.channel].append(leaving)
            self.match(leaving.channel, now)
        for arriving in steps.receives:
            self.awaited[arriving.channel].append(arriving)
            self.match(arriving.channel, now)

    def match(self, number: int, now: float) -> None:
        """Starts a channel's next message if both of its sides are there."""
        if self.sent[number] and self.awaited[number]:
            leaving, arriving = self.sent[number].popleft(), self.awaited[number].popleft()
            channel = self.layout.channels[number]
            message = _PricedMessage(channel, leaving, arriving.reduces, leaving.ports + arriving.ports)
            if message.path:
                heappush(self.events, (now, 1, leaving.order, message))
            else:
                self.deliver(message, now)

    def pass_port(self, message: _PricedMessage, stage: int, now: float) -> None:
        """Sends the message's head through a port once that is free, and keeps the port busy with the body."""
        port = message.path[stage - 1]
        start = max(now, self.port_free[port])
        self.port_free[port] = start + message.send.chunks * self.transfer[message.channel.between_nodes]
        if stage < len(message.path):
            heappush(self.events, (start, stage + 1, message.send.order, message))
        else:
            self.deliver(message, start)

    def deliver(self, message: _PricedMessage, start: float) -> None:
        far = message.channel.between_nodes
        end = start + self.latency[far] + message.send.chunks * self.transfer[far]
        heappush(self.events, (end, 0, message.send.order, message))

    def arrive(self, message: _PricedMessage, now: float) -> None:
        source, destination = message.channel.source, message.channel.destination
        end = now
        if message.reduces:
            end = self.busy[destination] = max(now, self.busy[destination]) + message.send.chunks * self.reduction
        for rank, until in ((source, now), (destination, end)):
            self.end[rank] = max(self.end[rank], until)
            self.open[rank] -= 1
            if not self.open[rank]:
                heappush(self.events, (self.end[rank], 0, -rank - 1, None))
