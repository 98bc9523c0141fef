"""The example with --tp: the losses, the text and the checkpoints of one process, with heads that no tp divides."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.examples.test_gpt2_resume import losses, run

SIZE = ["--layers", "2", "--heads", "7", "--embd", "28", "--block-size", "16"]
TINY = [*SIZE, "--steps", "4", "--warmup", "2", "--eval-every", "2", "--eval-sequences", "7", "--sample", "20"]
SEQUENCES = 6  # a step, on all ranks

RUNS = {  # the number of ranks, and for each run its options
    1: {"alone": ["--batch", "6"]},
    3: {
        "dp=3": ["--batch", "2", "--zero", "0"],
        "tp=3": ["--batch", "6", "--tp", "3"],
        "tp=3, in pieces": ["--batch", "6", "--tp", "3", "--sequence-parallel", "--checkpoint-activations", "2"],
    },
    4: {
        "tp=2, DDP": ["--tp", "2", "--zero", "0", "--batch", "1", "--grad-accum", "3"],
        "tp=2, ZeRO-3": ["--tp", "2", "--zero", "3", "--global-batch", "6", "--batch", "3", "--sequence-parallel"],
        "tp=2, bf16": ["--tp", "2", "--zero", "2", "--batch", "3", "--dtype", "bf16", "--offload", "disk"],
    },
}


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Output of rank 0 and results, for each of RUNS, and for one that goes on from step 2 of another's checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    kept = ["--checkpoint-dir", folder / "kept", "--save-every", "2"]
    again = [*RUNS[4]["tp=2, ZeRO-3"], "--resume", folder / "kept" / "step-00000002"]
    done = {}
    for ranks, options in RUNS.items():
        lines = {name: [*given, *(kept if name == "tp=2, ZeRO-3" else [])] for name, given in options.items()}
        lines |= {"again": again} if ranks == 4 else {}
        paths = {name: folder / f"{name}.json" for name in lines}
        outcomes = run(ranks, *([*TINY, "--data", text, *lines[name], "--json", paths[name]] for name in lines))
        for name, (status, out, errors) in zip(lines, outcomes, strict=True):
            assert status == 0, errors
            done[name] = SimpleNamespace(stdout=out, results=json.loads(paths[name].read_text()))
    return done


def test_losses_are_those_of_one_process(runs: dict[str, SimpleNamespace]) -> None:
    alone = runs["alone"].results
    for name in (*RUNS[3], *RUNS[4]):
        found = runs[name].results
        near = {"rtol": 0, "atol": 0.02 if "bf16" in name else 1e-5, "err_msg": name}
        np.testing.assert_allclose(losses(found), losses(alone), **near)
        np.testing.assert_allclose(found["val_loss"], alone["val_loss"], **near)
        assert found["params"] == alone["params"]


def test_all_runs_sample_the_same_text(runs: dict[str, SimpleNamespace]) -> None:
    samples = {done.stdout.split("a sample of")[1] for name, done in runs.items() if "bf16" not in name}
    assert len(samples) == 1


def test_tokens_are_counted_once_for_the_ranks_of_tp(runs: dict[str, SimpleNamespace]) -> None:
    for name, done in runs.items():
        results = done.results
        assert results["tokens_per_s"] * results["step_ms_median"] / 1e3 == pytest.approx(SEQUENCES * 16), name
        assert f" {SEQUENCES * 16} a step" in done.stdout


def test_the_first_line_says_how_the_ranks_lie(runs: dict[str, SimpleNamespace]) -> None:
    assert "ZeRO stage 3 on 4 ranks (dp=2, tp=2, sequence parallel), " in runs["tp=2, ZeRO-3"].stdout
    assert "DDP on 4 ranks (dp=2, tp=2), " in runs["tp=2, DDP"].stdout
    assert "DDP on 3 ranks, " in runs["dp=3"].stdout
    tp = {name: done.results["tp"] for name, done in runs.items()}
    assert (tp["alone"], tp["dp=3"], tp["tp=3"], tp["tp=2, DDP"]) == (1, 1, 3, 2)


def test_a_second_run_goes_on_to_the_bit(runs: dict[str, SimpleNamespace]) -> None:
    whole, again = runs["tp=2, ZeRO-3"], runs["again"]
    assert "step-00000002, step 2, saved by " in again.stdout
    assert losses(again.results) == losses(whole.results)[2:]
    assert again.results["val_loss"] == whole.results["val_loss"]
