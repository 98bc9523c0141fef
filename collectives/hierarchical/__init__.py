"""Collectives over several nodes: one copy inside each node, messages between nodes over every local rank at once.

`hierarchy` composes the levels; `all_reduce` is a pipeline through both.
"""

from .hierarchy import Hierarchy

__all__ = ["Hierarchy"]
