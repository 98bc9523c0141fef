"""The comparison of MPI libraries measures each part once, and its tables say which cases are slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import imb
from bench_libraries import IN_PLACE, OPERATIONS
from collectives.bench.operations import OPERATIONS as BENCHMARKED
from libraries_report import bytes_name, cells_of, draw, tables
from tests.harness.launch import ROOT, environment, run

HERE = Path(sys.executable).parent


def libraries(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/bench_libraries.py", *map(str, arguments)]
    return run(command, 120, ROOT, environment())


def row(algorithm: str, buffer: str, cache: str, size: int, time: float, ratio: float | None = None) -> dict[str, Any]:
    """A row of collectives.bench, with what the report reads."""
    ratios = {} if ratio is None else {"mpi": ratio}
    return {"algorithm": algorithm, "buffer": buffer, "cache": cache, "place": "in", "bytes": size} | {
        "time_us": time,
        "ratios": ratios,
    }


def part(library: str, ranks: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = {"library": library, "version": f"{library} 5", "ranks": ranks, "cores": 2, "operation": "all_reduce"}
    return {"kind": "ratios", "seconds": 1.0, **names, "rows": rows}


def sides(auto: float, one_copy: float, own: float, size: int = 1 << 10) -> list[dict[str, Any]]:
    return [
        row("auto", "user", "warm", size, auto, auto / own),
        row("symmetric", "user", "warm", size, one_copy, one_copy / own),
        row("mpi", "user", "warm", size, own),
        row("auto", "symmetric", "warm", size, 1.0, 1.0 / own),
    ]


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_a_library_is_measured_once_and_a_part_that_is_missing_later(tmp_path: Path) -> None:
    path, picture = tmp_path / "kept.json", tmp_path / "ratios.png"
    small = ("-b", "1K", "-e", "4K", "-n", 2, "-c", 1, "--cache", "64K", "--ranks", 2)
    given = ("--mpi", f"mpich={HERE}", "--out", path, *small)
    first = libraries(*given, "--ops", "all_gather", "--plot", picture)
    assert first.returncode == 0, first.stderr
    assert "[1/1] mpich, 2 ranks, all_gather: " in first.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(path.read_text())["parts"]
    assert [(each["library"], each["operation"]) for each in kept] == [("mpich", "all_gather")]
    assert {(r["buffer"], r["cache"]) for r in kept[0]["rows"] if r["algorithm"] == "auto"} == {
        (buffer, cache) for buffer in ("user", "symmetric") for cache in ("warm", "cold")
    }
    assert {r["wrong"] for r in kept[0]["rows"]} == {0}
    assert "| operation | arrays | caches | 1 KiB | 4 KiB |" in first.stdout
    assert first.stdout.count("\n| all_gather | ") == 4
    second = libraries(*given, "--ops", "all_gather,broadcast")
    assert second.returncode == 0, second.stderr
    assert "1 of 2 parts are in" in second.stderr
    assert "all_gather:" not in second.stderr
    assert second.stdout.count("\n| broadcast | ") == 4
    assert json.loads(path.read_text())["parts"][0] == kept[0]
    other = libraries(*given, "-n", 3)
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.splitlines() == [
        f"error: --out {path}: was measured with iters 2; needs the same options, or another name"
    ]


def test_a_job_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    for name, text in (("python", "exit 0"), ("mpirun", "echo no network >&2; exit 3")):
        (broken / name).write_text(f"#!/bin/sh\n{text}\n")
        (broken / name).chmod(0o755)
    done = libraries("--mpi", f"none={broken}", "--out", tmp_path / "kept", "--ranks", 2, "--ops", "scan,reduce")
    assert done.returncode == 1
    assert done.stderr.count("failed with status 3: no network") == 2
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        (("--mpi", "mpich"), "needs NAME=FOLDER"),
        (("--mpi", f"mpich={HERE}", "--ranks", "1"), "needs numbers above 1"),
        (("--mpi", f"mpich={HERE}", "--ops", "dance"), "got 'dance'; needs any of all_reduce"),
        (("--mpi", f"mpich={HERE}", "--imb", "IMB-MPI1"), "needs --mpi impi=FOLDER"),
        (("--mpi", f"impi={HERE}", "--imb", "no/such"), "there is no such file"),
    ],
)
def test_wrong_options_say_what_is_needed(tmp_path: Path, given: tuple[str, ...], needed: str) -> None:
    done = libraries("--out", tmp_path / "kept", *given)
    assert done.returncode == 2
    assert needed in done.stderr.splitlines()[-1]


def test_operations_and_their_forms_are_those_of_the_benchmark() -> None:
    assert set(OPERATIONS) == set(BENCHMARKED)
    assert set(IN_PLACE) == {name for name, operation in BENCHMARKED.items() if operation.usual == "in"}


def test_tables_have_the_ratio_to_the_library_s_own_and_mark_what_is_slower_than_the_best_side() -> None:
    cells = cells_of(
        [
            part("mpich", 2, [*sides(10.0, 8.0, 20.0), *sides(100.0, 101.0, 50.0, 1 << 20)]),
            part("impi", 4, sides(13.0, 15.0, 9.5)),
            part("mpich", 4, sides(14.0, 15.0, 9.0)),
        ]
    )
    lines = tables(cells)
    assert [line for line in lines if line.startswith("## ")] == [
        *("## 2 ranks on 2 cores, mpich (mpich 5)", "## 4 ranks on 2 cores, impi (impi 5)"),
        *("## 4 ranks on 2 cores, mpich (mpich 5)", "## Slower than allowed"),
    ]
    rows = [line for line in lines if line.startswith("| all_reduce")]
    assert rows == [
        *("| all_reduce | any | warm | **0.50** | **2.00** |", "| all_reduce | symmetric | warm | 0.05 | 0.02 |"),
        *("| all_reduce | any | warm | 1.37 |", "| all_reduce | symmetric | warm | 0.11 |"),
        *("| all_reduce | any | warm | **1.56** |", "| all_reduce | symmetric | warm | 0.11 |"),
    ]
    assert "3 of 8 cases: above 1.05 x the fastest side + 1 us; with fewer cores than ranks, 1.1 x + 3 us." in lines
    assert [line for line in lines if line.startswith(("| mpich", "| impi"))] == [
        *("| mpich | 2 | 1 of 2 | 1 of 2 |", "| impi | 4 | 0 of 2 | - |", "| mpich | 4 | 1 of 2 | - |"),
        "| mpich | 2 | all_reduce | any | warm | 1 MiB | 100.0 | 50.0 | mpi | 2.00 |",
        "| mpich | 4 | all_reduce | any | warm | 1 KiB | 14.0 | 9.0 | mpi | 1.56 |",
        "| mpich | 2 | all_reduce | any | warm | 1 KiB | 10.0 | 8.0 | symmetric | 1.25 |",
    ]
    assert [bytes_name(size) for size in (1000, 1 << 10, 3 << 20)] == ["1000", "1 KiB", "3 MiB"]
    assert tables([]) == []


def test_the_picture_has_a_panel_for_each_operation_and_number_of_ranks(tmp_path: Path) -> None:
    more = {**part("impi", 2, sides(3.0, 4.0, 2.0)), "operation": "scan"}
    draw(
        cells_of([part("mpich", 2, sides(1.0, 1.0, 1.0)), part("impi", 4, sides(2.0, 3.0, 4.0)), more]),
        tmp_path / "a.svg",
    )
    drawn = (tmp_path / "a.svg").read_text()
    for title in ("all_reduce, 2 ranks", "all_reduce, 4 ranks", "scan, 2 ranks", "impi, symmetric arrays, warm"):
        assert drawn.count(f"<!-- {title} -->") == 1, title


PRINTED = """
# Benchmarking Allgather
# #processes = 4
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
          256          200         1.50         2.50         2.00
         1024           87       10.00        30.00        20.25
"""


def test_imb_is_asked_for_the_same_bytes_and_its_means_are_compared() -> None:
    assert imb.arguments("all_gather", 4, [1024, 4096])[0] == "allgather"
    assert imb.arguments("all_gather", 4, [1024, 4096])[-1] == "256,1024"
    assert imb.arguments("all_reduce", 4, [1024, 4096])[-1] == "1024,4096"
    assert imb.parse(PRINTED, "all_gather", 4) == [(1024, 2.0), (4096, 20.25)]
    assert imb.parse(PRINTED, "broadcast", 4) == [(256, 2.0), (1024, 20.25)]
    starts = {"bench": [[(1024, 3.0)], [(1024, 2.0)], [(1024, 9.0)]], "imb": [[(1024, 2.0), (4096, 1.0)]]}
    lines = imb.table([{"operation": "all_gather", "ranks": 4, **starts}])
    assert lines[-2] == "| all_gather | 4 | 1 KiB | 3.0 (2.0 to 9.0) | 2.0 (2.0 to 2.0) | 1.50 |"
    assert imb.table([]) == []
