"""The one-copy collectives as a backend."""

from __future__ import annotations

from ...memory.peer_memory import connect
from ..backend import Backend, Resources
from .movements import Movements
from .reductions import Reductions


class Symmetric(Reductions, Movements, Backend):
    """All one-copy collectives of one group of ranks that share memory."""

    name = "symmetric"
    shares_memory = True

    @classmethod
    def of_node(cls, resources: Resources) -> Symmetric | None:
        """Those of the whole group; None unless all its ranks are on one node and share memory. Collective."""
        return cls.inside_node(resources) if resources.topology.nodes == 1 else None

    @classmethod
    def inside_node(cls, resources: Resources) -> Symmetric | None:
        """Those of the group's ranks on this node; None if the ranks of some node share no memory. Collective."""
        if resources.meetings is None:
            return None
        return cls(resources.meetings, resources.allocator, connect(resources.topology.node))
