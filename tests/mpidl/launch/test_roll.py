"""Which process is which rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidl.launch.roll import Roll, fill_in

RANKS = [("node7.cluster", 10), ("node7.cluster", 11), ("node8.cluster", 11), ("node8.cluster", 12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPIDL_SHM_DIR", str(tmp_path))
    monkeypatch.setenv("MPIDL_JOB", "0123")
    return tmp_path


def test_ranks_are_found_by_process_and_node(folder: Path) -> None:
    roll = Roll("0123")
    assert len(list(folder.iterdir())) == 1
    fill_in(RANKS)
    assert list(folder.iterdir()) == []  # also if this process is killed from here on
    roll.take_away()
    assert [roll.rank(process, "node7") for process in (10, 11, 13)] == [0, 1, None]
    assert roll.rank(11, "node8.cluster") == 2
    assert (roll.rank(12, "10.0.0.8"), roll.rank(11, "10.0.0.8")) == (3, None)  # a number that two nodes have


def test_a_job_that_came_to_nothing_has_no_ranks(folder: Path) -> None:
    roll = Roll("0123")
    roll.take_away()
    assert list(folder.iterdir()) == []
    assert roll.rank(10, "node7") is None


def test_what_was_not_written_to_its_end_is_left(folder: Path) -> None:
    roll = Roll("0123")
    next(folder.iterdir()).write_text('[["node7", 1')
    roll.take_away()
    assert roll.rank(1, "node7") is None


@pytest.mark.parametrize("token", ["0123", None])
def test_where_the_file_is_not_none_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    if token is None:
        monkeypatch.delenv("MPIDL_JOB")
    fill_in(RANKS)
    assert list(folder.iterdir()) == []
