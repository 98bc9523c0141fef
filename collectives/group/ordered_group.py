"""A group of ranks whose operations run in the order of issue: who is in it, and the objects that work for it.

    parts    what it is set up with (`setup`): MPI communicators, Dispatch, Messages, the watchdog's Guard
    issuer   operations in their order (`issue`), refused once it cannot be used any more (`refusal`)
    calls    operations that are checked and prepared (`calls`)
    end      `close` (`end`)

What users call of it is `close` and `abort`. All else is in the classes that derive from it, and in `Communicator`,
which derives from these.
"""

from __future__ import annotations

from mpi4py import MPI

from ..process.forked import refuse_if_forked
from ..runtime.watchdog import abort_job
from .calls import GroupCalls
from .end import GroupEnd
from .issue import Issuer
from .setup import set_up


class OrderedGroup:
    """The ranks of an mpi4py communicator, and one queue of operations among them. Construction is collective.

    Arguments and attributes: see `Communicator`.
    """

    def __init__(
        self, mpi: MPI.Intracomm | None = None, *, timeout: float | None = None, name: str = "", scratch: bool = True
    ) -> None:
        parts = self._parts = set_up(mpi, timeout, name, scratch, type(self))
        topology = parts.dispatch.topology
        self.mpi: MPI.Intracomm = parts.mpi
        self.rank: int = parts.dispatch.rank
        self.size: int = parts.dispatch.size
        self.local_rank, self.local_size, self.nodes = topology.local_rank, topology.local_size, topology.nodes
        self.node_ranks: tuple[int, ...] = topology.members
        self.node_cores: int = topology.cores
        self.layout: str = topology.layout
        self.world_ranks: tuple[int, ...] = tuple(max(rank, -1) for rank in parts.world)
        self.is_debugging: bool = parts.is_debugging
        self._timeout, self.name, self._scratch = timeout, name, bool(scratch)
        self._dispatch, self._messages = parts.dispatch, parts.messages
        self._issuer = Issuer(parts)
        self._refusal = self._issuer.refusal
        self._calls = GroupCalls(self._issuer)
        self._shortcuts, self._keep_shortcut = self._calls.shortcuts, self._calls.keep_shortcut  # for native.Shortcut
        self._end = GroupEnd(self._issuer)

    def __repr__(self) -> str:
        return self._parts.description

    def close(self) -> None:
        """Finishes what is queued and frees the duplicated communicators. Collective; the object is unusable after.

        Messages that were sent are delivered, or dropped if their receiver has not asked for them. Receives that
        nothing was sent for end with an OperationError.

        While an exception is handled, as in a `finally` block, it waits two seconds for the other ranks. If they do not
        come it frees nothing, so that the exception goes on and ends the job. Where an operation has timed out and is
        still under way after two seconds, it frees nothing.

        Raises, once all is freed, the first error of an asynchronous operation or message that no `wait` has raised;
        while an exception is handled that is left to the end of the program, which then fails.
        """
        self._end.close()

    def abort(self, status: int = 1) -> None:
        """Ends all processes of the job at once with an exit status. Does not return. From any thread."""
        refuse_if_forked("abort")
        abort_job(status)
