"""An all_reduce that is repeated, of several arrays that each rank hands in one by one.

    averages = comm.partitioned_all_reduce([a, b, c], "avg")
    for step in steps:
        averages.hand_in(a); ...; averages.hand_in(b); ...; averages.hand_in(c)      in this order on every rank
        averages.wait()                                                              now a, b and c are the averages

How it is done is in `backends.symmetric.partitioned`; elsewhere each array is an asynchronous all_reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .backends.backend import PartitionedCall
from .errors import ArgumentError
from .runtime.progress import Work


class PartitionedAllReduce:
    """An all_reduce of arrays that are handed in one by one; from `Communicator.partitioned_all_reduce`.

    begin: starts the all_reduce of one array.
    reduction: None: each array is an operation of its own, by `begin`.
    next_number: of the communicator's next operation.
    complete: issues `reduction` of so many arrays.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        begin: Callable[[Any], Work | None],
        reduction: PartitionedCall | None,
        next_number: Callable[[], int],
        complete: Callable[[int], Any],
    ) -> None:
        self._parts, self._begin = list(parts), begin
        self._reduction, self._next_number, self._complete = reduction, next_number, complete
        self._works: list[Work | None] = []

    @property
    def waits(self) -> bool:
        """Returns whether no rank reduces before it waits."""
        return self._reduction is not None

    def hand_in(self, part: Any) -> None:
        """Hands in this rank's next array, with its final values; not to be touched before `wait` returns.

        Raises ArgumentError for another one than the next, or while another such all_reduce of the Communicator waits.
        """
        number = len(self._works)
        if number == len(self._parts) or part is not self._parts[number]:
            raise ArgumentError(f"partitioned_all_reduce: hand_in: got another array than part {number}, the next one")
        if self._reduction is None:
            self._works.append(self._begin(part))
        else:
            self._reduction.hand_in(self._next_number())
            self._works.append(None)

    def wait(self) -> None:
        """Returns when what was handed in has been reduced, as many arrays on every rank; then it begins anew.

        Raises what an all_reduce raises.
        """
        works = self._works
        if self._reduction is not None and works:
            self._works = []
            self._complete(len(works))
            return
        try:
            for work in works:
                if work is not None:
                    work.wait()
        except Exception:
            self._works = []
            raise
        self._works = []  # not after an interrupt: another call waits for what is under way

    def abandon(self) -> None:
        """Abandons what was handed in, for which no rank waits; this object cannot be used again."""
        self._works, self._parts = [], []
        if self._reduction is not None:
            self._reduction.withdraw()
