"""The picture of README is drawn from what the benchmarks write."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plot_front_page import ENGINES, LINES, engines_of, lines_of, spread
from tests.harness.launch import ROOT

TRAINING = [
    {"engine": name, "ranks": 2, "params": 124_439_808, "step_ms": 900 + n, "node_mib": 4000.0}
    for n, name in enumerate(reversed(ENGINES))
]
COLLECTIVES = [
    {
        **{"op": op, "algorithm": name, "buffer": buffer, "cache": cache, "place": place},
        **{"ranks": 2, "bytes": 1 << k, "time_us": float(k)},
    }
    for op, place, cache in (
        *(("all_reduce", "in", "warm"), ("all_reduce", "out", "warm"), ("all_reduce", "in", "cold")),
        ("broadcast", "in", "warm"),
    )
    for name, buffer in [*LINES, ("ring", "user")]
    for k in (20, 12)
]


def plot(tmp_path: Path, training: object, collectives: object) -> subprocess.CompletedProcess[str]:
    """Runs the program on these rows, to draw into tmp_path / "page.svg"."""
    files = [tmp_path / "training", tmp_path / "collectives"]
    for path, rows in zip(files, (training, collectives), strict=True):
        path.write_text(json.dumps(rows))
    command = [sys.executable, "benchmarks/plot_front_page.py", *map(str, files), f"--out={tmp_path / 'page.svg'}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_all_engines_and_lines_are_drawn_and_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        done = plot(tmp_path, TRAINING, COLLECTIVES)
        assert (done.returncode, done.stderr) == (0, "")
        drawn.append((tmp_path / "page.svg").read_text())
    assert drawn[0].startswith("<?xml")
    assert drawn[0] == drawn[1]
    for label in (*ENGINES.values(), *("909", "3.9")):
        assert f"<!-- {label} -->" in drawn[0]


def test_rows_are_chosen_and_put_in_order() -> None:
    assert [row["engine"] for row in engines_of([*TRAINING, {"engine": "all-reduce"}])] == list(ENGINES)
    only = [row for row in COLLECTIVES if (row["op"], row["place"], row["cache"]) == ("all_reduce", "in", "warm")]
    assert lines_of(only) == {key: [(1 << 12, 12.0), (1 << 20, 20.0)] for key in LINES}
    assert lines_of(COLLECTIVES) == lines_of(only)


def test_labels_keep_their_distance() -> None:
    assert spread([0.0, 5.0, 2.0], 1.0) == [0.0, 5.0, 2.0]
    assert spread([0.0, 0.2, 0.1], 1.0) == pytest.approx([-0.9, 1.1, 0.1])


@pytest.mark.parametrize(
    ("training", "collectives", "error"),
    [
        ([{"engine": "ddp", "node_mib": None}], COLLECTIVES, "has no engine whose memory was measured"),
        (TRAINING, COLLECTIVES[-10:], "has no all_reduce"),
        ({"a": 1}, COLLECTIVES, "needs the rows of the benchmark"),
    ],
    ids=["no-memory", "no-all-reduce", "no-rows"],
)
def test_rows_of_something_else_are_one_line_and_status_2(
    tmp_path: Path, training: object, collectives: object, error: str
) -> None:
    done = plot(tmp_path, training, collectives)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert error in done.stderr
    assert not (tmp_path / "page.svg").exists()
