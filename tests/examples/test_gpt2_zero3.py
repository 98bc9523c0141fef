"""The example: every stage trains the same, the results it writes, and one line for wrong use."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch

from mpidl.data import TokenBatches, make_tokenizer
from mpidl.models.gpt2 import GPT2, GPT2Config, parameter_count
from mpidl.models.pretrained import load_pretrained
from tests.harness import launch

EXAMPLE = str(launch.ROOT / "examples" / "gpt2_zero3.py")
OUTCOMES = str(Path(__file__).with_name("outcomes.py"))
SIZE = ["--layers", "2", "--heads", "2", "--embd", "32", "--block-size", "16"]
TINY = [*SIZE, "--steps", "6", "--warmup", "2", "--eval-every", "4", "--eval-sequences", "7"]
CONFIG = GPT2Config(vocab_size=256, block_size=16, layers=2, heads=2, embd=32)
GLOBAL_BATCH = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus with some order in it."""
    words = ["the", "rank", "of", "a", "shard", "is", "gathered", "and", "freed", "—", "né"]
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(rng.choice(words) for _ in range(3000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The example started without mpirun: what it printed, and its results."""
    path = tmp_path_factory.mktemp("alone") / "results.json"
    arguments = [
        *TINY,
        "--data",
        str(text),
        "--batch",
        str(GLOBAL_BATCH),
        "--sample",
        "50",
        "--json",
        str(path),
    ]
    done = launch.run([sys.executable, EXAMPLE, *arguments], 100, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(stdout=done.stdout, results=json.loads(path.read_text()))


def test_a_world_of_one_writes_all_results(alone: SimpleNamespace) -> None:
    results = alone.results
    assert list(results) == [
        "world_size",
        "params",
        "zero_stage",
        "tp",
        "steps",
        "tokens_per_s",
        "step_ms_median",
        "loss_first",
        "loss_last",
        "val_loss",
        "peak_rss_mib",
    ]
    assert (results["world_size"], results["zero_stage"]) == (1, 3)
    assert results["params"] == parameter_count(GPT2(CONFIG))
    assert [entry["step"] for entry in results["steps"]] == [1, 2, 3, 4, 5, 6]
    assert results["loss_first"] == results["steps"][0]["loss"] == pytest.approx(np.log(256), abs=0.2)
    assert results["loss_last"] == results["steps"][-1]["loss"] < results["loss_first"] - 0.1
    assert results["step_ms_median"] == np.median([entry["ms"] for entry in results["steps"]])
    tokens = GLOBAL_BATCH * 16
    assert results["tokens_per_s"] == pytest.approx(tokens / results["step_ms_median"] * 1e3)
    assert results["val_loss"] < results["loss_first"]
    assert 50 < results["peak_rss_mib"] < 5000


def test_progress_and_sample_are_printed(alone: SimpleNamespace) -> None:
    lines = alone.stdout.splitlines()
    assert "ZeRO stage 3 on 1 rank," in lines[0]
    progress = re.compile(r"step +\d/6  loss \d\.\d{4} +\d+ tokens/s  \d+:\d\d left  \d+ MiB")
    assert len([line for line in lines if progress.fullmatch(line)]) == 6
    assert len([line for line in lines if "validation loss" in line]) == 2
    assert f"validation loss {alone.results['val_loss']:.4f}" in alone.stdout
    sample = alone.stdout.split("--- a sample of 50 tokens ---\n")[1].removesuffix("\n---\n")
    assert 10 <= len(sample) <= 50  # several bytes may make a character


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GPT2Config], Path]:
    """`weights(config)`: a directory as --init-from takes it, with random weights."""
    safetensors = pytest.importorskip("safetensors.torch")

    def save(config: GPT2Config) -> Path:
        torch.manual_seed(2)
        model = GPT2(config).requires_grad_(False)
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        folder = tmp_path_factory.mktemp("weights")
        tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
        safetensors.save_file(tensors, folder / "model.safetensors")
        sizes = {"n_positions": config.block_size, "n_layer": config.layers, "n_head": config.heads}
        settings = {"vocab_size": config.vocab_size, "n_embd": config.embd, **sizes}
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return save


ON_DISK = ["--offload-activations", tempfile.gettempdir()]
RUNS = {  # on two ranks
    "DDP": ["--zero", "0", "--batch", "1", "--grad-accum", "3"],
    "ZeRO stage 1": ["--zero", "1", "--batch", "1", "--grad-accum", "3"],
    "ZeRO stage 2": ["--zero", "2", "--batch", "3"],
    "ZeRO stage 3": ["--zero", "3", "--batch", "3"],
    "bf16": ["--zero", "3", "--batch", "3", "--dtype", "bf16"],
    "bf16, offloaded": ["--zero", "3", "--batch", "3", "--dtype", "bf16", "--offload", "disk"],
    "bf16, delayed": ["--batch", "3", "--dtype", "bf16", "--offload", "disk", "--delayed-update", "2"],
    "fp16": ["--zero", "2", "--batch", "3", "--dtype", "fp16"],
    "DDP, fp16": ["--zero", "0", "--batch", "3", "--dtype", "fp16"],
    "DDP, int8": ["--zero", "0", "--batch", "3", "--compress", "int8"],
    "stage 3, int8": ["--zero", "3", "--batch", "3", "--compress", "int8"],
    "lamb": ["--zero", "1", "--batch", "3", "--optimizer", "lamb", "--lr", "1e-2"],
    "sgd": ["--zero", "2", "--batch", "3", "--optimizer", "sgd", "--lr", "0.3"],
    "adamw8bit": ["--zero", "3", "--batch", "3", "--optimizer", "adamw8bit"],
    "onebitadam": ["--zero", "0", "--batch", "3", "--optimizer", "onebitadam", "--freeze-step", "2"],
    "onebitadam, stage 1": ["--zero", "1", "--batch", "3", "--optimizer", "onebitadam", "--freeze-step", "2"],
    "zerooneadam": ["--zero", "0", "--batch", "3", "--optimizer", "zerooneadam"],
    "onebitlamb": ["--zero", "1", "--batch", "3", "--optimizer", "onebitlamb", "--freeze-step", "2", "--lr", "1e-2"],
    "dion": ["--zero", "0", "--batch", "3", "--optimizer", "dion"],
    "dion, stage 2": ["--zero", "2", "--batch", "3", "--optimizer", "dion"],
    "diloco": ["--zero", "0", "--batch", "3", "--optimizer", "diloco", "--outer-every", "2", "--outer-warmup", "1"],
    "auto": ["--zero", "2", "--batch", "3", "--compress", "auto"],
    "cut": ["--zero", "2", "--batch", "6", "--tp", "2"],
    "dropout": ["--zero", "3", "--batch", "3", "--dropout", "0.1"],
    "dropout, checkpoints": ["--zero", "3", "--batch", "3", "--dropout", "0.1", "--checkpoint-activations"],
    "dropout, on disk": ["--batch", "3", "--dropout", "0.1", "--checkpoint-activations", "2", *ON_DISK],
}

REFUSED = {  # of --optimizer
    tuple(line.split()): message
    for line, message in {
        "--optimizer onebitadam": "--zero 3: --optimizer onebitadam needs each rank's whole gradients; needs --zero 0",
        "--optimizer zerooneadam --zero 2": "--zero 2: --optimizer zerooneadam needs each rank's whole gradients",
        "--optimizer diloco": "--zero 3: --optimizer diloco trains on each rank by itself; needs --zero 0",
        "--optimizer diloco --zero 1": "--zero 1: --optimizer diloco trains on each rank by itself",
        "--optimizer onebitlamb --zero 1 --compress int8": "--compress int8: --optimizer onebitlamb sends less by its",
        "--optimizer dion --zero 0 --compress int8": "--compress int8: --optimizer dion sends less by itself",
        "--optimizer diloco --zero 0 --compress int8": "--compress int8: --optimizer diloco sends less by itself",
        "--zero 0 --compress dgc:0.01": "--compress dgc:0.01: --optimizer adamw has momentum too; needs momentum=0",
        "--optimizer dion --zero 0 --tp 2": "--tp 2: --optimizer dion needs ranks that hold the whole model",
        "--optimizer onebitadam --zero 1 --tp 2": "--tp 2: --optimizer onebitadam needs ranks that hold the whole",
        "--optimizer onebitadam --zero 1 --dtype bf16": "--dtype bf16: --optimizer onebitadam keeps no masters",
        "--optimizer onebitadam --zero 1 --offload cpu": "--offload cpu: --optimizer onebitadam keeps whole states",
        "--optimizer dion --offload cpu": "--offload cpu: --optimizer dion steps on whole matrices; leave it out",
        "--optimizer diloco --zero 0 --check-replicas 5": "--check-replicas: ranks of --optimizer diloco differ",
        "--outer-every 5": "--outer-every and --outer-warmup: need --optimizer diloco",
        "--freeze-step 5": "--freeze-step 5: needs --optimizer onebitadam or onebitlamb",
        "--optimizer onebitadam --zero 0 --freeze-step 0": "argument --freeze-step: got 0; needs at least 1",
    }.items()
}
THOROUGH = ("onebitadam, stage 1", "zerooneadam", "onebitlamb", "dion, stage 2")  # runs that these tests alone look at


def call_main(ranks: int, lines: Sequence[Sequence[object]]) -> list[list[tuple[int, str, str]]]:
    """Runs command lines; returns for each (status, standard output, standard error) of every rank."""
    asked = json.dumps([list(map(str, line)) for line in lines])
    done = launch.mpirun(ranks, OUTCOMES, Path(EXAMPLE).relative_to(launch.ROOT), asked, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory, brief: bool) -> dict[str, SimpleNamespace]:
    """Output of rank 0 and results, for each of RUNS."""
    folder = tmp_path_factory.mktemp("two")
    chosen = [name for name in RUNS if not (brief and name in THOROUGH)]
    paths = {name: folder / f"{name}.json" for name in chosen}
    common = [*TINY, "--data", text, "--sample", "20"]
    outcomes = call_main(2, [[*common, *RUNS[name], "--json", paths[name]] for name in chosen])
    done = {}
    for name, ((status, out, errors), elsewhere) in zip(chosen, outcomes, strict=True):
        assert status == 0, errors
        assert elsewhere == [0, "", ""]
        done[name] = SimpleNamespace(stdout=out, results=json.loads(paths[name].read_text()))
    return done


def losses(results: dict) -> list[float]:
    return [entry["loss"] for entry in results["steps"]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_two_ranks_follows_a_world_of_one(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], stage: int
) -> None:
    name = f"ZeRO stage {stage}" if stage else "DDP"
    done = two_ranks[name]
    assert f"{name} on 2 ranks," in done.stdout
    assert (done.results["world_size"], done.results["zero_stage"]) == (2, stage)
    assert done.results["params"] == alone.results["params"]
    np.testing.assert_allclose(losses(done.results), losses(alone.results), rtol=1e-5)
    assert done.results["val_loss"] == pytest.approx(alone.results["val_loss"], rel=1e-5)


def test_layers_that_are_cut_over_two_ranks_follow_a_world_of_one(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace]
) -> None:
    """On more ranks, with heads that they do not divide: `test_gpt2_tensor_parallel.py`."""
    done = two_ranks["cut"]
    assert "ZeRO stage 2 on 2 ranks (dp=1, tp=2)," in done.stdout
    assert (done.results["tp"], done.results["params"]) == (2, alone.results["params"])
    np.testing.assert_allclose(losses(done.results), losses(alone.results), rtol=1e-5)
    assert done.stdout.split("a sample of")[1] == two_ranks["ZeRO stage 2"].stdout.split("a sample of")[1]


def test_all_stages_sample_the_same_text(two_ranks: dict[str, SimpleNamespace]) -> None:
    names = ["DDP", *(f"ZeRO stage {stage}" for stage in (1, 2, 3))]
    assert len({two_ranks[name].stdout.split("a sample of")[1] for name in names}) == 1


@pytest.mark.parametrize("run", ["DDP, int8", "stage 3, int8"])
def test_compressed_gradients_stay_near(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], run: str
) -> None:
    found, expected = losses(two_ranks[run].results), losses(alone.results)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert found != expected
    assert "with int8 gradients on 2 ranks" in two_ranks[run].stdout


def test_auto_compresses_nothing_on_one_node(alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace]) -> None:
    assert "compress: auto chose none" in two_ranks["auto"].stdout
    assert losses(two_ranks["auto"].results) == losses(two_ranks["ZeRO stage 2"].results)


@pytest.mark.parametrize("run", ["lamb", "sgd"])
def test_other_optimizers_learn_too(alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], run: str) -> None:
    found = losses(two_ranks[run].results)
    assert found[-1] < found[0] - 0.1
    assert found[1:] != losses(alone.results)[1:]


@pytest.mark.thorough(*THOROUGH)
@pytest.mark.parametrize(
    "run",
    [
        *("adamw8bit", "onebitadam", "onebitadam, stage 1", "zerooneadam", "onebitlamb"),
        *("dion", "dion, stage 2", "diloco"),
    ],
)
def test_optimizers_that_send_or_keep_less_learn_too(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], run: str
) -> None:
    """1-bit ones from step 3 on in one bit; DiLoCo with outer steps after the 3rd and the 5th."""
    found, expected = losses(two_ranks[run].results), losses(alone.results)
    assert found[-1] < found[0] - 0.1
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1:] != expected[1:]
    if run in ("adamw8bit", "zerooneadam"):  # the latter renews v by averaged gradients in its first 16 steps
        np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("run", ["bf16", "fp16", "DDP, fp16"])
def test_16_bits_stay_near_fp32(alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], run: str) -> None:
    found, expected = losses(two_ranks[run].results), losses(alone.results)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert found != expected


@pytest.mark.parametrize("run", ["dropout, checkpoints", "dropout, on disk"])
def test_checkpoints_change_no_loss(two_ranks: dict[str, SimpleNamespace], run: str) -> None:
    assert losses(two_ranks[run].results) == losses(two_ranks["dropout"].results)


def test_offload_changes_no_bit_and_a_delay_shows_a_step_late(two_ranks: dict[str, SimpleNamespace]) -> None:
    plain, disk, late = (two_ranks[run].results for run in ("bf16", "bf16, offloaded", "bf16, delayed"))
    assert (losses(disk), disk["val_loss"]) == (losses(plain), plain["val_loss"])
    assert losses(late)[:3] == losses(plain)[:3]  # of the weights after two steps
    assert all(a != b for a, b in zip(losses(late)[3:], losses(plain)[3:], strict=True))
    assert late["val_loss"] < losses(late)[0] - 0.1


@pytest.mark.thorough
def test_three_ranks_under_mpirun_follow_a_world_of_one(
    mpirun: Callable[..., subprocess.CompletedProcess], text: Path, tmp_path: Path, alone: SimpleNamespace
) -> None:
    path = tmp_path / "results.json"
    arguments = [*TINY, "--data", text, "--batch", "1", "--grad-accum", "2", "--sample", "0", "--json", path]
    done = mpirun(3, EXAMPLE, *arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^GPT-2 of", done.stdout, re.MULTILINE)) == 1
    assert "sample" not in done.stdout
    results = json.loads(path.read_text())
    assert results["world_size"] == 3
    np.testing.assert_allclose(losses(results), losses(alone.results), rtol=1e-5)
    assert results["val_loss"] == pytest.approx(alone.results["val_loss"], rel=1e-5)


@pytest.mark.thorough
def test_given_weights_are_validated_and_sampled_from_without_training(
    text: Path, tmp_path: Path, weights: Callable[[GPT2Config], Path]
) -> None:
    folder = weights(CONFIG)
    arguments = ["--init-from", folder, "--data", text, "--block-size", "16", "--steps", "0"]
    arguments += ["--eval-sequences", "7", "--sample", "20"]
    ways: dict[str, list[str]] = {"dp": [], "tp": ["--tp", "2"]}
    paths = {name: tmp_path / f"{name}.json" for name in ways}
    outcomes = call_main(2, [[*arguments, *ways[name], "--json", paths[name]] for name in ways])
    tokens = make_tokenizer("bytes").encode(text.read_text(encoding="utf-8"))
    batches = TokenBatches(tokens, SimpleNamespace(rank=0, size=1), block=16, batch=7)
    model = load_pretrained(folder).eval()
    with torch.no_grad():
        ((x, y, _),) = batches.validate(7)
        expected = model(x, y).item()
    for ((status, out, errors), _), path in zip(outcomes, paths.values(), strict=True):
        assert status == 0, errors
        assert "a sample of 20 tokens" in out
        results = json.loads(path.read_text())
        assert results["steps"] == []
        assert results["loss_first"] is results["step_ms_median"] is results["tokens_per_s"] is None
        assert results["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_wrong_use_is_one_line_and_status_2_on_every_rank_and_help_is_printed_once(
    text: Path, tmp_path: Path, weights: Callable[[GPT2Config], Path]
) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\xfd" * 100)
    own, foreign = weights(CONFIG), weights(GPT2Config(61, 16, 2, 2, 32))
    (tmp_path / "weights0").symlink_to(own)
    (tmp_path / "vocab0").mkdir()
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab0" / "vocab.json").write_text(json.dumps({c: n for n, c in enumerate(letters)}))
    (tmp_path / "vocab0" / "merges.txt").write_text("#version: 0.2\n")
    data = ("--data", text)
    given = (*data, *SIZE)
    wrong = {
        ("--data", "nowhere.txt"): "nowhere.txt: No such file or directory",
        ("--data", tmp_path): "Is a directory",
        ("--data", binary): "is not UTF-8 text",
        ("--data", short, *SIZE): "the text is too short: 9 tokens",
        (*given, "--block-size", "100000"): "the text is too short",
        (*given, "--heads", "3"): "3 heads do not fit a width of 32",
        (*given, "--heads", "64"): "64 heads do not fit a width of 32",
        (*given, "--heads", "0"): "argument --heads: got 0; needs at least 1",
        (*given, "--tp", "0"): "argument --tp: got 0; needs at least 1",
        (*given, "--tp", "8"): "--tp 8: got 2 ranks; needs a divisor",
        (*given, "--heads", "1", "--tp", "2"): "--tp 2: the model has 1 heads; needs at least one for each rank",
        (*given, "--sequence-parallel"): "--sequence-parallel: got --tp 1; needs 2 to --block-size 16",
        ("--batch", "0"): "argument --batch: got 0; needs at least 1",
        ("--batch", "many"): "argument --batch: invalid int value: 'many'",
        ("--grad-accum", "0"): "argument --grad-accum: got 0",
        ("--steps", "-1"): "argument --steps: got -1; needs at least 0",
        ("--lr", "-1"): "argument --lr: got -1",
        ("--lr", "1e-4", "--min-lr", "1e-3"): "--min-lr 0.001: is above --lr 0.0001",
        ("--beta2", "1"): "need numbers below 1",
        ("--checkpoint-activations", "0"): "argument --checkpoint-activations: got 0; needs at least 1",
        ("--offload-activations", tmp_path): "--offload-activations is for --checkpoint-activations",
        (*given, "--checkpoint-activations", "--offload-activations", "/nowhere"): "where no file can be made: No such",
        (*given, "--dropout", "1"): "dropout: got 1.0; needs a probability below 1",
        ("--zero", "4"): "argument --zero: invalid choice: '4'",
        ("--dtype", "fp64"): "argument --dtype: invalid choice: 'fp64'",
        ("--device", "tpu"): "argument --device: invalid choice: 'tpu'",
        **({} if torch.cuda.is_available() else {("--device", "cuda"): "device cuda: no GPU can be used here: "}),
        ("--model", "gpt5"): "argument --model: invalid choice: 'gpt5'",
        (*data, "--block-size", "1025"): "the model has 1024 positions",
        ("--zero", "0", "--offload", "disk"): "--offload disk: needs --zero 1, 2 or 3",
        ("--offload", "cpu", "--offload-dir", tmp_path): "needs --offload disk",
        ("--offload", "disk", "--offload-dir", text): "is not a directory",
        (*given, "--offload", "disk", "--offload-dir", "/proc/self"): "Offload: path /proc/self has 0.000 GB free",
        ("--global-batch", "8", "--grad-accum", "2"): "--global-batch and --grad-accum: give one of them",
        **REFUSED,
        ("--delayed-update",): "--delayed-update: needs --offload cpu or disk",
        ("--nonsense",): "unrecognized arguments: --nonsense",
        ("--json", tmp_path / "no" / "results.json"): "cannot be written: No such file or directory",
        ("--json", tmp_path): "cannot be written: Is a directory",
        ("--vocab", tmp_path): "--vocab is for --tokenizer gpt2",
        ("--tokenizer", "gpt2", "--vocab", tmp_path): "has neither merges.txt nor vocab.bpe",
        (*data, "--init-from", tmp_path): "config.json: No such file or directory",
        (*data, "--init-from", own, "--heads", "2"): "--init-from brings its sizes",
        (*data, "--init-from", foreign, "--block-size", "16"): "has a vocabulary of 61",
        # Wrong on rank 1 alone, before and after the ranks have shared the text.
        (*given, "--lr", "-{rank}"): "argument --lr: got -1; needs at least 0",
        (*data, "--tokenizer", "gpt2", "--vocab", tmp_path / "vocab{rank}"): "vocab1: has neither merges.txt",
        (*data, "--init-from", tmp_path / "weights{rank}", "--block-size", "16"): "weights1/config.json: No such",
    }
    *outcomes, help_on_both = call_main(2, [*wrong, ["--help"]])
    for (arguments, message), ranks in zip(wrong.items(), outcomes, strict=True):
        (status, out, errors), elsewhere = ranks
        assert (status, out) == (2, ""), arguments
        assert re.fullmatch(r"error: [^\n]+\n", errors), arguments
        assert message.replace("'", "") in errors.replace("'", ""), arguments  # Python 3.14 quotes numbers too
        assert elsewhere == [2, "", ""], arguments
        assert ("(on rank 1)" in errors) == any("{rank}" in str(a) for a in arguments), errors
    assert not (tmp_path / "no").exists()
    (status, out, errors), elsewhere = help_on_both
    assert (status, out.count("usage:"), errors) == (0, 1, "")
    assert elsewhere == [0, "", ""]
    for option in ("--data", "--zero", "--grad-accum", "--init-from", "--json"):
        assert option in out


@pytest.mark.thorough
def test_a_wrong_option_ends_the_job_with_status_2(mpirun: Callable[..., subprocess.CompletedProcess]) -> None:
    done = mpirun(3, EXAMPLE, "--data", "nowhere.txt")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert errors == ["error: nowhere.txt: No such file or directory"]
    assert "Traceback" not in done.stderr + done.stdout
