"""The example with ResNet: its steps are the exact ones, the results it writes, and one line for wrong use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpidl.data.images import Digits
from mpidl.models.resnet import ResNet
from mpidl.models.segments import buffers_left_alone
from tests.harness import launch

pillow = pytest.importorskip("PIL.Image")
# Looked for and not imported: that takes more than a second, on every rank that collects tests.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")

EXAMPLE = str(launch.ROOT / "examples" / "resnet_ddp.py")
OUTCOMES = str(Path(__file__).with_name("outcomes.py"))
SEED, BATCH = 1337, 358
TINY = ["--width", "4", "--epochs", "2", "--no-progress", "--batch-size", str(BATCH), "--warmup", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven bright and twelve dark images of several sizes."""
    path, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(23):
        place = path / ("bright" if i % 2 else "dark") / f"{i}.png"
        place.parent.mkdir(exist_ok=True)
        low = 128 * (i % 2)
        pillow.fromarray(rng.integers(low, low + 128, (20 + i, 30, 3), np.uint8)).save(place)
    return path


def call_main(ranks: int, lines: Sequence[Sequence[object]]) -> list[list[tuple[int, str, str]]]:
    """Runs command lines; returns for each (status, standard output, standard error) of every rank."""
    arguments = json.dumps([list(map(str, line)) for line in lines])
    done = launch.mpirun(ranks, OUTCOMES, "examples/resnet_ddp.py", arguments, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_all(ranks: int, path: Path, runs: dict[str, list[object]]) -> dict[str, SimpleNamespace]:
    """Runs all; returns the output of rank 0 and the results of each."""
    outcomes = call_main(ranks, [[*line, "--json", path / name] for name, line in runs.items()])
    done = {}
    for name, ((status, out, errors), *elsewhere) in zip(runs, outcomes, strict=True):
        assert status == 0, errors
        assert elsewhere == [[0, "", ""]] * (ranks - 1)
        done[name] = SimpleNamespace(stdout=out, results=json.loads((path / name).read_text()))
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The example started without mpirun: what it printed, its results, and its picture."""
    path = tmp_path_factory.mktemp("alone")
    command = [sys.executable, EXAMPLE, *TINY, "--json", str(path / "json"), "--plot", str(path / "plot")]
    done = launch.run(command, 100, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stderr
    results = json.loads((path / "json").read_text())
    return SimpleNamespace(stdout=done.stdout, results=results, plot=(path / "plot").read_bytes())


FEWER = ("adamw8bit", "onebitadam", "zerooneadam", "onebitlamb", "diloco")  # bytes sent or kept
THOROUGH = ("bf16", "adamw", "lars", "lamb", "bottlenecks", *FEWER)  # runs that the others alone look at


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory, brief: bool) -> dict[str, SimpleNamespace]:
    """The runs that several tests look at."""
    images = [*TINY, "--data", folder, "--size", "16", "--batch-size", "8"]
    runs: dict[str, list[object]] = {
        "plain": TINY,
        "segments": [*TINY, "--segments", "4"],
        "bf16": [*TINY, "--dtype", "bf16"],
        "adamw": [*TINY, "--optimizer", "adamw", "--warmup", "0"],
        "lars": [*TINY, "--optimizer", "lars"],
        "lamb": [*TINY, "--optimizer", "lamb", "--warmup", "0"],
        "int8": [*TINY, "--compress", "int8"],
        "adamw8bit": [*TINY, "--optimizer", "adamw8bit", "--warmup", "0"],
        "onebitadam": [*TINY, "--optimizer", "onebitadam", "--freeze-step", "5"],
        "zerooneadam": [*TINY, "--optimizer", "zerooneadam", "--warmup", "0"],
        "onebitlamb": [*TINY, "--optimizer", "onebitlamb", "--warmup", "0", "--freeze-step", "5"],
        "diloco": [*TINY, "--optimizer", "diloco", "--outer-every", "5", "--outer-warmup", "2"],
        "bottlenecks": [*TINY, "--model", "resnet50", "--epochs", "1", "--segments", "4", "--batch-size", "480"],
        "one-left": [*TINY, "--epochs", "1", "--batch-size", "1436"],
        "images": images,
        "large": ["--data", folder, "--size", "65", "--width", "4", "--epochs", "1"],
    }
    chosen = {name: line for name, line in runs.items() if not (brief and name in THOROUGH)}
    return run_all(2, tmp_path_factory.mktemp("two"), chosen)


def figures(done: SimpleNamespace, *names: str) -> list[list[float]]:
    """Figures of each epoch: by default all that do not depend on the time it took."""
    epochs = done.results["epochs"]
    return [[epoch[name] for name in names or epoch.keys() - {"seconds"}] for epoch in epochs]


@pytest.mark.thorough
def test_a_world_of_one_writes_all_results(alone: SimpleNamespace) -> None:
    results = alone.results
    assert (results["world_size"], results["model"], results["segments"]) == (1, "resnet18", 0)
    assert (results["train_images"], results["val_images"]) == (1437, 360)
    assert (results["batch_size"], results["steps_per_epoch"]) == (358, 5)
    model = ResNet("resnet18", 10, 1, width=4, stem="small")
    assert results["params"] == sum(p.numel() for p in model.parameters())
    first, last = results["epochs"]
    assert list(last) == ["epoch", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "seconds"]
    assert (first["epoch"], last["epoch"]) == (1, 2)
    assert last["train_loss"] < first["train_loss"]
    assert last["train_accuracy"] > first["train_accuracy"] > 0
    assert results["val_accuracy"] == last["val_accuracy"]
    seconds = [epoch["seconds"] for epoch in results["epochs"]]
    assert results["epoch_seconds_mean"] == pytest.approx(np.mean(seconds))
    assert results["epoch_seconds_std"] == pytest.approx(np.std(seconds, ddof=1))
    assert 50 < results["peak_rss_mib"] < 5000


@pytest.mark.thorough
def test_epochs_are_printed_and_drawn(alone: SimpleNamespace) -> None:
    lines = alone.stdout.splitlines()
    assert "DDP on 1 rank," in lines[0]
    shape = r"epoch +\d/2  loss \d\.\d{4}  accuracy \d+\.\d\d%  validation loss .* s  \d+:\d\d left"
    assert len([line for line in lines if re.fullmatch(shape, line)]) == 2
    assert re.fullmatch(r"epoch time [\d.]+ s ± [\d.]+ s over 2 epochs; at most \d+ MiB a rank", lines[-1])
    assert f"accuracy {alone.results['val_accuracy']:.2%}" in lines[-2]
    assert len(lines) == 4
    assert alone.plot.startswith(b"\x89PNG")
    assert len(alone.plot) > 5000


def expected_of_ranks(ranks: int) -> list[list[float]]:
    """Two epochs in this process: each rank's part through the same network, every image counted once."""
    torch.manual_seed(SEED)
    model = ResNet("resnet18", 10, 1, width=4, stem="small", zero_init_residual=True)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 5e-4}, {"params": others}], lr=0.05, momentum=0.9, nesterov=True
    )
    train, validation = Digits(train=True), Digits(train=False)
    steps, step, epochs = -(-len(train) // BATCH), 0, []
    for epoch in range(2):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED + epoch))
        loss_sum, correct = 0.0, 0
        model.train()
        for batch in order.split(BATCH):
            share = (step + 1) / (steps + 1) if step < steps else (1 + np.cos(np.pi * (step - steps) / steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * share
            optimizer.zero_grad()
            for rank in range(ranks):
                part = batch[rank::ranks]
                with buffers_left_alone([model] if rank else []):  # rank 0's statistics are kept
                    logits = model(train.images[part])
                loss = F.cross_entropy(logits, train.labels[part], reduction="sum")
                (loss / len(batch)).backward()
                loss_sum += loss.item()
                correct += int((logits.argmax(1) == train.labels[part]).sum())
            optimizer.step()
            step += 1
        model.eval()
        with torch.no_grad():
            logits = model(validation.images)
        val = F.cross_entropy(logits, validation.labels).item(), (logits.argmax(1) == validation.labels).float().mean()
        epochs.append([loss_sum / len(train), correct / len(train), val[0], float(val[1])])
    return epochs


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_train_on_every_image_once_with_exact_means(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], ranks: int
) -> None:
    """The last batch has 3 and 2 images on two ranks. Rounding moves a few images from one digit to another."""
    done = alone if ranks == 1 else two_ranks["plain"]
    assert (done.results["world_size"], done.results["batch_size"]) == (ranks, BATCH)
    found = np.array(figures(done, "train_loss", "train_accuracy", "val_loss", "val_accuracy"))
    expected = np.array(expected_of_ranks(ranks))
    np.testing.assert_allclose(found[:, [0, 2]], expected[:, [0, 2]], rtol=5e-3)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], atol=10.5 / 1437)
    np.testing.assert_allclose(found[:, 3], expected[:, 3], atol=4.5 / 360)


