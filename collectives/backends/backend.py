"""Interface of a backend: each operation as a call that is prepared once, and what the backend serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpi4py import MPI

from ..base.buffers import Buffer, DType
from ..base.partition import Splits
from ..base.reduction import Reduction
from ..base.scratch import Scratch
from ..memory.shared_memory import Allocator
from ..process.topology import Topology
from ..runtime.positions import Positions
from .meeting import Meetings

Call = Callable[[], None]


@dataclass
class Resources:
    """The communicators and the memory that the backends of one group are made from.

    comm: of the group's ranks, for their messages.
    scratch: memory that operations use in turn.
    meetings: where the ranks of a node meet in shared memory; None where those of some node share none.
    positions: where they show which operations they are in.
    use_scratch: whether one-copy operations may copy private arrays through shared memory (`symmetric.staging`); see
        `Communicator`.
    """

    comm: MPI.Intracomm
    topology: Topology
    allocator: Allocator
    scratch: Scratch
    meetings: Meetings | None
    positions: Positions
    use_scratch: bool = True


class PartitionedCall(Protocol):
    """An all_reduce of arrays that this rank hands in one by one, called to reduce them. Collective."""

    def hand_in(self, number: int) -> None:
        """Hands in this rank's next array.

        number: the operation that will reduce it, if this rank issues no other before.

        Raises ArgumentError while another such all_reduce is under way.
        """

    def withdraw(self) -> None:
        """Withdraws what this rank has handed in; it will not be reduced."""

    def __call__(self) -> None:
        """Reduces what was handed in. Raises MismatchError on all ranks if they are in different operations."""


class Backend:
    """One way to carry out operations among the ranks of one group, as one of its ranks sees it.

    Each method takes checked arguments and returns the call that carries the operation out, collectively and in the
    order of issue; it can be made again and again on the same arrays, and does not keep them alive. What does not
    depend on the other ranks is worked out before. A backend serves the operations that it defines.

    name: what `algorithm=` calls it.
    title: its name in errors.
    shares_memory: whether it needs memory that the ranks of a node share, and gains from arrays in symmetric memory.
    """

    name: str
    title = "the backend"
    shares_memory = False

    def serves(self, operation: str) -> bool:
        """Returns whether it has the operation."""
        return getattr(type(self), operation) is not getattr(Backend, operation)

    def reduces(self, dtype: DType, op: Reduction) -> bool:
        """Returns whether it has the operator on the element type."""
        return True

    def suits(self, operation: str, dtype: DType, elements: int, op: Reduction | None, even: bool) -> bool:
        """Returns whether "auto" may take it for what it serves. even: whether all ranks have as many elements."""
        return op is None or self.reduces(dtype, op)

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        """Reduces x in place on every rank; bitwise equal on all of them."""
        raise NotImplementedError

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> PartitionedCall | None:
        """An all_reduce of parts that are handed in one by one; None where it is no better than one after the other.

        Collective.
        """
        return None

    def reduce_scatter(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> Call:
        """Gives rank r counts[r] elements of the reduction; out may be x's own part."""
        raise NotImplementedError

    def reduce(self, x: Buffer, root: int, op: Reduction) -> Call:
        """Reduces x in place on the root."""
        raise NotImplementedError

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int]) -> Call:
        """Gathers counts[r] elements from rank r; x may be out's own part."""
        raise NotImplementedError

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """Sends send_counts[q] elements to rank q, and receives recv_counts[q] from it."""
        raise NotImplementedError

    def broadcast(self, x: Buffer, root: int) -> Call:
        """Broadcasts the root's x to all ranks."""
        raise NotImplementedError

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """Gathers counts[r] elements from rank r on the root, which alone has an out."""
        raise NotImplementedError

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """Sends counts[r] elements from the root, which alone has an x, to rank r."""
        raise NotImplementedError

    def scan(self, x: Buffer, op: Reduction) -> Call:
        """Reduces the x of ranks 0 to r in place on each rank r."""
        raise NotImplementedError

    def exscan(self, x: Buffer, op: Reduction) -> Call:
        """Reduces the x of ranks 0 to r - 1 in place on each rank r; x of rank 0 is unchanged."""
        raise NotImplementedError

    def barrier(self) -> Call:
        """Returns once every rank has called it."""
        raise NotImplementedError


def in_shared_memory(backends: Mapping[str, Backend]) -> str | None:
    """The name of the backend that shares memory, if the group has one."""
    return next((name for name, backend in backends.items() if backend.shares_memory), None)
