"""Collectives over several nodes: one copy inside each node, a schedule between nodes over every local rank at once.

    all-reduce, 2 nodes of 2 ranks; rank r works on slice r mod 2 only, so the network carries each slice once a node

                    node 0                  node 1
        1           0 <-symmetric-> 1       2 <-symmetric-> 3         reduce-scatter inside the node
        2           0 <------- ring ------> 2                         all-reduce of slice 0 between nodes
                    1 <------- ring ------------------> 3             all-reduce of slice 1, at the same time
        3           0 <-symmetric-> 1       2 <-symmetric-> 3         all-gather inside the node

It needs as many ranks on every node, numbered node by node (`Topology.regular`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .. import algorithms
from ..buffers import Buffer
from ..executor import Execution, single, whole
from ..partition import even_counts
from ..reduction import Reduction, rest_of
from ..schedule import Place
from ..scratch import Scratch
from ..symmetric import Symmetric
from ..topology import Topology
from .all_reduce import PipelinedAllReduce


class Hierarchy:
    """The two levels of one group."""

    def __init__(self, place: Topology, symmetric: Symmetric, all_reduce: PipelinedAllReduce, scratch: Scratch) -> None:
        self._place = place
        self._node = symmetric
        self._all_reduce = all_reduce
        self._across = place.across
        self._scratch = scratch
        self._ranks = place.local_size * place.nodes

    def all_reduce(self, x: Buffer, op: Reduction) -> None:
        """Bitwise equal on all ranks."""
        self._all_reduce.run(x, op)

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> None:
        """Inside the node for every node in turn, then between nodes the parts of this local rank."""
        inner = Reduction("sum") if op.name == "avg" else op
        local, nodes, me = self._place.local_size, self._place.nodes, self._place.local_rank
        mine = [counts[node * local + me] for node in range(nodes)]
        memory = self._scratch.take("levels", sum(mine) * x.dtype.itemsize).view(x.dtype.storage)
        partial = whole(Buffer(memory, x.dtype), mine)
        starts = (0, *accumulate(counts))
        for node, (low, high) in enumerate(partial.ranges()):
            part = x.part(starts[node * local], starts[(node + 1) * local])
            here = counts[node * local : (node + 1) * local]
            target = partial.data.part(low, high)
            self._node.reduce_scatter(target, part, inner, here)()
        schedule = algorithms.schedule("reduce_scatter", "ring", nodes)
        regions = {Place.IN: partial, Place.OUT: single(out, self._across.Get_rank(), nodes)}
        Execution(self._across, schedule, regions, mine, self._scratch, rest_of(op)).run()
        self._average(out, op)

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> None:
        """Between nodes the parts of this local rank, then inside the node the parts of each node."""
        local, nodes, me = self._place.local_size, self._place.nodes, self._place.local_rank
        mine = [counts[node * local + me] for node in range(nodes)]
        memory = self._scratch.take("levels", sum(mine) * x.dtype.itemsize).view(x.dtype.storage)
        gathered = whole(Buffer(memory, x.dtype), mine)
        schedule = algorithms.schedule("all_gather", "ring", nodes)
        regions = {Place.IN: single(x, self._across.Get_rank(), nodes), Place.OUT: gathered}
        Execution(self._across, schedule, regions, mine, self._scratch).run()
        starts = (0, *accumulate(counts))
        for node, (low, high) in enumerate(gathered.ranges()):
            part = out.part(starts[node * local], starts[(node + 1) * local])
            self._gather_node(part, gathered.data.part(low, high), counts[node * local : (node + 1) * local])

    def broadcast(self, x: Buffer, root: int) -> None:
        """Between nodes from the root to its peers, then inside each node from that local rank."""
        local, me = self._place.local_size, self._place.local_rank
        source_node, source = divmod(root, local)
        if me == source:
            schedule = algorithms.schedule("broadcast", "tree", self._place.nodes, source_node)
            parts = even_counts(x.size, schedule.chunks)
            Execution(self._across, schedule, {Place.OUT: whole(x, parts)}, parts, self._scratch).run()
        self._node.broadcast(x, source)()

    def _gather_node(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> None:
        self._node.all_gather(out, x, counts)()

    def _average(self, data: Buffer, op: Reduction) -> None:
        if op.name != "avg":
            return
        if data.dtype.widened:
            data.as_torch().div_(self._ranks)
        else:
            np.divide(data.flat, self._ranks, out=data.flat)