def test_segments_change_nothing_but_memory(two_ranks: dict[str, SimpleNamespace]) -> None:
    assert figures(two_ranks["segments"]) == figures(two_ranks["plain"])
    assert "4 checkpointed segments" in two_ranks["segments"].stdout
    assert two_ranks["segments"].results["segments"] == 4


def test_bf16_other_optimizers_and_compressed_gradients_learn_too(two_ranks: dict[str, SimpleNamespace]) -> None:
    names = [name for name in ("plain", "bf16", "adamw", "lars", "lamb", "int8", *FEWER) if name in two_ranks]
    assert {"plain", "int8"} <= {*names}
    losses = [figures(two_ranks[name], "train_loss") for name in names]
    assert len({str(each) for each in losses}) == len(names)
    for (first,), (last,) in losses:
        assert last < first


@pytest.mark.thorough
def test_bottlenecks_in_segments(two_ranks: dict[str, SimpleNamespace]) -> None:
    assert two_ranks["bottlenecks"].results["model"] == "resnet50"
    assert two_ranks["bottlenecks"].results["steps_per_epoch"] == 3
    assert two_ranks["bottlenecks"].results["epoch_seconds_std"] == 0


def test_a_last_batch_of_one_image_is_left_out(two_ranks: dict[str, SimpleNamespace]) -> None:
    assert two_ranks["one-left"].results["steps_per_epoch"] == 1
    assert two_ranks["one-left"].results["epochs"][0]["train_loss"] == pytest.approx(np.log(10), rel=0.3)


