"""The example with --checkpoint-dir, --save-every and --resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.harness import launch

OUTCOMES = str(Path(__file__).with_name("outcomes.py"))
SIZE = ["--layers", "2", "--heads", "2", "--embd", "32", "--block-size", "16", "--warmup", "2"]
TINY = [*SIZE, "--steps", "6", "--eval-every", "0", "--eval-sequences", "7", "--sample", "0"]


def run(ranks: int, *lines: list[Any]) -> list[tuple[int, str, str]]:
    """Status, output and errors of rank 0 for each of these command lines, called in one job."""
    done = launch.mpirun(
        ranks, OUTCOMES, "examples/gpt2_zero3.py", json.dumps([list(map(str, line)) for line in lines])
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert all(len({status for status, _, _ in each}) == 1 for each in outcomes)
    return [tuple(each[0]) for each in outcomes]


@pytest.fixture(scope="module")
def saved(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """On 2 ranks, without and with dropout: a whole run that saves after steps 2, 4 and 6, and what others wrote.

    "again": goes on from its step 4, with checkpoints elsewhere; "anew": told never to.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    lines, results = [], {}
    for name, dropout in (("exact", "0"), ("random", "0.1")):
        here = folder / name
        common = [*TINY, "--data", text, "--dropout", dropout, "--json"]
        every = ["--checkpoint-dir", here, "--save-every", 2]
        results |= {(name, kind): folder / f"{name}-{kind}.json" for kind in ("whole", "again", "anew")}
        lines += [
            [*common, results[name, "whole"], *every],
            [*common, results[name, "again"], "--checkpoint-dir", folder / "more", "--resume", here / "step-00000004"],
            [*common, results[name, "anew"], *every, "--resume", "never"],
        ]
    outcomes = run(2, *lines)
    assert [status for status, _, _ in outcomes] == [0] * len(lines), outcomes
    said = dict(zip(results, (out for _, out, _ in outcomes), strict=True))
    found = {key: json.loads(path.read_text()) for key, path in results.items()}
    return SimpleNamespace(folder=folder, said=said, results=found)


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_everything_at_once_goes_on_to_the_bit(text: Path, tmp_path: Path) -> None:
    """Checkpointed blocks, offload, delayed updates, validations; the whole run saves nothing."""
    found = {name: tmp_path / f"{name}.json" for name in ("whole", "saving", "again")}
    options = [*TINY, "--data", text, "--dropout", "0.1", "--dtype", "bf16", "--checkpoint-activations"]
    options += ["--offload", "disk", "--delayed-update", "1", "--eval-every", "2", "--zero", "3", "--clip", "0.5"]
    outcomes = run(
        2,
        [*options, "--json", found["whole"]],
        [*options, "--json", found["saving"], "--checkpoint-dir", tmp_path / "kept", "--save-every", "1"],
        [*options, "--json", tmp_path / "5.json", "--resume", tmp_path / "kept" / "step-00000005"],
        [*options, "--json", found["again"], "--checkpoint-dir", tmp_path / "four", "--save-every", "4"],
        [*options, "--json", found["again"], "--resume", tmp_path / "four" / "step-00000004"],
    )
    assert [status for status, _, _ in outcomes] == [0] * len(outcomes), outcomes
    whole, saving, again, last = (json.loads(path.read_text()) for path in (*found.values(), tmp_path / "5.json"))
    assert losses(saving) == losses(whole)
    assert losses(again) == losses(whole)[4:]
    assert losses(last) == losses(whole)[5:]
    assert whole["val_loss"] == saving["val_loss"] == again["val_loss"] == last["val_loss"]


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_optimizers_that_send_or_keep_less_go_on_to_the_bit(text: Path, tmp_path: Path) -> None:
    """Saved at the last step of averaged gradients, or between outer steps. Another optimizer's state is refused."""
    ways = {
        "adamw8bit": ["--zero", "2"],
        "onebitadam": ["--zero", "0", "--freeze-step", "3"],
        "zerooneadam": ["--zero", "1"],
        "onebitlamb": ["--zero", "1", "--freeze-step", "3"],
        "dion": ["--zero", "0"],
        "diloco": ["--zero", "0", "--outer-every", "2", "--outer-warmup", "2"],
    }
    lines = []
    for name, way in ways.items():
        common = [*TINY, "--data", text, "--optimizer", name, *way, "--json"]
        folder = tmp_path / name
        lines.append([*common, tmp_path / f"{name}.json", "--checkpoint-dir", folder, "--save-every", 3])
        lines.append([*common, tmp_path / f"{name}-again.json", "--resume", folder / "step-00000003"])
    other = ["--optimizer", "onebitadam", "--zero", "0", "--resume", tmp_path / "adamw8bit"]
    *outcomes, (status, _, errors) = run(2, *lines, [*TINY, "--data", text, *other])
    assert [each[0] for each in outcomes] == [0] * len(lines), outcomes
    for name in ways:
        whole, again = (json.loads((tmp_path / f"{name}{kind}.json").read_text()) for kind in ("", "-again"))
        assert losses(again) == losses(whole)[3:], name
        assert again["val_loss"] == whole["val_loss"]
    assert (status, errors.count("\n")) == (2, 1), errors
    assert "holds the state of AdamW8bit; the optimizer here is OneBitAdam" in errors


