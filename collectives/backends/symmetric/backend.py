"""The one-copy collectives as a backend."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.buffers import Buffer, DeviceBuffer
from ...base.reduction import Reduction
from ...memory.counters import ORDERED
from ...memory.peer_memory import connect
from ..backend import Backend, Resources
from .group import Group
from .movements import Movements
from .partitioned import PartitionedReduction, Pool, position_of
from .reductions import Reductions


class Symmetric(Reductions, Movements, Backend):
    """All one-copy collectives of one group of ranks that share memory."""

    name = "symmetric"
    shares_memory = True
    _resources: Resources | None = None  # where they are the whole group's
    _pool: Pool | None = None

    @classmethod
    def of_node(cls, resources: Resources) -> Symmetric | None:
        """Makes the whole group's backend; None unless all its ranks are on one node and share memory. Collective."""
        made = cls.inside_node(resources) if resources.topology.nodes == 1 else None
        if made is not None:
            made._resources = resources
        return made

    @classmethod
    def inside_node(cls, resources: Resources) -> Symmetric | None:
        """Makes the backend of this node's ranks; None if the ranks of some node share no memory. Collective."""
        if resources.meetings is None:
            return None
        return cls(resources.meetings, resources.allocator, connect(resources.topology.node))

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> PartitionedReduction | None:
        """Makes the reduction if the ranks fill the node's cores and share the memory of all parts; else None."""
        have = self._resources
        if have is None or not have.topology.full or not ORDERED or self.ranks == 1:
            return None
        own = [None if isinstance(data, DeviceBuffer) else position_of(data, have.allocator) for data in parts]
        found = have.comm.allgather((op.name, own))
        described = [(name, [part and part._replace(start=0) for part in places]) for name, places in found]
        if op.premultiplied or None in own or any(other != described[0] for other in described):
            return None
        if self._pool is None:
            memory = have.allocator.allocate(Pool.nbytes(self.ranks), shared=True, keep_file=True)
            if memory is None:
                return None
            # Not this object, which has the pool.
            group = Group(self.meetings, have.allocator, processor=self.processor)
            self._pool = Pool(group, memory, crowded=have.topology.crowded)
        places = [part for _, part in found]
        return PartitionedReduction(self._pool, have.allocator, parts, places, op, have.positions.has_come)
