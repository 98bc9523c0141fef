"""Operations over several nodes with one message from a node to another, whatever the number of their ranks.

A movement is a list of *channels*. A channel carries the parts that the ranks of one node have for those of another:

    all_to_all, nodes (0, 1, 2) and (3, 4): the channel from the first node to the second

        put        0, 1, 2 write their parts for 3 and 4 into rank 0's memory, one behind the other
        message    rank 0 ------> rank 3
        get        3 and 4 take their parts out of rank 3's memory

or those that a rank has for the others of its own node, which take them out of its memory. Ranks of a node share the
channels to and from the other nodes. No rank puts anything where the parts lie one behind the other in the sender's
input, and none gets anything where they do so in the receiver's output: then the message is sent from that input, or
received in that output.

A reduce adds up each node's contributions, a slice a rank, in the memory of one rank; its sum goes to the root.

`movement` and `reduce` write all of it as a `Schedule`, in which a put or a get is a message inside the node, so that
it is proved and priced as the others are; `backends.hierarchical` carries out the channels. Nodes may have different
numbers of ranks, in any numbering.

Sources: Traeff and Rougier 2014, "MPI Collectives and Datatypes for Hierarchical All-to-all Communication"; Graham et
al. 2011, "Cheetah: A Framework for Scalable Hierarchical Collective Operations".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...base.partition import even_counts, ranges
from ..schedule import Chunks, Role, Round, Schedule, Step, chunk, copy, finish, recv, send
from ..schedule import reduce as reduce_step

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each node, ascending
NAME = "hierarchical"


@dataclass(frozen=True, slots=True)
class NodeChannel:
    """The parts that go from one node to another as one message, or from one rank to the others of its node.

    parts: the source and the destination of each, in the order in which they lie in the message.
    sender, receiver: the ranks in whose memory it lies before and after it has travelled; inside a node they are one.

    is_put: its sources put their parts into the sender's memory; else they lie in the sender's input as they are.
    is_got: its destinations get their parts from the receiver's memory; else they lie in the receiver's output.
    """

    parts: tuple[tuple[int, int], ...]
    sender: int
    receiver: int
    is_put: bool = True
    is_got: bool = True

    @property
    def is_local(self) -> bool:
        """Returns whether it stays inside a node."""
        return self.sender == self.receiver


def input_chunk(operation: str, source: int, destination: int) -> int:
    """The number of a part in the input of its source."""
    return source if operation == "gather" else destination


def output_chunk(operation: str, source: int, destination: int) -> int:
    """The number of a part in the output of its destination."""
    return destination if operation == "scatter" else source


def keeps_own(operation: str, rank: int, root: int) -> bool:
    """Returns whether a rank has a part for itself, which no channel carries."""
    return operation == "all_to_all" or rank == root


def channels(operation: str, nodes: Nodes, root: int = 0, node: int | None = None) -> Iterator[NodeChannel]:
    """The channels of a movement, in an order that is the same everywhere. node: only those that begin or end there."""
    number = len(nodes)
    home = next(place for place, members in enumerate(nodes) if root in members)
    for step in range(number):  # from each node to the next one, to the one after that, ...
        for here in range(number):
            there = (here + step) % number
            if node is not None and node not in (here, there):
                continue
            if operation == "all_to_all":
                yield from _between_all(nodes[here], nodes[there], step)
            elif operation == "gather" and there == home:
                yield from _to_root(nodes[here], root, step)
            elif operation == "scatter" and here == home:
                yield from _from_root(nodes[there], root, step)


def _between_all(here: tuple[int, ...], there: tuple[int, ...], step: int) -> Iterator[NodeChannel]:
    if step:
        # The ranks of a node take turns, by how far the other node is, so that both ends of a message are in step.
        sender, receiver = here[(step - 1) % len(here)], there[(step - 1) % len(there)]
        parts = tuple((source, destination) for source in here for destination in there)
        yield _channel("all_to_all", parts, sender, receiver)
    else:
        for source in here if len(here) > 1 else ():
            yield NodeChannel(tuple((source, other) for other in here if other != source), source, source)


def _to_root(here: tuple[int, ...], root: int, step: int) -> Iterator[NodeChannel]:
    if step:
        yield _channel("gather", tuple((source, root) for source in here), here[0], root)
    else:
        for source in here:
            if source != root:
                yield NodeChannel(((source, root),), source, source)


def _from_root(there: tuple[int, ...], root: int, step: int) -> Iterator[NodeChannel]:
    parts = tuple((root, destination) for destination in there if destination != root)
    if step:
        yield _channel("scatter", parts, root, there[0])
    elif parts:
        yield NodeChannel(parts, root, root)


def _channel(operation: str, parts: tuple[tuple[int, int], ...], sender: int, receiver: int) -> NodeChannel:
    leaving, arriving = ([number(operation, *part) for part in parts] for number in (input_chunk, output_chunk))
    return NodeChannel(
        parts,
        sender,
        receiver,
        is_put=any(source != sender for source, _ in parts) or not _is_run(leaving),
        is_got=any(destination != receiver for _, destination in parts) or not _is_run(arriving),
    )


def _is_run(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def most_channels(operation: str, nodes: Nodes, root: int = 0) -> int:
    """The most channels that one rank holds in its memory, those that leave it and those that come."""
    if operation == "all_to_all":
        return 1 + 2 * -(-(len(nodes) - 1) // min(map(len, nodes)))
    held: dict[int, int] = defaultdict(int)
    for one in channels(operation, nodes, root):
        held[one.sender] += one.is_put
        held[one.receiver] += one.is_got and not one.is_local
    return max(held.values(), default=1) or 1


@lru_cache(maxsize=64)
def movement(operation: str, nodes: Nodes, root: int = 0) -> Schedule:
    """An all_to_all, a gather or a scatter: puts in a first round, messages between nodes in a second, then gets."""
    ranks = sum(map(len, nodes))
    found = list(channels(operation, nodes, root))
    cells = _Cells(found)
    of_rank: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for number, one in enumerate(found):
        for rank in {one.sender, one.receiver, *(rank for part in one.parts for rank in part)}:
            of_rank[rank].append(number)

    def rounds(rank: int) -> list[Round]:
        puts: list[Step] = []
        messages: list[Step] = []
        gets: list[Step] = []
        if keeps_own(operation, rank, root):
            own = input_chunk(operation, rank, rank), output_chunk(operation, rank, rank)
            puts.append(copy(chunk(Role.IN, own[0]), chunk(Role.OUT, own[1])))
        for number in of_rank[rank]:
            one = found[number]
            for place, (source, destination) in enumerate(one.parts):
                leaving = chunk(Role.IN, input_chunk(operation, source, destination))
                arriving = chunk(Role.OUT, output_chunk(operation, source, destination))
                if one.is_put:
                    puts += _passed(rank, source, leaving, one.sender, cells.leaving(number, place))
                if one.is_got:
                    gets += _passed(rank, one.receiver, cells.arriving(number, place), destination, arriving)
            if not one.is_local:
                messages += _passed(
                    rank,
                    one.sender,
                    cells.leaving(number) if one.is_put else _run(Role.IN, input_chunk, operation, one),
                    one.receiver,
                    cells.arriving(number) if one.is_got else _run(Role.OUT, output_chunk, operation, one),
                )
        return [tuple(steps) for steps in (puts, messages, gets) if steps]

    return Schedule(NAME, operation, ranks, ranks, rounds, root, work=cells.most)


class _Cells:
    """The places of parts in the memory of the ranks that hold the channels."""

    def __init__(self, found: list[NodeChannel]) -> None:
        self._found = found
        self._leaving: dict[int, int] = {}
        self._arriving: dict[int, int] = {}
        used: dict[int, int] = defaultdict(int)
        for number, one in enumerate(found):
            for wanted, starts, rank in (
                (one.is_put, self._leaving, one.sender),
                (one.is_got and not one.is_local, self._arriving, one.receiver),
            ):
                if wanted:
                    starts[number] = used[rank]
                    used[rank] += len(one.parts)
        self.most = max(used.values(), default=0)

    def leaving(self, number: int, place: int | None = None) -> Chunks:
        return self._cells(self._leaving[number], number, place)

    def arriving(self, number: int, place: int | None = None) -> Chunks:
        starts = self._leaving if self._found[number].is_local else self._arriving
        return self._cells(starts[number], number, place)

    def _cells(self, start: int, number: int, place: int | None) -> Chunks:
        if place is not None:
            return chunk(Role.WORK, start + place)
        return Chunks(Role.WORK, start, start + len(self._found[number].parts))


def _run(role: Role, number: Callable[[str, int, int], int], operation: str, one: NodeChannel) -> Chunks:
    first = number(operation, *one.parts[0])
    return Chunks(role, first, first + len(one.parts))


def _passed(rank: int, giver: int, source: Chunks, taker: int, target: Chunks) -> list[Step]:
    """A rank's step of what goes from the giver to the taker."""
    if giver == taker:
        return [copy(source, target)] if rank == giver else []
    return [send(source, taker)] * (rank == giver) + [recv(target, giver)] * (rank == taker)


