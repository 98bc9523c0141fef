"""Uneven inputs: a rank whose batches have run out stands in for its part of the others' collectives.

    rank 0:  batch  batch  batch  batch |
    rank 1:  batch  batch | stands in   |  all take over the states of one that ended last
    rank 2:  batch  batch  batch | st.in|

Every backward pass begins with a round in which each rank tells if it has batches. A forward pass does too where the
first rank without any is to be an error, as other ranks may wait in it, in a SyncBatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from collectives import Communicator

from ..errors import TrainingError


class Stage(IntEnum):
    """What a rank is about to do."""

    ENDED, FORWARD, BACKWARD = range(3)


class JoinRounds:
    """The rounds of one `with wrapped.join():`.

    backward(): what a rank that has ended does when the others go backward. throw: the first rank that ends is an
    error. divide_by_active: the mean is over the ranks that still have batches; `share` is then ranks / active ranks,
    else 1. root: the lowest rank that has batches.
    """

    def __init__(
        self, comm: Communicator, backward: Callable[[], None], *, divide_by_active: bool, throw: bool
    ) -> None:
        self._comm, self._backward = comm, backward
        self._divide_by_active, self.throw = divide_by_active, throw
        self.share = 1.0
        self.root = 0

    def begin(self, stage: Stage) -> Stage:
        """A round: what the ranks with batches do; ENDED when there are none left. Collective."""
        stages = np.empty(self._comm.size, np.int8)
        self._comm.all_gather(stages, np.array([stage], np.int8))
        active = np.flatnonzero(stages != Stage.ENDED)
        if len(active) == 0:
            return Stage.ENDED
        self.root = int(active[0])
        if self._divide_by_active:
            self.share = self._comm.size / len(active)
        if self.throw and len(active) < self._comm.size:
            ended = ", ".join(map(str, np.flatnonzero(stages == Stage.ENDED)))
            raise TrainingError(f"join: no batches left on rank {ended}, and throw_on_early_termination is set")
        if len(set(stages[active].tolist())) > 1:
            told = ", ".join(f"rank {rank} {Stage(stages[rank]).name.lower()}" for rank in active)
            raise TrainingError(f"join: the ranks with batches are not in step: {told}")
        return Stage(stages[self.root])

    def stand_in(self) -> None:
        """Takes part in the others' passes until the last one has ended; `root` is then a rank that ended last."""
        while self.begin(Stage.ENDED) is not Stage.ENDED:
            self._backward()
