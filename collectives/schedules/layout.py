"""Maps a schedule to a modelled cluster: which messages share a port, and which ranks have to be simulated.

On thousands of ranks most algorithms do the same everywhere: a rank runs the program of the same local rank of the
first node with every peer shifted, by addition modulo p (ring, pairwise) or by exclusive or (recursive doubling). Then
all nodes are in the same state at all times, and it is enough to simulate one, whose messages to other nodes come back
to itself. The 33 million steps of a ring all-reduce on 4096 ranks, 8 a node, become 65 thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, sub, xor

from ..errors import ArgumentError
from .schedule import Kind, Schedule

# Programs of more rounds in all than this are compared on some ranks only.
_COMPARED_ROUNDS = 1 << 18
# Without symmetry, more than this would take hours and tens of gigabytes.
_SIMULATED_ROUNDS = 1 << 22


@dataclass(frozen=True)
class Cluster:
    """A modelled machine: equal nodes; rank r is on node r // ranks_per_node.

    intra_latency, inter_latency: seconds until a message arrives, inside a node and between two (alpha).
    intra_bandwidth, inter_bandwidth: bytes a second, each way, of a rank inside its node and of a network port.
    gamma: seconds to reduce a byte.
    copy: seconds to copy one in a schedule's own copies.
    ports: network ports of a node; its ranks share them in turn (local rank modulo ports).
    """

    ranks_per_node: int
    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    inter_bandwidth: float
    gamma: float = 0.0
    copy: float = 0.0
    ports: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.ports < 1:
            raise ArgumentError(
                f"Cluster: got {self.ranks_per_node} ranks_per_node and {self.ports} ports; needs at least one of each"
            )
        if not (self.intra_bandwidth > 0 and self.inter_bandwidth > 0):
            raise ArgumentError(
                f"Cluster: got intra_bandwidth {self.intra_bandwidth} and inter_bandwidth {self.inter_bandwidth} "
                f"bytes a second; needs more than 0"
            )
        costs = (self.intra_latency, self.inter_latency, self.gamma, self.copy)
        if not all(cost >= 0 for cost in costs):
            raise ArgumentError(f"Cluster: got intra_latency, inter_latency, gamma, copy {costs}; needs 0 or more each")


@dataclass(frozen=True, slots=True)
class Send:
    """A message is sent.

    channel: which pair of ranks.
    order: of those that come to a port at once.
    """

    channel: int
    chunks: int
    ports: tuple[int, ...]
    order: int


@dataclass(frozen=True, slots=True)
class Receive:
    """A message is awaited."""

    channel: int
    ports: tuple[int, ...]
    reduces: bool


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The cost of a round: chunks copied locally, and messages."""

    copied: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """The messages from one rank to another.

    Where one node is simulated for all, those of every pair of ranks in the same relative place.
    """

    source: int
    destination: int
    between_nodes: bool


# A step as far as its price goes: what it does, its peer (-1: none), chunks.
_Steps = tuple[tuple[Kind, int, int], ...]
_Costs = tuple[_Steps, ...]
# Two functions of (peer, first rank of the sender's node), modulo p: the peer as the first node would see it; and the
# inverse.
_Shift = tuple[Callable[[int, int], int], Callable[[int, int], int]]


