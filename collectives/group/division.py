"""Splits and duplicates a Communicator, and translates ranks of one to those of another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

from mpi4py import MPI

from ..base import arguments
from ..base.arguments import integer
from ..errors import ArgumentError, OperationError
from ..runtime.dropped import freed_if_it_fails, freed_if_mpi_fails
from ..runtime.positions import NO_WORDS
from .ordered_group import OrderedGroup

if TYPE_CHECKING:
    from typing import Self  # which Python 3.10 has not


class GroupDivision(OrderedGroup):
    """A group whose ranks form other groups: splits, duplicates, ranks by their numbers elsewhere."""

    @overload
    def translate_ranks(self, ranks: int, other: OrderedGroup | None = None) -> int | None: ...
    @overload
    def translate_ranks(self, ranks: Iterable[int], other: OrderedGroup | None = None) -> list[int | None]: ...

    def translate_ranks(self, ranks: Any, other: OrderedGroup | None = None) -> Any:
        """Translates ranks of this group into the numbers that the same processes have in another group.

        ranks: a rank, or several.
        other: another group; by default the world.

        Returns a number, or a list of numbers; None for a process that is not in the other group. Not collective, and
        possible after `close`.
        """
        if other is not None and not isinstance(other, OrderedGroup):
            raise arguments.wrong_type("translate_ranks: other", other, "a Communicator")
        several = isinstance(ranks, Iterable)
        given = [integer("translate_ranks: ranks", rank, 0, self.size - 1) for rank in (ranks if several else [ranks])]
        if other is self:
            found: list[int | None] = list(given)
        else:
            numbers = [self.world_ranks[rank] for rank in given]
            there = None if other is None else {number: rank for rank, number in enumerate(other.world_ranks)}
            found = [None if n < 0 else n if there is None else there.get(n) for n in numbers]
        return found if several else found[0]

    def split(self, color: int | None, key: int = 0, *, name: str = "") -> Self | None:
        """A Communicator of the ranks that give the same colour, ordered by key, then rank; None for colour None.

        name: of the new group, for errors and reports. Collective over this communicator. Groups work independently,
        also at the same time.
        """
        chosen = MPI.UNDEFINED if color is None else integer("split: color", color, 0, 2**31 - 1)
        key = integer("split: key", key, -(2**31), 2**31 - 1)
        groups: list[MPI.Comm] = []
        failures: list[OperationError] = []  # on all ranks: this communicator goes on

        def task() -> None:
            try:
                with freed_if_mpi_fails("split", []):
                    groups.append(self._dispatch.split(chosen, key))
            except OperationError as error:
                failures.append(error)

        self._issuer.issue("split", task, NO_WORDS, async_op=False)
        if failures:
            raise failures[0]
        group = groups[0]
        if group == MPI.COMM_NULL:
            return None
        assert isinstance(group, MPI.Intracomm)
        with freed_if_it_fails([group]):
            made = type(self)(group, timeout=self._timeout, name=name, scratch=self._scratch)
        made._parts.owned_comms.append(group)
        return made

    def split_by_node(self) -> tuple[Self, Self]:
        """Two Communicators: of this rank's node, and of the ranks with its local rank on every node. Collective.

        Raises ArgumentError on every rank unless each node has as many ranks, numbered node by node.
        """
        topology = self._dispatch.topology
        if not topology.regular:
            raise ArgumentError("split_by_node: needs as many ranks on every node, numbered node by node")
        within, across = self.split(topology.members[0]), self.split(self.local_rank)
        assert within is not None
        assert across is not None
        return within, across

    def split_self(self) -> Self:
        """A Communicator of this rank only. Not collective."""
        return type(self)(MPI.COMM_SELF, timeout=self._timeout, scratch=self._scratch)

    def duplicate(self) -> Self:
        """Makes a Communicator of the same ranks with a queue of its own. Collective.

        It is closed along with this one, which refers to it until then.
        """
        made = self.split(0, self.rank, name=self.name)
        assert made is not None
        self._end.add_duplicate(made._end)
        return made
