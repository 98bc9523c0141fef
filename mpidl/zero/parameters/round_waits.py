"""Waits for a round to which the other ranks may never come: an error then names the operation in which they wait.

    rank 0   needs unit 4, and waits in a round     looks each half second at where the others are
    rank 1   waits for rank 0 in an all_reduce      rank 0, when four looks have found the same: TrainingError

Who runs what: the thread that needs the round, of the program or of backward, waits and looks, in steps with a limit. A
look reads what the ranks have noted of their operations, and waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives import Communicator, WorkTimeout
from collectives.diagnostics import deadlocked

from ...errors import TrainingError
from .gather_rounds import GatherRound

_DEADLOCK_POLL_S, _DEADLOCK_POLLS = 0.5, 4  # between looks at what the others wait in; how many must find the same


class RoundWaits:
    """Waits for rounds on one Communicator.

    comm: of the rounds.
    worlds: the user's Communicators, in which others may wait for a rank that gathers.
    """

    def __init__(self, comm: Communicator, worlds: Sequence[Communicator]) -> None:
        self._comm, self._worlds = comm, worlds

    def until_over(self, started: GatherRound, does: str, advice: str = "") -> None:
        """Returns when the round is over. Raises TrainingError where others wait for this rank in another operation.

        does: why this rank waits.
        advice: ends the error's message.

        The round stays in flight; they join it when they next gather something.
        """
        before: dict[int, str] = {}
        polls = 0
        while True:
            try:
                started.wait(_DEADLOCK_POLL_S)
                return
            except WorkTimeout:
                found = ((world, deadlocked(self._comm, world)) for world in self._worlds)
                among, waiting = next((one for one in found if one[1]), (self._comm, {}))
            polls, before = polls + 1 if waiting == before else 1, waiting
            if waiting and polls == _DEADLOCK_POLLS:
                others = "; ".join(f"rank {other} is in {operation}" for other, operation in waiting.items())
                raise TrainingError(f"rank {among.rank} {does}, but {others}, to which this rank has not come{advice}")
