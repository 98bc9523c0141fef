"""Agreement of the ranks on the outcome of a test.

Each rank tells every other one its outcome over a communicator of its own and hears theirs, without
blocking, so that it can give up: a rank that failed and is missed by others that still wait for it must not
wait for them.
"""

import os
import pickle
import time
from typing import Any

GRACE = float(os.environ.get("MPIDL_TEST_GRACE", "20"))
_HEAD_START = 3.0  # seconds by which a rank that failed gives up before those that only heard of it
_LONGEST_PAUSE = 2e-3  # seconds between two looks; ranks that still compute need the cores


class DivergedError(Exception):
    """The ranks cannot agree: some failed and others do not come, or they are not at the same test.

    failed: the ranks that are known to have failed.
    """

    def __init__(self, message: str, failed: list[int]) -> None:
        super().__init__(message)
        self.failed = failed


class Agreement:
    """The exchange of outcomes over all ranks of the run."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        here = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.hosts = self._comm.allreduce(int(here.rank == 0))
        here.Free()
        self.missing: list[int] = []

    def exchange(self, what: str, value: Any, failed: bool = False) -> list[Any]:
        """All ranks' values, in rank order.

        what: what the exchange is about, the same on all ranks. failed: whether it failed on this rank.
        Raises DivergedError if the ranks come for different reasons, and if a failure is known and some rank
        does not arrive within the grace period; a rank that did not fail itself waits a little longer, so
        that the one that did speaks first.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        message = pickle.dumps((what, value, failed))
        sends = [self._comm.isend(message, rank) for rank in others]
        reasons, values = {self.rank: what}, {self.rank: value}
        failures = {self.rank} if failed else set()
        known_since = time.monotonic() if failed else None
        patience = GRACE if failed else GRACE + _HEAD_START
        pause = 1e-5
        self.missing = others
        while self.missing:
            for rank in self.missing:
                if self._comm.iprobe(rank):
                    reasons[rank], values[rank], other_failed = pickle.loads(self._comm.recv(source=rank))
                    if other_failed:
                        failures.add(rank)
                        known_since = known_since or time.monotonic()
            self.missing = [rank for rank in others if rank not in values]
            if len(set(reasons.values())) > 1:
                told = ", ".join(f"rank {rank} comes from {reasons[rank]}" for rank in sorted(reasons))
                raise DivergedError(f"the ranks are no longer in step: {told}", sorted(failures))
            if self.missing and known_since and time.monotonic() - known_since > patience:
                failed_on, missing = listed(sorted(failures)), listed(self.missing)
                raise DivergedError(
                    f"{what} failed on rank {failed_on}, and rank {missing} did not come to an end",
                    sorted(failures),
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._mpi.Request.waitall(sends)
        return [values[rank] for rank in range(self.size)]

    def abort(self) -> None:
        """Ends all ranks, once the launcher has had time to pass on what they have said."""
        time.sleep(0.5)
        self._mpi.COMM_WORLD.Abort(1)


def listed(ranks: list[int]) -> str:
    """The ranks for a message: "0, 2"."""
    return ", ".join(map(str, ranks))
