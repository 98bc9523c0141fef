"""The BERT example: two ranks train as one, the results it writes, weights given, and one line for wrong use."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mpidl
from mpidl.models.bert import BERT, BERTConfig
from tests.harness import launch

EXAMPLE = launch.ROOT / "examples" / "bert_mlm.py"
OUTCOMES = Path(__file__).with_name("outcomes.py")
SIZE = ["--model", "tiny", "--sequence-length", "18"]
TINY = [*SIZE, "--steps", "6", "--warmup", "2", "--lr", "3e-3", "--eval-every", "4", "--eval-sequences", "7"]
GLOBAL_BATCH = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus with some order in it."""
    words = ["the", "rank", "of", "a", "shard", "is", "gathered", "and", "freed", "—", "né"]
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    lines = (" ".join(rng.choice(words) for _ in range(7)) for _ in range(400))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The example started without mpirun: what it printed, and its results."""
    path = tmp_path_factory.mktemp("alone") / "results.json"
    arguments = [*TINY, "--data", str(text), "--batch-size", str(GLOBAL_BATCH), "--json", str(path)]
    done = launch.run([sys.executable, str(EXAMPLE), *arguments], 100, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(stdout=done.stdout, results=json.loads(path.read_text()))


def call_main(ranks: int, lines: Sequence[Sequence[object]]) -> list[list[tuple[int, str, str]]]:
    """Runs command lines; returns for each (status, standard output, standard error) of every rank."""
    asked = json.dumps([list(map(str, line)) for line in lines])
    done = launch.mpirun(ranks, OUTCOMES, EXAMPLE.relative_to(launch.ROOT), asked, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RUNS = {  # on two ranks
    "plain": ["--batch-size", "3"],
    "accumulating": ["--batch-size", "1", "--grad-accumulation", "3", "--checkpoint-activations"],
    "cut": ["--batch-size", "6", "--tp", "2"],
    "bf16": ["--batch-size", "3", "--dtype", "bf16"],
}
if hasattr(mpidl, "GradScaler"):
    RUNS["fp16"] = ["--batch-size", "3", "--dtype", "fp16"]


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Output of rank 0 and results, for each of RUNS."""
    folder = tmp_path_factory.mktemp("two")
    paths = {name: folder / f"{name}.json" for name in RUNS}
    common = [*TINY, "--data", text]
    outcomes = call_main(2, [[*common, *options, "--json", paths[name]] for name, options in RUNS.items()])
    done = {}
    for name, ((status, out, errors), elsewhere) in zip(RUNS, outcomes, strict=True):
        assert status == 0, errors
        assert elsewhere == [0, "", ""]
        done[name] = SimpleNamespace(stdout=out, results=json.loads(paths[name].read_text()))
    return done


def series(entries: list[dict], name: str = "loss") -> list[float]:
    return [entry[name] for entry in entries]


def follows(found: dict, expected: dict) -> None:
    """Compares losses to 1e-5, and how many are right."""
    for part in ("steps", "held_out"):
        np.testing.assert_allclose(series(found[part]), series(expected[part]), rtol=1e-5)
        np.testing.assert_allclose(series(found[part], "accuracy"), series(expected[part], "accuracy"), atol=1e-9)


@pytest.mark.thorough
def test_a_world_of_one_writes_all_results(alone: SimpleNamespace) -> None:
    results = alone.results
    assert list(results) == ["world_size", "params", "steps", "held_out", "tokens_per_s", "step_ms_median"]
    assert results["world_size"] == 1
    assert results["params"] == 512900
    assert series(results["steps"], "step") == [1, 2, 3, 4, 5, 6]
    assert series(results["held_out"], "step") == [0, 4, 6]
    first, *_, last = series(results["held_out"])
    assert first == pytest.approx(np.log(260), abs=0.6)
    assert last < first - 0.5
    assert results["held_out"][-1]["accuracy"] > 0.05 > results["held_out"][0]["accuracy"]
    assert results["step_ms_median"] == np.median(series(results["steps"], "ms"))
    assert results["tokens_per_s"] == pytest.approx(GLOBAL_BATCH * 18 / results["step_ms_median"] * 1e3)