class ScheduleLayout:
    """A schedule's rounds on a cluster, as far as they cost anything.

    simulated_ranks: how many ranks have to be simulated: all, a node's, or one.
    programs: their rounds.
    channels: pairs of ranks with messages, as `Send.channel` numbers them.
    ports: how many ports messages queue at.
    symmetry, nodes, errors: as for `price.Pricing`.
    """

    def __init__(
        self,
        schedule: Schedule,
        cluster: Cluster,
        *,
        symmetry: bool = True,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.schedule = schedule
        self.cluster = cluster
        self._node = min(cluster.ranks_per_node, schedule.ranks)
        if nodes is None:
            nodes = [range(start, start + self._node) for start in range(0, schedule.ranks, self._node)]
        else:
            symmetry = False
        self._places = {rank: (node, place) for node, ranks in enumerate(nodes) for place, rank in enumerate(ranks)}
        self._shares_ports = [cluster.ports < len(ranks) for ranks in nodes]
        # Ranks that move together: those of a node, or a single one where all are equally far from each other.
        self._unit = 1 if self._node in (1, schedule.ranks) else self._node
        symmetric = self._symmetry() if symmetry else None
        self.simulated_ranks = self._unit if symmetric else schedule.ranks
        self._channels: dict[tuple[int, int], int] = {}
        self._ports: dict[tuple[str, int], int] = {}
        self.programs = self._lay_out(*symmetric or (None, None))
        self.ports = len(self._ports)
        self.channels = [
            Link(source, destination % self.simulated_ranks, self._places[source][0] != self._places[destination][0])
            for source, destination in self._channels
        ]

    def _symmetry(self) -> tuple[_Shift, list[_Costs]] | None:
        """The shift by which programs repeat, and those of the ranks that are simulated; None if they do not."""
        ranks, unit = self.schedule.ranks, self._unit
        if ranks % unit or ranks == unit:
            return None
        for period in sorted({1, unit}):  # do all ranks run one program, or else all nodes?
            if shift := self._find_shift(period, first := [_costs_of(self.schedule, rank) for rank in range(period)]):
                return shift, [
                    _shifted(first[rank % period], shift[1], rank - rank % period, ranks) for rank in range(unit)
                ]
        return None

    def _find_shift(self, period: int, first: list[_Costs]) -> _Shift | None:
        """The shift by which the programs of all ranks come from those of the first `period` ranks."""
        ranks = self.schedule.ranks
        shifts = [(sub, add)]
        if not ranks & (ranks - 1) and not period & (period - 1):
            shifts.append((xor, xor))
        others = list(range(period, ranks))
        if max(map(len, first)) * ranks > _COMPARED_ROUNDS:
            far = ranks // period // 2 * period
            others = sorted({*range(period, 2 * period), far, ranks - period, ranks - 1})
        for rank in others:
            costs, start = _costs_of(self.schedule, rank), rank - rank % period
            shifts = [shift for shift in shifts if _shifted(costs, shift[0], start, ranks) == first[rank % period]]
            if not shifts:
                return None
        return shifts[0]

    def _lay_out(self, shift: _Shift | None, simulated_costs: list[_Costs] | None) -> list[list[RoundCost]]:
        programs: list[list[RoundCost]] = []
        known: dict[RoundCost, RoundCost] = {}
        total = 0
        for rank in range(self.simulated_ranks):
            costs = simulated_costs[rank] if simulated_costs else _costs_of(self.schedule, rank)
            rounds = [self._round(rank, steps, shift) for steps in costs]
            programs.append([known.setdefault(one, one) for one in rounds])
            total += len(rounds)
            if total * self.simulated_ranks > _SIMULATED_ROUNDS * (rank + 1):
                s = self.schedule
                raise ArgumentError(
                    f"price: {s.name} {s.operation} on {s.ranks} ranks has about {total // (rank + 1) * s.ranks} "
                    f"rounds, and every node has different ones; needs at most {_SIMULATED_ROUNDS}, or a number of "
                    f"ranks that fills the nodes of {self.cluster.ranks_per_node}"
                )
        return programs

    def _round(self, rank: int, steps: _Steps, shift: _Shift | None) -> RoundCost:
        leaving = [(peer, chunks) for kind, peer, chunks in steps if kind is Kind.SEND]
        arriving = [(peer, kind is Kind.REDUCE) for kind, peer, _ in steps if peer >= 0 and kind is not Kind.SEND]
        sends = []
        for number, (peer, chunks) in enumerate(leaving):
            # All nodes take one order, so that their times stay equal where messages come to a port at once.
            order = (number * self._unit + rank % self._unit) * self.schedule.ranks + rank // self._unit
            ports = self._contended_ports("out", rank, peer, len(leaving))
            sends.append(Send(self._channel(rank, peer), chunks, ports, order))
        receives = []
        for peer, reduces in arriving:
            start = 0 if shift is None else peer // self._unit * self._unit
            destination = rank if shift is None else shift[0](rank, start) % self.schedule.ranks
            ports = self._contended_ports("in", rank, peer, len(arriving))[::-1]
            receives.append(Receive(self._channel(peer - start, destination), ports, reduces))
        return RoundCost(sum(chunks for _, peer, chunks in steps if peer < 0), tuple(sends), tuple(receives))

    def _channel(self, source: int, destination: int) -> int:
        return self._channels.setdefault((source, destination), len(self._channels))

    def _contended_ports(self, way: str, rank: int, peer: int, messages: int) -> tuple[int, ...]:
        """The ports that a message passes at its one end, without those where it can meet no other."""
        keys = []
        if messages > 1:
            keys.append((f"rank {way}", rank))
        node, local = self._places[rank]
        if self._places[peer][0] != node and self._shares_ports[node]:
            keys.append((f"node {way}", node * self.cluster.ports + local % self.cluster.ports))
        return tuple(self._ports.setdefault(key, len(self._ports)) for key in keys)


def _costs_of(schedule: Schedule, rank: int) -> _Costs:
    """A rank's program without what costs nothing; not `schedule.program`, which would keep it in memory."""
    rounds = (
        tuple((s.kind, s.peer, s.target.stop - s.target.start) for s in steps if s.kind is not Kind.FINISH)
        for steps in schedule.rounds_of(rank)
    )
    return tuple(steps for steps in rounds if steps)


def _shifted(costs: _Costs, shift: Callable[[int, int], int], start: int, ranks: int) -> _Costs:
    return tuple(
        tuple((kind, peer if peer < 0 else shift(peer, start) % ranks, chunks) for kind, peer, chunks in steps)
        for steps in costs
    )
