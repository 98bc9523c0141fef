"""Backend "symmetric_or_mpi": one copy between arrays in symmetric memory, the MPI library's own for all others.

A rank knows of its own arrays alone whether they are symmetric. So the ranks meet first, as for "symmetric", and see
it of all arrays. For "auto" this is the way of sizes at which each of the two is the faster one on its arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base.buffers import DType
from ..base.reduction import Reduction
from .backend import Backend, Call
from .symmetric.backend import Symmetric
from .symmetric.operation import Operation


def _either(operation: str) -> Callable[..., Call]:
    """Makes the method that prepares an operation for both backends.

    At each call the ranks choose one by where all their arrays lie.
    """

    def prepare(self: SymmetricOrLibrary, *arguments: Any) -> Call:
        made: Operation = getattr(self._symmetric, operation)(*arguments)
        return made.or_else(getattr(self._library, operation)(*arguments))

    return prepare


class SymmetricOrLibrary(Backend):
    """The operations that both serve, of a group whose ranks share memory."""

    name = "symmetric_or_mpi"
    title = "MPI"
    shares_memory = True

    def __init__(self, symmetric: Symmetric, library: Backend) -> None:
        self._symmetric, self._library = symmetric, library

    def reduces(self, dtype: DType, op: Reduction) -> bool:
        """Returns whether both have the operator on the element type."""
        return self._symmetric.reduces(dtype, op) and self._library.reduces(dtype, op)

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Declines what the library declines."""
        return self._library.suits(operation, dtype, elements, op, even)

    all_reduce = _either("all_reduce")
    reduce_scatter = _either("reduce_scatter")
    reduce = _either("reduce")
    all_gather = _either("all_gather")
    all_to_all = _either("all_to_all")
    broadcast = _either("broadcast")
    gather = _either("gather")
    scatter = _either("scatter")
