"""Backend "symmetric": the one-copy collectives of `reductions` and `movements`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base.buffers import Buffer, DeviceBuffer, DType
from ...base.reduction import PREFIXES, Reduction
from ...memory.counters import ORDERED
from ...memory.peer_memory import connect
from ...process.topology import Topology
from ..backend import Backend, Resources
from .group import Group, StagedSizes
from .movements import Movements
from .processor import Processor
from .reductions import Reductions

if TYPE_CHECKING:  # at run time with the first reduction of parts
    from .partitioned import PartitionedReduction, Pool

# Bytes of an operation. Up to so many, and so many of all ranks together, it costs less to reduce all of it than to
# meet once more. Private arrays that fit into one chunk go through the scratch, as the kernel's copies cost more than
# the copies that they save; in several chunks the ranks wait for each other's caches as long.
_WHOLE, _WHOLE_TOGETHER = 64 << 10, 256 << 10
_CHUNK, _SMALLER_CHUNK, _FEW_RANKS = 1 << 20, 512 << 10, 8
_REDUCED = 512 << 10  # all_reduce and reduce of ranks with a core each
_EXCHANGED = 256 << 10  # all_to_all and gather, whose copies the scratch doubles
_OVERSUBSCRIBED = 16 << 10  # symmetric arrays, of ranks that share cores: to meet costs them more than the copies


def chunk_bytes(topology: Topology) -> int:
    """Returns the bytes of scratch for each rank and buffer: not too much in all where there are many ranks."""
    return _CHUNK if topology.local_size <= _FEW_RANKS else _SMALLER_CHUNK


def staged_sizes(topology: Topology) -> StagedSizes:
    """Returns what takes the staged way. Ranks of several nodes meet by MPI, for which its meetings are too many."""
    if topology.nodes > 1:
        return StagedSizes()
    return StagedSizes(
        symmetric=_OVERSUBSCRIBED if topology.oversubscribed else 0,
        private=chunk_bytes(topology),
        reduced=chunk_bytes(topology) if topology.oversubscribed else _REDUCED,
        exchanged=_EXCHANGED,
        whole=min(_WHOLE, _WHOLE_TOGETHER // topology.local_size),
    )


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
        topology = resources.topology
        processor = Processor(chunk_bytes(topology))
        staged = staged_sizes(topology) if resources.use_scratch else StagedSizes()
        return cls(resources.meetings, resources.allocator, connect(topology.node), processor, staged)

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Declines scan and exscan, which need the scratch, where it is spared."""
        return super().suits(operation, dtype, elements, op, even) and (
            operation not in PREFIXES or self.staged.whole > 0
        )

    @property
    def reaches_arrays(self) -> bool:
        """Returns whether the kernel lets the ranks read each other's memory."""
        return self._peers is not None

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> PartitionedReduction | None:
        """Makes the reduction if the ranks fill the node's cores and share the memory of all parts; else None."""
        have = self._resources
        if have is None or not have.topology.fills_cores or not ORDERED or self.ranks == 1:
            return None
        from .partitioned import PartitionedReduction, Pool, position_of

        own = [None if isinstance(data, DeviceBuffer) else position_of(data, have.allocator) for data in parts]
        found = have.comm.allgather((op.name, own))
        described = [(name, [part and part._replace(start=0) for part in places]) for name, places in found]
        if op.premultiplied or None in own or any(other != described[0] for other in described):
            return None
        if self._pool is None:
            # Not this object, which has the pool.
            group = Group(self.meetings, have.allocator, processor=self.processor)
            self._pool = Pool(group, have.allocator, oversubscribed=have.topology.oversubscribed)
        counts = self._pool.counts()
        if counts is None:
            return None
        places = [part for _, part in found]
        return PartitionedReduction(self._pool, counts, have.allocator, parts, places, op, have.positions.has_come)
