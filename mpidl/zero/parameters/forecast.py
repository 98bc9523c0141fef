"""Forecast of the units that are used next, from the order of the passes before.

    last pass   own 0 1 | 1 0      forward | backward
    now         own 0              last time 1 followed (own, 0): 1 is predicted next, and 1 and 0 of backward after it

An order that changes costs time and no more: what was gathered in vain is given back unused.
"""

from __future__ import annotations


class Forecast:
    """Predicts the uses of units that come next: each is the one that followed the two before it the last time.

    own: number of the model's own unit, which is whole from the beginning of a pass to its end.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._next: dict[tuple[int, int, bool], tuple[int, bool]] = {}
        self._last: tuple[int, int, bool] = (-1, -1, False)

    def note(self, number: int, backward: bool) -> None:
        """Notes that a unit is used."""
        self._next[self._last] = number, backward
        self._last = self._last[1], number, backward

    def ahead(self, count: int, next_pass: bool = False) -> list[int]:
        """The numbers of the next `count` different units, and of the model's own if it is earlier; fewer if unknown.

        They are those of the pass under way, which ends with a backward pass; with next_pass of the one after it.
        """
        found: dict[int, None] = {}
        seen, at = set(), self._last
        while at in self._next and at not in seen:
            seen.add(at)
            number, backward = self._next[at]
            ends = at[2] and not backward
            if ends and not next_pass:
                break
            next_pass = next_pass and not ends
            if number != self._own and len(found) - (self._own in found) == count:
                break
            found[number] = None
            at = at[1], number, backward
        return list(found)
