"""`bench_parallelism.py` trains the same by all libraries, and refuses wrong options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.launch import ROOT, environment, run

ENGINES = ["threads", "tp", "tp-sp", "ddp", "zero3", "torch-tp"]  # that train the same
MEGATRON = find_spec("megatron") is not None and find_spec("megatron.core") is not None


def parallelism(*options: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run([sys.executable, "benchmarks/bench_parallelism.py", *options], timeout, ROOT, environment(PATH=path))


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_all_libraries_train_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    steps = ("--steps=3", "--warmup=1", "--launches=1")
    done = parallelism(f"--engines={','.join([*ENGINES, 'parts'])}", "--shapes=2x8x128x1", *steps, f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = {row["engine"]: row for row in json.loads(path.read_text())["shapes"]}
    assert rows.keys() == {*ENGINES, "parts"}
    losses = [rows[name]["loss"] for name in ENGINES]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-4)
    assert rows["tp"]["params"] == rows["parts"]["params"] < rows["threads"]["params"]
    assert all(len(row["seconds"][0]) == 3 and row["peak"] > 0 for row in rows.values())


@pytest.mark.thorough
@pytest.mark.skipif(not MEGATRON, reason="Megatron-Core is not installed")
@pytest.mark.limit(240)
def test_megatron_trains_the_same(tmp_path: Path) -> None:
    """Its weights are parts of all layers, fused of queries, keys and values."""
    path = tmp_path / "rows.json"
    steps = ("--steps=4", "--warmup=1", "--launches=1")
    engines = "threads,tp,torch-tp,megatron"
    done = parallelism(
        "--show=table", f"--table-engines={engines}", "--table-shapes=2x8x256x2", *steps, f"--json={path}"
    )
    assert done.returncode == 0, done.stderr
    rows = {row["engine"]: row for row in json.loads(path.read_text())["table"]}
    assert list(rows) == engines.split(",")
    assert rows["megatron"]["loss"] == pytest.approx(rows["threads"]["loss"], abs=1e-4)
    assert rows["megatron"]["params"] == rows["tp"]["params"]
    assert "| threads, ms | torch-tp, ms | megatron, ms | tp, ms |" in done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(MEGATRON, reason="Megatron-Core is installed")
def test_megatron_that_is_not_installed_is_one_line() -> None:
    done = parallelism("--engines=tp,megatron")
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.endswith("--engines: megatron is not installed; needs pip install --no-deps megatron-core")


@pytest.mark.thorough
@pytest.mark.limit(340)
def test_everything_is_shown_in_one_run(tmp_path: Path) -> None:
    path, figure = tmp_path / "rows.json", tmp_path / "batches.png"
    done = parallelism(
        "--show=table,generate,all-reduce,batches",
        *("--table-shapes=1x8x128x1", "--table-engines=threads,tp", "--models=128x1", "--tokens=3", "--repetitions=5"),
        *("--batches=1,2", "--batch-model=1x8x128x1", "--batch-engines=zero3", f"--plot={figure}"),
        *("--steps=2", "--warmup=1", "--launches=1", f"--json={path}"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [row["engine"] for row in rows["table"]] == ["threads", "tp"]
    assert [row["engine"] for row in rows["generate"]] == ["threads", "tp"]
    assert rows["generate"][0]["text"] == rows["generate"][1]["text"]
    assert [(row["bytes"], len(row["bare"]), len(row["layers"])) for row in rows["all-reduce"]] == [(4096, 5, 5)]
    assert "WRONG" not in done.stdout
    assert [(row["shape"], row["engine"]) for row in rows["batches"]] == [("2x8x128x1", "zero3")]  # it cuts the batch
    assert "| 1x8x128x1 | " in done.stdout
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    "option",
    [
        "--show=tables",
        "--models=65x1",
        "--batches=0",
        "--plot=a.png",
        "--engines=megatrons",
        "--shapes=1x2x3",
        "--shapes=1x8x65x1",
        "--ranks=0",
        "--warmup=0",
    ],
)
def test_wrong_options_are_one_line_and_status_2(option: str) -> None:
    done = parallelism(option)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1].partition("error: ")[2]
    assert said.removeprefix("argument ").startswith(option.partition("=")[0])
