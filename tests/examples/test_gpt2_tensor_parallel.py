"""The example with --tp: the losses, the text and the checkpoints of one process, with heads that no tp divides."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.examples.test_gpt2_zero3 import call_main, losses

SIZE = ["--layers", "2", "--heads", "7", "--embd", "28", "--block-size", "16"]
TINY = [*SIZE, "--steps", "4", "--warmup", "2", "--eval-every", "2", "--eval-sequences", "7", "--sample", "20"]
SEQUENCES = 6  # a step, on all ranks
Runs = dict[str, SimpleNamespace]

ON_THREE = {
    "dp=3": ["--batch", "2", "--zero", "0"],
    "tp=3": ["--batch", "6", "--tp", "3"],
    "tp=3, in pieces": ["--batch", "6", "--tp", "3", "--sequence-parallel", "--checkpoint-activations", "2"],
}
ON_FOUR = {
    "DDP": ["--tp", "2", "--zero", "0", "--batch", "1", "--grad-accum", "3"],
    "bf16": ["--tp", "2", "--zero", "2", "--batch", "3", "--dtype", "bf16", "--offload", "disk"],
    "ZeRO-3": ["--tp", "2", "--zero", "3", "--global-batch", "6", "--batch", "3", "--sequence-parallel"],
}


def results_of(ranks: int, lines: dict[str, list[object]], text: Path, folder: Path) -> Runs:
    """Runs the example in one job, and returns rank 0's output and the results of each of these command lines."""
    paths = {name: folder / f"{name}.json" for name in lines}
    outcomes = call_main(ranks, [[*TINY, "--data", text, *lines[name], "--json", paths[name]] for name in lines])
    done = {}
    for name, ((status, out, errors), *_) in zip(lines, outcomes, strict=True):
        assert status == 0, errors
        done[name] = SimpleNamespace(stdout=out, results=json.loads(paths[name].read_text()))
    return done


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One process."""
    return results_of(1, {"alone": ["--batch", "6"]}, text, tmp_path_factory.mktemp("alone"))["alone"]


@pytest.fixture(scope="module")
def on_three(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """ON_THREE, on three ranks."""
    return results_of(3, {**ON_THREE}, text, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def on_four(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """ON_FOUR, on four ranks, and "again": ZeRO-3 goes on from its step 2."""
    folder = tmp_path_factory.mktemp("four")
    kept = folder / "kept"
    again = [*ON_FOUR["ZeRO-3"], "--resume", kept / "step-00000002"]
    saving = [*ON_FOUR["ZeRO-3"], "--checkpoint-dir", kept, "--save-every", 2]
    return results_of(4, {**ON_FOUR, "ZeRO-3": saving, "again": again}, text, folder)


def check(runs: Runs, alone: SimpleNamespace) -> None:
    """Losses and the sample are those of one process, and a step's tokens are counted once for the ranks of tp."""
    for name, done in runs.items():
        found, expected = done.results, alone.results
        near = {"rtol": 0, "atol": 0.02 if name == "bf16" else 1e-5, "err_msg": name}
        np.testing.assert_allclose(losses(found), losses(expected)[-len(found["steps"]) :], **near)
        np.testing.assert_allclose(found["val_loss"], expected["val_loss"], **near)
        assert found["params"] == expected["params"]
        assert found["tokens_per_s"] * found["step_ms_median"] / 1e3 == pytest.approx(SEQUENCES * 16), name
        assert f" {SEQUENCES * 16} a step" in done.stdout
        if name != "bf16":
            assert done.stdout.split("a sample of")[1] == alone.stdout.split("a sample of")[1]


@pytest.mark.thorough
def test_three_ranks_with_seven_heads_train_as_one_process(on_three: Runs, alone: SimpleNamespace) -> None:
    check(on_three, alone)
    assert [done.results["tp"] for done in on_three.values()] == [1, 3, 3]
    assert "DDP on 3 ranks, " in on_three["dp=3"].stdout
    assert "ZeRO stage 3 on 3 ranks (dp=1, tp=3, sequence parallel), " in on_three["tp=3, in pieces"].stdout


@pytest.mark.thorough
def test_two_times_two_ranks_train_as_one_process(on_four: Runs, alone: SimpleNamespace) -> None:
    check(on_four, alone)
    assert "DDP on 4 ranks (dp=2, tp=2), " in on_four["DDP"].stdout


@pytest.mark.thorough
def test_a_second_run_goes_on_to_the_bit(on_four: Runs) -> None:
    whole, again = on_four["ZeRO-3"], on_four["again"]
    assert "step-00000002, step 2, saved by " in again.stdout
    assert losses(again.results) == losses(whole.results)[2:]
    assert again.results["val_loss"] == whole.results["val_loss"]


@pytest.mark.thorough
def test_the_models_own_size_trains_as_over_dp(text: Path, tmp_path: Path) -> None:
    """7 heads in 11 layers, on two ranks that divide neither the heads nor a fused weight evenly."""
    short = ["--steps", "2", "--eval-every", "0", "--eval-sequences", "2", "--sample", "0", "--data", text]
    lines: dict[str, list[object]] = {
        "dp": [*short, "--batch", "1"],
        "tp": [*short, "--batch", "2", "--tp", "2", "--sequence-parallel"],
    }
    paths = {name: tmp_path / f"{name}.json" for name in lines}
    outcomes = call_main(2, [[*lines[name], "--json", paths[name]] for name in lines])
    for (status, _, errors), *_ in outcomes:
        assert status == 0, errors
    over_dp, over_tp = (json.loads(paths[name].read_text()) for name in lines)
    np.testing.assert_allclose(losses(over_tp), losses(over_dp), rtol=1e-4)
    assert over_tp["params"] == over_dp["params"] > 25_000_000
