"""The watchdog's report: its text, the words for operations, and what a program does."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.base.buffers import inspect
from collectives.group.details import describe_arrays, describe_list
from collectives.runtime import program
from collectives.runtime.positions import ANY, END, Position, Positions, words
from collectives.runtime.watchdog import print_to_stderr, report


@pytest.mark.parametrize(
    ("counts", "words"), [([2, 2, 1], ""), ([4, 0, 1], " in parts of 4, 0, 1"), ([100_001, 0, 100_000], " in parts #")]
)
def test_words_have_counts_that_are_not_the_default(counts: list[int], words: str) -> None:
    x = inspect(np.ones(sum(counts)), "x", writable=False)
    found = describe_arrays("ring", [x, counts]).decode().rstrip("\0")
    assert re.fullmatch(rf"of {sum(counts)} float64 by ring{words}[0-9a-f]*", found)
    assert found != describe_arrays("ring", [x, counts[::-1]]).decode().rstrip("\0") or counts == counts[::-1]


IN_FOURTH = Position(4, "all_reduce", inside=True, detail="sum of 5 float32 by ring")


def test_a_report_names_what_differs_between_operations_of_one_kind() -> None:
    known = {0: IN_FOURTH, 1: replace(IN_FOURTH, detail="sum of 6 float32 by mpi"), 2: replace(IN_FOURTH, inside=False)}
    text = report(0, [0, 1, 2], 3, IN_FOURTH, 9, known, {})
    assert (
        "in different operations: all_reduce sum of 5 float32 by ring on ranks 0, 2, all_reduce sum of 6 float32 by "
        "mpi on rank 1;" in text
    )


def test_the_words_for_a_list_name_its_dtypes() -> None:
    arrays = [
        inspect(np.ones(n, dtype), "x", writable=False)
        for n, dtype in [(5, np.float32), (6, np.float64), (7, np.float32)]
    ]
    assert describe_list("sum", arrays, 0, False, ["ring", "mpi", "ring"]) == words(
        "sum of 3 arrays of 18 by ring, mpi: float32, float64"
    )
    assert describe_list(None, arrays[:1], 2, True, ["tree"]) == words("of 1 arrays of 5 root 2 by tree: float32")


def test_a_report_says_which_rank_has_completed_another_operation_in_its_place() -> None:
    for there in (replace(IN_FOURTH, inside=False), Position(6, "the end of its program", inside=False)):
        text = report(1, [0, 1], 2, IN_FOURTH, 9, {0: there, 1: IN_FOURTH}, {})
        assert f"has left it: rank 0, which {there}; its operation may have been another one" in text
        assert "one of them hangs" not in text
        assert "not arrived" not in text
    text = report(1, [0, 1], 2, IN_FOURTH, 9, {0: replace(there, number=4), 1: IN_FOURTH}, {})
    assert "not arrived: rank 0, which is at the end of its program" in text


def test_a_report_says_which_rank_has_left_by_an_exception() -> None:
    known = {0: IN_FOURTH, 1: replace(IN_FOURTH, inside=False, failed=True)}
    text = report(0, [0, 1], 2, IN_FOURTH, 9, known, {})
    assert "not arrived: rank 1, which is out of all_reduce (operation 4), by an exception\n" in text
    assert "one of them hangs" not in text


def test_a_report_of_a_group_has_the_world_s_ranks() -> None:
    known = {6: IN_FOURTH, 2: replace(IN_FOURTH, number=3, inside=False)}
    text = report(6, [6, 2], 8, IN_FOURTH, 9, known, {})
    assert "rank 6 of 8 has waited 9 s in all_reduce (operation 4 of the communicator of ranks 2, 6)\n" in text
    assert "not arrived: rank 2, which is after all_reduce (operation 3)\n" in text


def test_a_report_has_the_name_of_the_group() -> None:
    text = report(0, [0, 1], 4, IN_FOURTH, 9, {0: IN_FOURTH}, {}, "dp")
    assert "rank 0 of 4 has waited 9 s in all_reduce (operation 4 of communicator 'dp' of ranks 0, 1)\n" in text
    receiving = Position(3, "barrier", inside=False, message="recv", peer=ANY)
    text = report(0, [0, 1, 2], 3, receiving, 9, {0: receiving, 1: IN_FOURTH}, {}, "dp")
    assert "rank 0 of 3 has waited 9 s in recv from any rank (communicator 'dp')\n" in text
    assert "not arrived: rank 1, which is in all_reduce (operation 4)\n" in text
    assert "not arrived: rank 2, which has not answered\n" in text


def test_a_report_has_what_programs_do_and_the_coordinates_of_ranks() -> None:
    def at(rank: int, **changed: Any) -> Position:
        return replace(IN_FOURTH, place=f"dp=1, tp={rank}", phase="in the backward pass of step 7", **changed)

    late = {rank: at(rank, number=3, inside=False) for rank in (1, 2)}
    text = report(0, [0, 1, 2, 3], 4, at(0), 9, {0: at(0), **late, 3: replace(late[1], operation=END)}, {})
    assert (
        "rank 0 of 4 (dp=1, tp=0) has waited 9 s in all_reduce (operation 4 of this communicator), in the back" in text
    )
    assert (
        "not arrived: ranks 1, 2 (dp=1, tp=1; dp=1, tp=2), which is after all_reduce (operation 3), in the backward "
        "pass of step 7\n"
    ) in text
    assert "which is at the end of its program, after 2 operations\n" in text


def test_what_a_program_does_is_on_its_page() -> None:
    page = Positions(bytearray(Positions.nbytes(2)), 1, 2)
    page.enter(3, "barrier")
    page.beat("dp=1, tp=0", "in step 4")
    own = Positions.decode(page.snapshot())[1]
    assert (own.number, own.detail, own.place, own.phase, own.beat) == (3, "", "dp=1, tp=0", "in step 4", 1)
    page.beat("", "x" * 1000)
    assert page.all()[page.rank].phase.startswith("xxx")
    assert page.all()[0].phase == ""


def test_a_program_that_cannot_be_described_does_not_end_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise KeyError("deliberate")

    monkeypatch.setattr(program, "_asked", {})
    program.describe_program(place=fails, phase=lambda: "in step \ud800 4")
    place, phase = program.described()
    assert (place, phase) == ("", "in step \ud800 4")
    page = Positions(bytearray(Positions.nbytes(1)), 0, 1)
    page.beat(place, phase)
    assert page.all()[0].phase == "in step ? 4"


@pytest.mark.parametrize("broken", ["stdout", "stderr"])
def test_a_report_to_a_closed_stream_raises_nothing(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with (tmp_path / "output").open("w") as closed:
        pass
    monkeypatch.setattr(sys, broken, closed)
    print_to_stderr("a report\n")
    assert capsys.readouterr().err == ("a report\n" if broken == "stdout" else "")