def leaders(nodes: Nodes, root: int) -> list[int]:
    """The rank of each node that has the node's sum in a reduce: the root, and elsewhere the first one."""
    return [root if root in members else members[0] for members in nodes]


@lru_cache(maxsize=64)
def reduce(nodes: Nodes, root: int = 0) -> Schedule:
    """Reduces slices inside each node, collects them on its leader, and adds the leaders' sums on the root."""
    chunks = max(map(len, nodes))
    heads = leaders(nodes, root)

    def rounds(rank: int) -> list[Round]:
        members, head = next((m, h) for m, h in zip(nodes, heads, strict=True) if rank in m)
        slices = ranges(even_counts(chunks, len(members)))
        mine = slices[members.index(rank)]
        others = [(other, part) for other, part in zip(members, slices, strict=True) if other != rank]
        combine = [send(Chunks(Role.WORK, *part), other) for other, part in others]
        combine += [reduce_step(*mine, other) for other, _ in others]
        if rank == head:
            collect = [recv(Chunks(Role.WORK, *part), other) for other, part in others]
        else:
            collect = [send(Chunks(Role.WORK, *mine), head)]
        across: list[Step] = []
        if rank == root:
            across = [reduce_step(0, chunks, other) for other in heads if other != root]
        elif rank == head:
            across = [send(Chunks(Role.WORK, 0, chunks), root)]
        complete = [finish(0, chunks)] * (rank == root)
        return [tuple(steps) for steps in (combine, collect, across, complete) if steps]

    return Schedule(NAME, "reduce", sum(map(len, nodes)), chunks, rounds, root)