def test_progress_and_a_filled_in_sentence_are_printed(alone: SimpleNamespace) -> None:
    lines = alone.stdout.splitlines()
    assert "DDP on 1 rank," in lines[0]
    progress = re.compile(r"step +\d/6  loss \d\.\d{4}  accuracy +\d+\.\d%  +\d+ tokens/s  \d+:\d\d left  \d+ MiB")
    assert len([line for line in lines if progress.fullmatch(line)]) == 6
    assert len([line for line in lines if "held-out loss" in line]) == 3
    assert re.search(r"^\d+\.\d ms a step, \d+ tokens/s$", alone.stdout, re.MULTILINE)
    gaps, filled, was, *guesses = alone.stdout.split("--- held-out text ---\n")[1].removesuffix("\n---\n").split("\n")
    assert "_" in gaps
    assert "_" not in filled + was
    assert len(guesses) == gaps.count("_")
    assert all(re.fullmatch(r"  .+ <- (.+ \d+%, ){2}.+ \d+%", guess) for guess in guesses)


@pytest.mark.parametrize("name", ["plain", "accumulating"])
def test_two_ranks_follow_a_world_of_one(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace], name: str
) -> None:
    assert "DDP on 2 ranks," in two_ranks[name].stdout
    assert two_ranks[name].results["world_size"] == 2
    follows(two_ranks[name].results, alone.results)


def test_layers_that_are_cut_over_two_ranks_follow_a_world_of_one(
    alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace]
) -> None:
    found = two_ranks["cut"]
    assert "DDP on 2 ranks (dp=1, tp=2)," in found.stdout
    follows(found.results, alone.results)
    assert found.results["params"] == alone.results["params"]
    assert found.stdout.split("--- held-out text ---")[1] == alone.stdout.split("--- held-out text ---")[1]
    step = found.results["tokens_per_s"] * found.results["step_ms_median"] / 1e3
    assert step == pytest.approx(GLOBAL_BATCH * 18)


def test_bf16_stays_near_fp32(alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace]) -> None:
    found, expected = (series(done.results["steps"]) for done in (two_ranks["bf16"], alone))
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert found != expected


@pytest.mark.skipif("fp16" not in RUNS, reason="mpidl has no GradScaler")
def test_fp16_learns_too(alone: SimpleNamespace, two_ranks: dict[str, SimpleNamespace]) -> None:
    found = series(two_ranks["fp16"].results["held_out"])
    assert found[0] == pytest.approx(alone.results["held_out"][0]["loss"], abs=0.01)
    assert found[-1] < found[0] - 0.2  # the first steps may be left out until the scale fits


