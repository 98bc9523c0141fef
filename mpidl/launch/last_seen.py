"""What a rank that is gone was in, and who waited for it: from the pages of their positions (`collectives.witness`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collectives.diagnostics import Position, listing

Group = Mapping[int, Position]


def last_seen(rank: int, groups: Sequence[Group]) -> str:
    """In words that follow "rank 1"; empty if nothing is known.

    groups: where the ranks of this node were, by their numbers in the world. Of several that the rank is in the one
    tells in which most others waited, and where none did the one of most operations; of a rank on another node, any.
    """
    known = [group for group in groups if rank in group] or groups
    known = [group for group in known if any(there.number or there.message for there in group.values())]
    if not known:
        return ""
    group = max(known, key=lambda group: (len(_waiting(rank, group)), _operations(group)))
    together: dict[str, list[int]] = {}
    for other, there in sorted(_waiting(rank, group).items()):
        together.setdefault(there.place, []).append(other)
    told = [f"{listing(ranks)} {'were' if len(ranks) > 1 else 'was'} {place}" for place, ranks in together.items()]
    own = [f"it was {group[rank].place}"] if rank in group else []
    return ", ".join(own + told)


def _waiting(rank: int, group: Group) -> dict[int, Position]:
    """The others that are in an operation which the rank has not come out of, or in a message with it."""
    own = group.get(rank)

    def waits(there: Position) -> bool:
        if there.message:
            return there.peer == rank
        return there.inside and (own is None or own.number <= there.number)

    return {other: there for other, there in group.items() if other != rank and waits(there)}


def _operations(group: Group) -> int:
    return max(there.number for there in group.values())