def test_a_folder_of_images(two_ranks: dict[str, SimpleNamespace]) -> None:
    done = two_ranks["images"]
    assert "21 images of 2 classes to train on, 8 a step, 2 to validate" in done.stdout
    assert done.results["steps_per_epoch"] == 3
    assert done.results["epochs"][1]["train_loss"] < 1
    small, large = done.results["params"], two_ranks["large"].results["params"]
    assert two_ranks["large"].results["batch_size"] == 64
    assert large - small == 4 * 3 * (7 * 7 - 3 * 3)  # the stem for large images


@pytest.mark.thorough
def test_workers_read_the_same_images(
    mpirun: Callable[..., subprocess.CompletedProcess],
    folder: Path,
    tmp_path: Path,
    two_ranks: dict[str, SimpleNamespace],
) -> None:
    path = tmp_path / "json"
    arguments = [*TINY, "--data", folder, "--size", "16", "--batch-size", "8", "--workers", "1", "--json", path]
    done = mpirun(2, EXAMPLE, *arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    found = SimpleNamespace(results=json.loads(path.read_text()))
    assert figures(found) == figures(two_ranks["images"])


@pytest.mark.thorough
def test_synchronised_norms_follow_a_world_of_one(tmp_path: Path) -> None:
    """1437 images on 3 ranks: no last batch is uneven, so that all is as on one."""
    common = [*TINY, "--batch-size", "720", "--epochs", "1"]
    runs: dict[str, list[object]] = {
        "plain": [*common, "--sync-bn"],
        "segments": [*common, "--sync-bn", "--segments", "3"],
    }
    (alone,) = run_all(1, tmp_path, {"one": common}).values()
    found = run_all(3, tmp_path, runs)
    names = ("train_loss", "val_loss")
    np.testing.assert_allclose(figures(found["plain"], *names), figures(alone, *names), rtol=2e-3)
    assert figures(found["segments"]) == figures(found["plain"])


@pytest.mark.thorough
def test_wrong_use_is_one_line_and_status_2_on_every_rank(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "some" / "a").mkdir(parents=True)
    (tmp_path / "odd0").symlink_to(folder)
    for i in range(20):
        (tmp_path / "odd1" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "odd1" / "a" / f"{i}.png").write_bytes(b"")
    for name in ("train/a/0.png", "train/b/1.png", "val/a/2.png", "val/b/3.png"):
        place = tmp_path / "few" / name
        place.parent.mkdir(parents=True)
        pillow.new("RGB", (4, 4)).save(place)
    wrong: dict[tuple[object, ...], str] = {
        ("--data", "nowhere"): "nowhere: No such file or directory",
        ("--data", tmp_path / "empty"): "holds no folders; needs one a class",
        ("--data", tmp_path / "some"): "some/a: holds no images",
        ("--data", tmp_path / "few", "--batch-size", "4"): "2 images to train on are too few for 2 ranks",
        ("--model", "resnet20"): "argument --model: invalid choice: 'resnet20'",
        **({} if torch.cuda.is_available() else {("--device", "cuda"): "device cuda: no GPU can be used here: "}),
        ("--segments", "9"): "--segments 9: resnet18 has 8 blocks to divide",
        ("--segments", "-1"): "argument --segments: got -1; needs at least 0",
        ("--batch-size", "65"): "--batch-size 65: is divided among 2 ranks; needs a multiple of that",
        ("--batch-size", "2"): "--batch-size 2: is divided among 2 ranks; needs a multiple of that, and at least 2",
        ("--warmup", "3", "--epochs", "2"): "--warmup 3: is more than all 2 epochs",
        ("--epochs", "0"): "argument --epochs: got 0; needs at least 1",
        ("--width", "0"): "argument --width: got 0",
        ("--size", "4"): "argument --size: got 4; needs at least 8",
        ("--lr", "-1"): "argument --lr: got -1",
        ("--optimizer", "adam"): "argument --optimizer: invalid choice: 'adam'",
        ("--optimizer", "dion"): "argument --optimizer: invalid choice: 'dion'",
        ("--optimizer", "onebitadam", "--compress", "int8"): "--optimizer onebitadam sends less by itself",
        ("--compress", "dgc:0.01"): "--compress dgc:0.01: --optimizer sgd has momentum too; needs momentum=0",
        ("--outer-warmup", "5"): "--outer-every and --outer-warmup: need --optimizer diloco",
        ("--dtype", "fp64"): "argument --dtype: invalid choice: 'fp64'",
        ("--json", tmp_path): "cannot be written: Is a directory",
        ("--plot", tmp_path / "no" / "out.png"): "cannot be written: No such file or directory",
        # Wrong on rank 1 alone.
        ("--lr", "-{rank}"): "argument --lr: got -1; needs at least 0",
        ("--data", tmp_path / "odd{rank}"): "rank 0 sees 23 images of 2 classes, rank 1 other ones (20 images of 1",
    }
    outcomes = call_main(2, list(wrong))
    for (arguments, message), ranks in zip(wrong.items(), outcomes, strict=True):
        (status, out, errors), elsewhere = ranks
        assert (status, out) == (2, ""), arguments
        assert re.fullmatch(r"error: [^\n]+\n", errors), arguments
        assert message in errors, arguments
        assert elsewhere == [2, "", ""], arguments
        on_one = any("{rank}" in str(a) for a in arguments)
        assert on_one == ("(on rank 1)" in errors), errors


@pytest.mark.thorough
def test_an_image_that_one_rank_cannot_read_ends_the_job(
    mpirun: Callable[..., subprocess.CompletedProcess], tmp_path: Path
) -> None:
    for i in range(8):
        place = tmp_path / f"{'train' if i < 4 else 'val'}/{'ab'[i % 2]}/{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pillow.new("RGB", (8, 8)).save(place)
    (tmp_path / "val/a/4.png").write_bytes(b"damaged")
    done = mpirun(2, EXAMPLE, "--data", tmp_path, "--size", "8", "--batch-size", "4", "--width", "2")
    assert done.returncode == 1
    assert "validation loss" not in done.stdout


def test_without_matplotlib_a_plot_is_refused_at_once() -> None:
    code = f"import sys, runpy; sys.modules['matplotlib'] = None; sys.path[0] = {str(Path(EXAMPLE).parent)!r}; "
    code += f"runpy.run_path({EXAMPLE!r}, run_name='__main__')"
    done = launch.run([sys.executable, "-c", code, "--plot", "x"], 60, launch.ROOT, launch.environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --plot needs the package matplotlib (pip install 'mpidl[plot]')\n"