@pytest.mark.thorough
def test_three_ranks_under_mpirun_follow_a_world_of_one(
    mpirun: Callable[..., subprocess.CompletedProcess], text: Path, tmp_path: Path, alone: SimpleNamespace
) -> None:
    path = tmp_path / "results.json"
    done = mpirun(3, EXAMPLE, *TINY, "--data", text, "--batch-size", "2", "--json", path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^BERT of", done.stdout, re.MULTILINE)) == 1
    follows(json.loads(path.read_text()), alone.results)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`weights(vocab_size)`: a directory as --init-from takes it, with the start values of seed 1337."""
    safetensors = pytest.importorskip("safetensors.torch")

    def save(vocab_size: int) -> Path:
        torch.manual_seed(1337)
        config = BERTConfig.named("tiny", vocab_size=vocab_size)
        tensors = {n: t.clone() for n, t in BERT(config).state_dict().items() if ".decoder." not in n}
        folder = tmp_path_factory.mktemp("weights")
        safetensors.save_file(tensors, folder / "model.safetensors")
        settings = {
            "vocab_size": vocab_size,
            "max_position_embeddings": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 128,
            "intermediate_size": 512,
        }
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return save


@pytest.mark.thorough
def test_given_weights_are_looked_at_without_training(
    text: Path, tmp_path: Path, weights: Callable[[int], Path], alone: SimpleNamespace
) -> None:
    path = tmp_path / "results.json"
    arguments = ["--init-from", weights(260), "--data", text, "--sequence-length", "18", "--steps", "0"]
    (((status, out, errors), _),) = call_main(2, [[*arguments, "--eval-sequences", "7", "--json", path]])
    assert status == 0, errors
    assert "--- held-out text ---" in out
    results = json.loads(path.read_text())
    assert results["steps"] == []
    assert results["step_ms_median"] is results["tokens_per_s"] is None
    (seen,) = results["held_out"]
    assert seen["loss"] == pytest.approx(alone.results["held_out"][0]["loss"], rel=1e-5)


@pytest.mark.thorough
def test_word_pieces(text: Path, tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "rank", "of", "a", "is", "gather", "##ed", "and"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    vocabulary = ["--tokenizer", "wordpiece", "--vocab", tmp_path]
    (((status, out, errors),),) = call_main(1, [[*TINY, "--data", text, *vocabulary, "--steps", "1"]])
    assert status == 0, errors
    assert re.search(r"^was: +[A-Za-z\[\] ]+$", out, re.MULTILINE)


@pytest.mark.thorough
def test_wrong_use_is_one_line_and_status_2_on_every_rank_and_help_is_printed_once(
    text: Path, tmp_path: Path, weights: Callable[[int], Path]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    own, foreign = weights(260), weights(300)
    (tmp_path / "weights0").symlink_to(own)
    data = ("--data", text)
    given = (*data, *SIZE)
    wrong = {
        (*given, "--tp", "3"): "--tp 3: got 2 ranks; needs a divisor",
        ("--data", "nowhere.txt"): "nowhere.txt: No such file or directory",
        ("--data", short, *SIZE): "the text is too short: 9 tokens",
        (*data, "--model", "tiny", "--sequence-length", "513"): "--sequence-length 513: the model has 512 positions",
        ("--sequence-length", "2"): "argument --sequence-length: got 2; needs at least 3",
        ("--batch-size", "0"): "argument --batch-size: got 0; needs at least 1",
        ("--grad-accumulation", "0"): "argument --grad-accumulation: got 0",
        ("--steps", "-1"): "argument --steps: got -1; needs at least 0",
        ("--lr", "-1"): "argument --lr: got -1",
        (*given, "--dropout", "1"): "dropout: got 1.0; needs a probability below 1",
        ("--dtype", "fp64"): "argument --dtype: invalid choice: 'fp64'",
        **({} if torch.cuda.is_available() else {("--device", "cuda"): "device cuda: no GPU can be used here: "}),
        ("--model", "bert5"): "argument --model: invalid choice: 'bert5'",
        ("--nonsense",): "unrecognized arguments: --nonsense",
        ("--json", tmp_path / "no" / "results.json"): "cannot be written: No such file or directory",
        ("--tokenizer", "wordpiece"): "--tokenizer wordpiece needs a directory with vocab.txt as --vocab",
        ("--tokenizer", "wordpiece", "--vocab", tmp_path): "vocab.txt: No such file or directory",
        ("--vocab", tmp_path): "--vocab is for --tokenizer gpt2",
        (*given, "--init-from", tmp_path): "config.json: No such file or directory",
        (*given, "--init-from", foreign): "has a vocabulary of 300, --tokenizer bytes one of 260 with its marks",
        # Wrong on rank 1 alone, before and after the ranks have shared the text.
        (*given, "--lr", "-{rank}"): "argument --lr: got -1; needs at least 0",
        (*given, "--init-from", tmp_path / "weights{rank}"): "weights1/config.json: No such",
    }
    *outcomes, help_on_both = call_main(2, [*wrong, ["--help"]])
    for (arguments, message), ranks in zip(wrong.items(), outcomes, strict=True):
        (status, out, errors), elsewhere = ranks
        assert (status, out) == (2, ""), arguments
        assert re.fullmatch(r"error: [^\n]+\n", errors), arguments
        assert message in errors, arguments
        assert elsewhere == [2, "", ""], arguments
        assert ("(on rank 1)" in errors) == any("{rank}" in str(a) for a in arguments), errors
    (status, out, errors), elsewhere = help_on_both
    assert (status, out.count("usage:"), errors) == (0, 1, "")
    assert elsewhere == [0, "", ""]
    for option in ("--data", "--model", "--grad-accumulation", "--checkpoint-activations", "--init-from", "--json"):
        assert option in out
