"""Backend "symmetric_or_mpi": one copy between arrays in symmetric memory, the MPI library's own for all others.

A rank knows of its own arrays alone whether they are symmetric. So the ranks meet first, as for "symmetric", and see
it of all arrays. For "auto" this is the way of sizes at which each of the two is the faster one on its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.buffers import Buffer, DType
from ..base.partition import Splits
from ..base.reduction import Reduction
from .backend import Backend, Call
from .symmetric.backend import Symmetric


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

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        """Either one's."""
        return self._symmetric.all_reduce(x, op).or_else(self._library.all_reduce(x, op))

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Call:
        """Either one's."""
        other = self._library.reduce_scatter(out, x, op, counts)
        return self._symmetric.reduce_scatter(out, x, op, counts).or_else(other)

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Call:
        """Either one's."""
        return self._symmetric.reduce(x, root, op).or_else(self._library.reduce(x, root, op))

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Call:
        """Either one's."""
        return self._symmetric.all_gather(out, x, counts).or_else(self._library.all_gather(out, x, counts))

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """Either one's."""
        return self._symmetric.all_to_all(out, x, splits).or_else(self._library.all_to_all(out, x, splits))

    def broadcast(self, x: Buffer, root: int) -> Call:
        """Either one's."""
        return self._symmetric.broadcast(x, root).or_else(self._library.broadcast(x, root))

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """Either one's."""
        return self._symmetric.gather(out, x, root, counts).or_else(self._library.gather(out, x, root, counts))

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """Either one's."""
        return self._symmetric.scatter(out, x, root, counts).or_else(self._library.scatter(out, x, root, counts))
