"""Predictions are drawn for every algorithm that can be followed, and next to measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collectives.price import Cluster, price
from collectives.schedules.algorithms import ALGORITHMS, schedule

PROGRAM = "benchmarks/plot_prices.py"


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_predictions_and_measurements_are_drawn_and_written(mpirun, tmp_path: Path) -> None:
    drawn, compared, path = tmp_path / "prices.png", tmp_path / "measured.png", tmp_path / "rows.json"
    done = mpirun(
        2,
        PROGRAM,
        *(f"--output={drawn}", f"--prediction={compared}", f"--json={path}", "--ranks=4,16", "--ranks-per-node=4"),
        *("--min-bytes=1K", "--max-bytes=1M", "--measured-max-bytes=32K", "--factor=32", "--iters=2"),
    )
    assert done.returncode == 0, done.stderr
    assert is_picture(drawn)
    assert is_picture(compared)
    written, names = json.loads(path.read_text()), list(ALGORITHMS["all_reduce"])
    found = [(row["ranks"], row["algorithm"], row["bytes"]) for row in written["predicted"]]
    assert found == [(ranks, name, 1 << k) for ranks in (4, 16) for name in names for k in (10, 15, 20)]
    assert all(row["measured_us"] is None for row in written["predicted"])
    found = [(row["ranks"], row["algorithm"], row["bytes"]) for row in written["measured"]]
    assert found == [(2, name, 1 << k) for name in names for k in (10, 15)]
    assert all(row["measured_us"] > 0 for row in written["measured"])
    for rows, cluster in (("predicted", "cluster"), ("measured", "machine")):
        for row in written[rows]:
            if row["algorithm"] == "ring":
                made = schedule("all_reduce", "ring", row["ranks"])
                expected = price(made, row["bytes"], Cluster(**written[cluster])) * 1e6
                assert row["predicted_us"] == pytest.approx(expected)
    for line in ("# ring on 4 ranks: ", "# tree on 16 ranks: ", "# 2 ranks on 1 node(s): alpha "):
        assert line in done.stdout


@pytest.mark.thorough
def test_what_cannot_be_followed_is_left_out_and_named(mpirun, tmp_path: Path) -> None:
    drawn, path = tmp_path / "prices.png", tmp_path / "rows.json"
    given = ("--algorithms=ring,tree", "--ranks=4095", "--min-bytes=1M", "--max-bytes=1M")
    done = mpirun(1, PROGRAM, f"--output={drawn}", f"--json={path}", *given)
    assert done.returncode == 0, done.stderr
    assert "# left out: price: ring all_reduce on 4095 ranks" in done.stdout
    assert {row["algorithm"] for row in json.loads(path.read_text())["predicted"]} == {"tree"}
    assert is_picture(drawn)


@pytest.mark.thorough
def test_wrong_options_are_one_line_and_status_2(mpirun) -> None:
    wrong = {
        "": "needs --output, --prediction, or both",
        "--output=a.png --ranks=8,many": "needs numbers from 1",
        "--output=no/such/place.png": "cannot be written",
        "--prediction=a.png": "needs at least 2 ranks",
    }
    done = mpirun(1, "tests/examples/outcomes.py", PROGRAM, json.dumps([options.split() for options in wrong]))
    assert done.returncode == 0, done.stderr
    for (options, message), [(status, _, errors)] in zip(wrong.items(), json.loads(done.stdout), strict=True):
        assert status == 2, options
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert message in line