def losses(results: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in results["steps"]]


@pytest.mark.parametrize("name", ["exact", "random"])
def test_a_second_run_goes_on_to_the_bit(saved: SimpleNamespace, name: str) -> None:
    whole, again, anew = (saved.results[name, kind] for kind in ("whole", "again", "anew"))
    path = saved.folder / name
    assert f"going on from {path / 'step-00000004'}, step 4, saved by zero3 on 2 ranks" in saved.said[name, "again"]
    assert [entry["step"] for entry in again["steps"]] == [5, 6]
    assert losses(again) == losses(whole)[4:]
    assert again["val_loss"] == whole["val_loss"]
    assert (saved.folder / "more" / "latest").read_text() == "step-00000006\n"
    for kind in ("whole", "anew"):
        assert "going on" not in saved.said[name, kind]
    assert "note: " not in saved.said[name, "whole"]
    note = f"note: {path / 'step-00000006'} is of a former run; the 2 written last are kept\n"
    assert note in saved.said[name, "anew"]
    assert losses(anew) == losses(whole)
    assert sorted(p.name for p in path.glob("step-*")) == ["step-00000004", "step-00000006"]  # two are kept


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "stage", "batch"), [(1, 0, 4), (4, 2, 1)])
def test_on_another_number_of_ranks_and_stage(
    saved: SimpleNamespace, text: Path, tmp_path: Path, ranks: int, stage: int, batch: int
) -> None:
    """The global batch is the same. Step 6 is torn, or turns out damaged as it is loaded: then step 4 is it. What is
    wrong is one line, and a loss that is no number is null in JSON.
    """
    copies = [tmp_path / "torn", tmp_path / "damaged"]
    for copy in copies:
        shutil.copytree(saved.folder / "exact", copy)
    (copies[0] / "step-00000006" / "rank00001-000.safetensors").unlink()
    damaged = copies[1] / "step-00000006" / "rank00001-000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1  # of a parameter or its state; the end is rank 1's random state, not read by rank 0
    damaged.write_bytes(data)
    named, torn_all = tmp_path / "named", tmp_path / "torn all"
    shutil.copytree(copies[1], named)
    shutil.copytree(copies[1], torn_all)
    for path in torn_all.glob("step-*/rank00000-000.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    common = [*TINY, "--data", text, "--zero", stage, "--batch", batch]
    wrong = {
        "--resume nowhere: no such directory": (2, ["--resume", "nowhere"]),
        f"--resume {tmp_path}: is no checkpoint, and holds none": (2, ["--resume", tmp_path]),
        "--save-every: needs --checkpoint-dir DIR to save to": (2, ["--save-every", 2]),
        f"{text} is not a directory": (2, ["--checkpoint-dir", text / "x", "--resume", "never"]),
        "is of another model": (2, ["--checkpoint-dir", saved.folder / "exact", "--embd", 64]),
        f"{named / damaged.parent.name / damaged.name}: is damaged: bytes": (1, ["--resume", named]),
        f"{torn_all}: no checkpoint in it can be loaded; --resume never begins anew": (
            1,
            ["--checkpoint-dir", torn_all],
        ),
        "File name too long": (1, ["--checkpoint-dir", tmp_path / ("x" * 300), "--resume", "never", "--steps", 1]),
    }
    results = [tmp_path / f"{copy.name}.json" for copy in copies]
    torn, passed, again, lost, *others = run(
        ranks,
        *([*common, "--checkpoint-dir", copy, "--json", path] for copy, path in zip(copies, results, strict=True)),
        [*common, "--checkpoint-dir", copies[0], "--seed", 5, "--steps", 7],
        [*common, "--lr", 1e30, "--warmup", 0, "--json", tmp_path / "lost.json"],
        *([*common, *more] for _, more in wrong.values()),
    )
    for copy, path, why, (status, out, errors) in zip(
        copies, results, ["is missing", "is damaged: bytes"], (torn, passed), strict=True
    ):
        assert status == 0, errors
        assert f"going on from {copy / 'step-00000004'}, step 4" in out
        assert [line for line in out.splitlines() if line.startswith("passed over: ") and why in line]
        assert "warning" not in out
        found = json.loads(path.read_text())
        whole = saved.results["exact", "whole"]
        assert [entry["step"] for entry in found["steps"]] == [5, 6]
        np.testing.assert_allclose(losses(found), losses(whole)[4:], rtol=0, atol=1e-6)
        assert found["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-6)
    assert again[0] == 0, again
    assert "warning: it was saved with other settings: --steps 6, now 7, --seed 1337, now 5\n" in again[1]
    assert lost[0] == 0, lost
    assert "NaN" not in (tmp_path / "lost.json").read_text()
    assert losses(json.loads((tmp_path / "lost.json").read_text()))[-1] is None
    for (said, (expected, _)), (status, _, errors) in zip(wrong.items(), others, strict=True):
        assert (status, errors.count("\n")) == (expected, 1), errors
        assert errors.startswith("error: ")
        assert said in errors
