"""Collectives over several nodes: one copy inside each node, a schedule between nodes over every local rank at once.

    all-reduce, 2 nodes of 2 ranks; rank r works on slice r mod 2 only, so the network carries each slice once a node

                    node 0                  node 1
        1           0 <-symmetric-> 1       2 <-symmetric-> 3         reduce-scatter inside the node
        2           0 <------- ring ------> 2                         all-reduce of slice 0 between nodes
                    1 <------- ring ------------------> 3             all-reduce of slice 1, at the same time
        3           0 <-symmetric-> 1       2 <-symmetric-> 3         all-gather inside the node

All-reduce and reduce-scatter do all of it at once, segment by segment. These and the all-gather and broadcast need as
many ranks on every node, numbered node by node (`Topology.regular`).

Reduce, gather, scatter and all_to_all send one message from a node to another, of all that its ranks have for those of
the other (`algorithms.hierarchical`). Their nodes may have any ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...base.buffers import Buffer, DType
from ...base.partition import Splits, even_counts, ranges
from ...base.reduction import Reduction
from ...schedules import algorithms
from ...schedules.schedule import Role
from ..backend import Backend, Call, Resources
from ..executor import Execution, Region, single, whole
from ..symmetric.backend import Symmetric
from .all_reduce import PipelinedAllReduce
from .movements import NodeMovements
from .reduce import PipelinedReduce
from .reduce_scatter import PipelinedReduceScatter

_OVER_ANY_NODES = frozenset({"reduce", "gather", "scatter", "all_to_all"})
# Limit for a reduce that "auto" takes. Its root receives one array from each other node; from three nodes on a long one
# costs less by a tree (`price`).
_MOST_NODES = 2


class Hierarchy(Backend):
    """The two levels of one group. symmetric: the one-copy collectives inside this node."""

    name = "hierarchical"
    shares_memory = True
    _regular = True

    def __init__(self, resources: Resources, symmetric: Symmetric) -> None:
        topology, allocator, scratch = resources.topology, resources.allocator, resources.scratch
        comm, meetings = resources.comm, symmetric.meetings
        self._topology = topology
        self._node = symmetric
        self._regular = topology.regular
        nodes = tuple(sorted(set(comm.allgather(topology.members))))
        self._reduce = PipelinedReduce(comm, nodes, meetings, allocator, scratch)
        self._movements = NodeMovements(comm, nodes, meetings, allocator)
        if topology.regular:
            self._all_reduce = PipelinedAllReduce(topology, meetings, allocator, scratch)
            self._reduce_scatter = PipelinedReduceScatter(topology, meetings, allocator, scratch)
        self._across = topology.across
        self._scratch = scratch

    @classmethod
    def of_nodes(cls, resources: Resources) -> Hierarchy | None:
        """The levels of a group of several nodes; None unless the ranks of each share memory. Collective."""
        symmetric = Symmetric.inside_node(resources)
        return None if symmetric is None else cls(resources, symmetric)

    def serves(self, operation: str) -> bool:
        """Returns whether it has the operation on such nodes."""
        return super().serves(operation) and (self._regular or operation in _OVER_ANY_NODES)

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Declines a reduce over so many nodes that its root receives more than it would by a tree."""
        return super().suits(operation, dtype, elements, op, even) and (
            operation != "reduce" or self._topology.nodes <= _MOST_NODES
        )

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        """A pipeline through both levels."""
        return partial(self._all_reduce.run, x, op)

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Call:
        """A pipeline through both levels; the same bits as those of `all_reduce`."""
        return partial(self._reduce_scatter.run, out, x, op, counts)

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Call:
        """Gathers the parts of this local rank between nodes, straight into out; then those of each inside the node."""
        return partial(self._gather, out, x, counts)

    def broadcast(self, x: Buffer, root: int) -> Call:
        """Broadcasts from the root to its peers on the other nodes, then from that local rank inside each node."""
        return partial(self._distribute, x, root)

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Call:
        """Reduces inside nodes, then the nodes' sums at the root; the bits of the other reductions."""
        return partial(self._reduce.run, x, root, op)

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """Sends what a node has for another as one message."""
        return self._movements.all_to_all(out, x, splits)

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """Sends all parts of a node as one message."""
        return self._movements.gather(out, x, root, counts)

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """Sends all parts for a node as one message."""
        return self._movements.scatter(out, x, root, counts)

    def _gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> None:
        local, nodes, me = self._topology.local_size, self._topology.nodes, self._topology.local_rank
        parts = ranges(counts)
        mine = parts[me::local]
        # Where out is one memory for the ranks of the node, none may write into it before all have come.
        self._node.meetings.barrier()
        schedule = algorithms.schedule("all_gather", "ring", nodes)
        regions = {Role.IN: single(x, self._across.Get_rank(), nodes), Role.OUT: Region(out, tuple(mine))}
        Execution(self._across, schedule, regions, counts[me::local], self._scratch).run()
        for node in range(nodes):
            first, last = parts[node * local][0], parts[(node + 1) * local - 1][1]
            here = counts[node * local : (node + 1) * local]
            self._node.all_gather(out.part(first, last), out.part(*mine[node]), here)()

    def _distribute(self, x: Buffer, root: int) -> None:
        local, me = self._topology.local_size, self._topology.local_rank
        source_node, source = divmod(root, local)
        if me == source:
            schedule = algorithms.schedule("broadcast", "tree", self._topology.nodes, source_node)
            parts = even_counts(x.size, schedule.chunks)
            Execution(self._across, schedule, {Role.OUT: whole(x, parts)}, parts, self._scratch).run()
        self._node.broadcast(x, source)()
