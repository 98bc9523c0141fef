"""`python -m collectives.bench` as users start it: its table, its files, its status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import ROOT, environment

BENCH = ("-m", "collectives.bench")


def lines_of(out: str) -> list[list[str]]:
    """The words of a table's lines."""
    return [line.split() for line in out.splitlines() if not line.startswith("#")]


def test_all_operations_against_the_peers(mpirun, tmp_path: Path) -> None:
    path, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    sizes = ("-b", 100, "-e", 100, "-n", 1, "-w", 0)
    sides = ("--algorithms=auto,symmetric,ring,tree,pairwise", "--compare=mpi,gloo,copy")
    done = mpirun(3, *BENCH, "all", *sizes, *sides, f"--json={path}", f"--plot={picture}", timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert {(row["op"], row["algorithm"]) for row in rows} >= {
        *(("all_reduce", "ring"), ("all_reduce", "gloo"), ("all_to_all", "pairwise"), ("gather", "tree")),
        *(("scan", "mpi"), ("broadcast", "gloo"), ("scatter", "gloo")),
    }
    assert all(row["time_us"] > 0 and row["ranks"] == 3 for row in rows)
    assert all(row["wrong"] == 0 for row in rows if row["algorithm"] != "copy")
    assert {row["algorithm"] for row in rows if row["buffer"] == "symmetric"} == {"auto", "symmetric"}
    with_gloo = {row["op"] for row in rows if row["algorithm"] == "auto" and "gloo" in row["ratios"]}
    assert with_gloo == {row["op"] for row in rows} - {"scan", "exscan"}
    table = lines_of(done.stdout)
    assert len(table) == len({(r["op"], r["bytes"], r["algorithm"], r["buffer"]) for r in rows})
    assert "# all_gather of float32: not served by tree, pairwise, copy" in done.stdout
    assert done.stdout.count("# Out of bounds values : 0 OK") == 10
    assert picture.read_bytes().startswith(b"\x89PNG")
    by_row = next(row for row in rows if (row["op"], row["algorithm"], row["place"]) == ("all_reduce", "auto", "out"))
    first = next(line for line in table if line[5:8] == ["auto", "user", "warm"])
    assert first[:5] == [str(by_row["bytes"]), str(by_row["count"]), "float32", "sum", "-1"]
    assert float(first[8]) == pytest.approx(by_row["time_us"], abs=0.06)


INJECTED = """if True:
    import sys
    from collectives.bench import __main__ as program
    from collectives import Communicator

    right = Communicator.all_gather

    def wrong(self, out, x, *arguments, **settings):
        done = right(self, out, x, *arguments, **settings)
        if self.rank == 1 and hasattr(out, "zero_"):
            out[0] += 1
        return done

    Communicator.all_gather = wrong
    sys.exit(program.main())
"""


@pytest.mark.thorough
def test_a_wrong_result_is_counted_and_is_the_status(mpirun) -> None:
    done = mpirun(
        2, "-c", INJECTED, "all_gather,broadcast", "-b", 64, "-e", 64, "-n", 1, "--buffers=user", "--percentiles"
    )
    assert done.returncode == 1, done.stderr
    gathered, broadcast = lines_of(done.stdout)
    assert (gathered[-1], broadcast[-1]) == ("1", "0")
    assert done.stdout.count("# Out of bounds values : 2 FAILED") == 1, "one out of place, one in place"
    assert done.stdout.count("# Out of bounds values : 0 OK") == 1
    head = next(line.split() for line in done.stdout.splitlines() if "#wrong" in line)
    assert head[-14:] == ["p50", "p95", "p99", "max", "algbw", "busbw", "#wrong"] * 2
    assert broadcast[-14:-7] == ["N/A"] * 7, "it has no form out of place"


ALONE = """if True:
    import sys
    from collectives.bench import __main__ as program

    assert program.main() == 0
    assert not {"collectives.bench.peers", "matplotlib", "mpidl"} & set(sys.modules)
"""


def test_without_mpirun_it_is_one_rank_and_imports_no_peer() -> None:
    options = ("-e", "1K", "-n", "1", "--cold", "--cache", "64K", "--compare=mpi")
    command = [sys.executable, "-c", ALONE, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# One rank sends nothing: mpirun -n 2 python -m collectives.bench" in done.stdout
    assert all("0.00" in line for line in lines_of(done.stdout)), "of bus bandwidth"
