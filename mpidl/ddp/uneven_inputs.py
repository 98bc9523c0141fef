"""Uneven inputs: a rank whose batches have run out takes part in the collectives of the others' batches.

    rank 0:  batch  batch  batch  batch |
    rank 1:  batch  batch | hooks       |  all take over the states of one that ended last
    rank 2:  batch  batch  batch | hooks|

A rank with batches takes a turn before each series of collectives: a small all-gather that tells which object
communicates next. A rank without batches takes part in it, and calls that object's join hook after each turn. Turns
have a Communicator of their own.

Every rank makes one all-gather a turn, with batches or without, and the result tells all of them which object comes
next; if ranks with batches name different objects, every rank gets a TrainingError. So no rank waits in an operation
that another one does not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np

from collectives import Communicator

from ..errors import ConfigurationError, TrainingError
from ..job import communicator_pool
from ..mesh.groups import data_group

_ENDED = -1


class Turn(IntEnum):
    """The next operation of a rank with batches, on the object whose turn it is. NOTIFIED: the object defines it."""

    FORWARD, BACKWARD, END_OF_BACKWARD, NOTIFIED = range(4)

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class JoinTurns:
    """The turns of one `Join`.

    throw: the first rank that ends is an error.
    active: the ranks that had batches at the last turn.
    """

    def __init__(self, comm: Communicator, throw: bool) -> None:
        self._comm, self.throw = comm, throw
        self.active = list(range(comm.size))

    @property
    def root(self) -> int:
        """The lowest of the ranks that had batches at the last turn."""
        return self.active[0]

    @property
    def mean_correction(self) -> float:
        """Number of all ranks divided by that of ranks with batches."""
        return self._comm.size / len(self.active)

    def announce_turn(self, number: int, turn: Turn = Turn.NOTIFIED) -> int | None:
        """Returns the number of the object whose turn it is; None when no rank has batches left. Collective."""
        announced = np.empty((self._comm.size, 2), np.int64)
        self._comm.all_gather(announced, np.array([number, turn], np.int64))
        active = np.flatnonzero(announced[:, 0] != _ENDED).tolist()
        if not active:
            return None
        self.active = active
        if self.throw and len(active) < self._comm.size:
            ended = ", ".join(map(str, sorted(set(range(self._comm.size)).difference(active))))
            raise TrainingError(f"join: no batches left on rank {ended}, and throw_on_early_termination is set")
        if (announced[active] != announced[active[0]]).any():
            what = ", ".join(f"rank {r}: {Turn(announced[r, 1])} of joinable {announced[r, 0]}" for r in active)
            raise TrainingError(f"join: the ranks with batches are not in step: {what}")
        return int(announced[active[0], 0])


class JoinHook:
    """Collectives of one object, as a rank without batches runs them."""

    turns: JoinTurns
    number: int

    def begin(self, turns: JoinTurns, number: int) -> None:
        """Sets the turns, as the block begins. number: of the object in its Join."""
        self.turns, self.number = turns, number

    def announce_turn(self, turn: Turn = Turn.NOTIFIED) -> None:
        """Tells the ranks that have ended to call `main_hook`; called on ranks with batches. Collective."""
        self.turns.announce_turn(self.number, turn)

    def main_hook(self) -> None:
        """Runs a batch's collectives on a rank without batches, after a `notify_join_context` of the others."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Runs on every rank after the last rank has ended. is_last_joiner: this rank is one that ended last."""

    def end(self) -> None:
        """Runs when the block is left, also by an exception, if `begin` has returned."""


class Joinable:
    """Base of a user's object in a `Join`: for each batch, every rank that has one runs the same number of collectives.

    It calls `Join.notify_join_context(self)` before them.
    """

    @property
    def join_process_group(self) -> Communicator:
        """The ranks that take part; by default the world."""
        return data_group("Joinable", None, needed="a join_process_group of its own")

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Makes the hook of a rank that has ended. kwargs: those of the `Join`."""
        raise NotImplementedError


class Join:
    """Trains ranks with different numbers of batches: `with mpidl.Join([generator, discriminator]): ...`. Collective.

    joinables: DistributedDataParallel wrappers, and one's own `Joinable`, of one process group.
    enable: False: the block is like any other.
    throw_on_early_termination: as soon as one rank has ended, TrainingError on every rank; see
        `DistributedDataParallel.join`, also for kwargs, which all joinables get.

    A rank that leaves the block takes part in the others' collectives until the last one has ended. The ranks that have
    batches use the joinables in the same order.
    """

    _active: Join | None = None  # in this process

    def __init__(
        self, joinables: Sequence[Any], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
    ) -> None:
        self._joinables, self._enable = list(joinables), enable
        self._throw, self._kwargs = throw_on_early_termination, kwargs
        for number, joinable in enumerate(self._joinables):
            if not hasattr(joinable, "join_hook"):
                raise ConfigurationError(
                    f"Join: joinable {number} is a {type(joinable).__name__}; needs a DistributedDataParallel or an "
                    "object with join_hook(); a ZeroOptimizer needs the same number of steps on every rank"
                )
        groups = {getattr(joinable, "join_process_group", None) for joinable in self._joinables}
        if len(groups) != 1:
            raise ConfigurationError(f"Join: got joinables of {len(groups)} process groups; needs those of one")
        self._group: Communicator = groups.pop() or data_group("Join", None, needed="joinables with a process group")

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        if Join._active is not None:
            raise ConfigurationError("join: another join is active; needs one at a time")
        self._hooks: list[JoinHook] = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
        self._pooled = communicator_pool.take(self._group)
        self._turns = JoinTurns(self._pooled.comm, self._throw)
        self._ending = ExitStack()  # the ends of the hooks that have begun, the last one first
        self._ending.callback(self._pooled.give_back)
        Join._active = self
        try:
            for number, hook in enumerate(self._hooks):
                hook.begin(self._turns, number)
                self._ending.callback(hook.end)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if not self._enable:
            return
        try:
            if kind is None:
                self._join_others_turns()
        finally:
            self._end()

    def _join_others_turns(self) -> None:
        while (number := self._turns.announce_turn(_ENDED)) is not None:
            self._hooks[number].main_hook()
        for hook in self._hooks:
            hook.post_hook(self._group.rank in self._turns.active)

    def _end(self) -> None:
        Join._active = None
        self._ending.close()

    @staticmethod
    def notify_join_context(joinable: Any) -> None:
        """Tells those that have ended that `joinable` begins its collectives of a batch; they call its `main_hook`.

        To be called by a `Joinable`; does nothing outside of a `Join`. Collective.
        """
        join = Join._active
        for hook in (
            [] if join is None else [h for j, h in zip(join._joinables, join._hooks, strict=True) if j is joinable]
        ):
            hook.announce_turn()
