"""The comparison of how a model learns with compressed gradients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_learning
import mpidl
from tests.harness.launch import ROOT


def test_the_table_compares_the_means_of_seeds_with_full_precision() -> None:
    points = [
        {"method": method, "seed": seed, "step": step, "loss": loss + seed, "bytes": 2e6, "seconds": 3.0}
        for method, loss in (("fp32", 1.0), ("int8", 1.5))
        for seed in (0, 1)
        for step in (0, 7)
    ]
    _, plain, compressed = bench_learning.table(points, 7)
    assert plain.split() == ["fp32", "1.500", "+0.000", "1.000", "to", "2.000", "2.0", "3.0"]
    assert compressed.split() == ["int8", "2.000", "+0.500", "1.500", "to", "2.500", "2.0", "3.0"]


def test_the_words_behind_a_name() -> None:
    of = bench_learning.Method.of
    assert of("powersgd:4,fp16") == bench_learning.Method("powersgd:4,fp16", None, 1e-3, True)
    assert of("int4 after 20 at 2e-3 without feedback") == bench_learning.Method("int4", 20, 2e-3, False)
    assert of("diloco:50 at .5").adam["lr"] == 0.5
    for wrong in ("int8 at 0", "int8 at 0.1 after 3", "int8 at", "int8 after 0", "int8 without", ""):
        with pytest.raises(mpidl.UsageError, match="--methods"):
            of(wrong)


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_bytes_of_steps(comm) -> None:
    def sent(method: str, steps: int) -> float:
        made = bench_learning.Method.of(method)
        return bench_learning.build(made, torch.nn.Linear(64, 64, bias=False), comm).sent(steps)

    in_full = 2 * 3 / 4 * 4 * 64 * 64
    assert sent("fp32", 3) == 3 * in_full
    assert sent("int8 without feedback", 2) == 2 * 2 * 3 * (1024 + 4 * 4)
    a_step = 2 * 3 / 4 * 4 * (64 + 64)
    assert sent("powersgd:1", 3) == 3 * in_full
    assert sent("powersgd:1", 12) == 10 * in_full + 2 * a_step
    assert sent("diloco:10", 29) == 2 * in_full
    assert sent("onebit", 3) == 3 * in_full
    assert sent("powersgd:1 after 2", 3) == 2 * in_full + a_step
    assert sent("diloco:10 after 5", 4) == 4 * in_full
    assert sent("diloco:10 after 5", 29) == 7 * in_full


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_methods_begin_with_the_same_loss_and_learn(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("".join("abcdefgh"[(n * n) % 8] for n in range(3000)))
    options = [
        "--methods=fp32,int8,onebit,diloco:4",
        "--steps=12",
        "--every=12",
        "--validation=4",
        f"--data={text}",
        f"--json={out}",
    ]
    done = mpirun(2, ROOT / "benchmarks/bench_learning.py", *options, timeout=200)
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())["points"]
    losses = {(point["method"], point["step"]): point["loss"] for point in points}
    assert losses["fp32", 0] == losses["int8", 0] == losses["onebit", 0] == losses["diloco:4", 0]
    assert losses["fp32", 12] < losses["fp32", 0] - 0.1
    assert losses["int8", 12] == pytest.approx(losses["fp32", 12], abs=0.05)
    assert losses["onebit", 12] == pytest.approx(losses["fp32", 12], abs=0.01)  # v is not frozen yet
    assert losses["diloco:4", 12] < losses["fp32", 0] - 0.1


@pytest.mark.thorough
def test_a_job_goes_on_from_the_runs_that_were_kept(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("abcdefgh" * 100)

    def job(*more: str) -> Any:
        options = [f"--data={text}", f"--json={out}", "--every=1", "--validation=2", "--steps=1", *more]
        return mpirun(2, ROOT / "benchmarks/bench_learning.py", *options, timeout=120)

    assert job("--methods=fp32").returncode == 0
    first = json.loads(out.read_text())["points"]
    done = job("--methods=int8,fp32")
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())["points"]
    assert [point for point in points if point["method"] == "fp32"] == first
    assert {point["method"] for point in points} == {"fp32", "int8"}
    assert "fp32                         seed 0  step" not in done.stdout
    for option in ("--steps=2", "--validation=4"):
        wrong = job(option)
        assert wrong.returncode != 0
        assert "was written with" in wrong.stderr
