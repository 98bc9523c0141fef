"""BERT's and ResNet's examples with checkpoints: stopped by a signal in the middle, and gone on with to the bit."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidl import STOPPED
from tests.harness import launch

OUTCOMES = str(Path(__file__).with_name("outcomes.py"))
LAST = {"bert_mlm": 6, "resnet_ddp": 10}  # steps of a training; ResNet's are two epochs of five
STOPPED_AT = {"bert_mlm": 3, "resnet_ddp": 7}


def options(name: str, text: Path) -> list[object]:
    if name == "resnet_ddp":
        return ["--width", "4", "--epochs", "2", "--no-progress", "--batch-size", "358"]
    size = ["--model", "tiny", "--sequence-length", "18", "--batch-size", "2", "--dropout", "0.1"]
    return [*size, "--steps", "6", "--warmup", "2", "--eval-every", "4", "--eval-sequences", "7", "--data", text]


def run(ranks: int, name: str, *lines: list[Any]) -> list[SimpleNamespace]:
    """Status, output and errors of rank 0 for each of these command lines, called in one job."""
    arguments = json.dumps([list(map(str, line)) for line in lines])
    done = launch.mpirun(ranks, OUTCOMES, f"examples/{name}.py", arguments, timeout=110)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert all(len({status for status, _, _ in each}) == 1 for each in outcomes)
    return [SimpleNamespace(status=each[0][0], out=each[0][1], errors=each[0][2]) for each in outcomes]


def figures(path: Path) -> list[dict[str, float]]:
    """Figures that do not depend on time: of each step or epoch, and of what was held out at the end."""
    results = json.loads(path.read_text())
    found = [*results.get("epochs", results.get("steps", [])), *results.get("held_out", [])[-1:]]
    return [{name: value for name, value in entry.items() if name not in ("ms", "seconds")} for entry in found]


@pytest.mark.parametrize(
    "name",
    [
        "bert_mlm",
        pytest.param(
            "resnet_ddp", marks=pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
        ),
    ],
)
@pytest.mark.thorough
@pytest.mark.limit(240)
def test_a_signal_stops_it_in_the_middle_and_it_goes_on_to_the_bit(text: Path, tmp_path: Path, name: str) -> None:
    common, kept = options(name, text), tmp_path / "kept"
    every = [*common, "--checkpoint-dir", kept, "--save-every", "2", "--keep-last", "2", "--on-nan", "skip"]
    at, last = STOPPED_AT[name], LAST[name]
    whole, again = tmp_path / "whole.json", tmp_path / "again.json"
    first, stopped, resumed, over, wrong = run(
        2,
        name,
        [*common, "--json", whole],
        [*every, f"signal:{at}"],
        [*every, "--json", again],
        every,
        [*common, "--save-every", "2"],
    )
    assert (first.status, stopped.status, resumed.status, over.status, wrong.status) == (0, STOPPED, 0, 0, 2), stopped
    assert f"stopped by SIGUSR1, after step {at}, which is saved; status 75: can go on\n" in stopped.out
    assert f"going on from {kept}/step-{at:08d}, step {at}, saved by ddp on 2 ranks\n" in resumed.out
    assert "warning" not in resumed.out
    missing = at if name == "bert_mlm" else 1
    assert figures(again) == figures(whole)[missing:]
    assert sorted(path.name for path in kept.glob("step-*")) == [f"step-{step:08d}" for step in (last - 2, last)]
    assert f"note: it has come to step {last} of {last}: there is nothing left to train\n" in over.out
    assert wrong.errors == "error: --save-every: needs --checkpoint-dir DIR to save to\n"


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_an_epoch_is_finished_on_another_number_of_ranks(text: Path, tmp_path: Path) -> None:
    """With statistics of all ranks' images, as those of one rank's depend on how many there are."""
    common = [*options("resnet_ddp", text), "--batch-size", "720", "--sync-bn"]  # two steps an epoch
    whole, again, kept = tmp_path / "whole.json", tmp_path / "again.json", tmp_path / "kept"
    run(2, "resnet_ddp", [*common, "--json", whole], [*common, "--checkpoint-dir", kept, "signal:1"])
    (done,) = run(1, "resnet_ddp", [*common, "--checkpoint-dir", kept, "--json", again])
    assert done.status == 0, done.errors
    assert "step 1, saved by ddp on 2 ranks" in done.out
    for found, expected in zip(figures(again), figures(whole), strict=True):
        np.testing.assert_allclose(found["train_loss"], expected["train_loss"], rtol=5e-3)
