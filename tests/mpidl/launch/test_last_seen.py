"""The last operation of a rank that has ended, and the ranks that waited for it."""

from __future__ import annotations

import pytest

from collectives.runtime.positions import Position
from mpidl.launch.report import Report

IN_REDUCE = Position(4, "all_reduce", inside=True)
AFTER_REDUCE = Position(4, "all_reduce", inside=False)
AFTER_GATHER = Position(3, "all_gather", inside=False)
NOTHING = Position(0, "nothing", inside=False)
FROM_1 = Position(4, "all_reduce", inside=False, waits=1, message="recv", peer=1)


def last_seen(rank: int, groups: list[dict[int, Position]]) -> str:
    report = Report()
    report.groups = groups
    return report.last_seen(rank)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            [{0: IN_REDUCE, 1: AFTER_GATHER, 2: IN_REDUCE}],
            "it was after all_gather (operation 3), ranks 0, 2 were in all_reduce (operation 4)",
        ),
        (
            [{0: IN_REDUCE, 1: IN_REDUCE, 2: AFTER_REDUCE}],
            "it was in all_reduce (operation 4), rank 0 was in all_reduce (operation 4)",
        ),
        ([{0: AFTER_REDUCE, 1: AFTER_REDUCE}], "it was after all_reduce (operation 4)"),
        ([{0: AFTER_GATHER, 1: IN_REDUCE}], "it was in all_reduce (operation 4)"),
        (
            [{0: FROM_1, 1: AFTER_REDUCE, 2: IN_REDUCE}],
            "it was after all_reduce (operation 4), rank 0 was in recv from rank 1, "
            "rank 2 was in all_reduce (operation 4)",
        ),
        ([{0: IN_REDUCE, 1: NOTHING}], "it was before its first operation, rank 0 was in all_reduce (operation 4)"),
        ([{0: IN_REDUCE, 2: AFTER_GATHER}], "rank 0 was in all_reduce (operation 4)"),  # it was on another node
        ([{0: NOTHING, 1: NOTHING}], ""),
        ([], ""),
    ],
)
def test_of_one_group(groups: list[dict[int, Position]], told: str) -> None:
    assert last_seen(1, groups) == told


def test_of_several_groups_the_one_tells_in_which_ranks_waited() -> None:
    world = {0: AFTER_GATHER, 1: AFTER_GATHER}
    part = {0: Position(1, "barrier", inside=True), 1: Position(0, "nothing", inside=False)}
    of_others = {0: IN_REDUCE, 2: IN_REDUCE}
    assert last_seen(1, [world, part]) == "it was before its first operation, rank 0 was in barrier (operation 1)"
    assert last_seen(1, [world, {0: NOTHING, 1: NOTHING}]) == "it was after all_gather (operation 3)"
    assert last_seen(1, [of_others, world]).startswith("it was after all_gather")
