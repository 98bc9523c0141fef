"""The processes of the ranks."""

from __future__ import annotations

from mpidl.launch.report import Report

RANKS = dict(enumerate([("node7.cluster", 10), ("node7.cluster", 11), ("node8.cluster", 11), ("node8.cluster", 12)]))


def rank_of(process: int, node: str, processes: dict[int, tuple[str, int]]) -> int | None:
    report = Report()
    report.processes = processes
    return report.rank(process, node)


def test_ranks_are_found_by_process_and_node() -> None:
    assert [rank_of(process, "node7", RANKS) for process in (10, 11, 13)] == [0, 1, None]
    assert rank_of(11, "node8.cluster", RANKS) == 2


def test_a_node_of_another_name_is_enough_where_the_number_is_one_process_s_alone() -> None:
    assert (rank_of(12, "10.0.0.8", RANKS), rank_of(11, "10.0.0.8", RANKS)) == (3, None)


def test_of_a_job_that_came_to_nothing_no_rank_is_known() -> None:
    assert rank_of(10, "node7", {}) is None
