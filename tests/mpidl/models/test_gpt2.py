"""GPT-2 equals transformers' with the same weights; sizes, start values, sampling, unfit weights."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpidl.errors import UsageError
from mpidl.models.gpt2 import GPT2, SIZES, GPT2Config, parameter_count
from mpidl.models.pretrained import load_config, load_pretrained, load_weights

safetensors = pytest.importorskip("safetensors.torch")
SMALL = GPT2Config(vocab_size=61, block_size=16, layers=3, heads=2, embd=24)
WTE, FC = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def reference():
    """A small random model of transformers, with biases and norms that do something."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_layer": 3, "n_head": 2, "n_embd": 24}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(change, **settings)`: a directory with weights after `change(tensors)`, and a config."""

    def save(change: Callable[[dict], object] = lambda tensors: None, **settings: object) -> Path:
        torch.manual_seed(1)
        tensors = {name: t.clone() for name, t in GPT2(SMALL).state_dict().items() if name != "lm_head.weight"}
        change(tensors)
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        config = {"vocab_size": 61, "n_positions": 16, "n_layer": 3, "n_head": 2, "n_embd": 24, **settings}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return tmp_path

    return save


@pytest.mark.parametrize("shards", ["one file", "several files"])
def test_logits_equal_those_of_transformers(reference, tmp_path: Path, shards: str) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="5GB" if shards == "one file" else "20KB")
    assert (tmp_path / "model.safetensors").exists() == (shards == "one file")
    model = load_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 61, (4, 16))
    with torch.no_grad():
        expected = reference(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_equal_those_of_transformers(reference, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    tokens = torch.randint(0, 61, (4, 16))
    reference.zero_grad()
    loss = reference(tokens, labels=tokens).loss  # it shifts the labels itself
    loss.backward()
    own = model(tokens[:, :-1], tokens[:, 1:])
    own.backward()
    torch.testing.assert_close(own, loss)
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_old_files_without_prefix_and_with_masks_load(saved) -> None:
    def old(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    model = load_pretrained(saved(old))
    torch.manual_seed(1)
    for name, expected in GPT2(SMALL).state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_half_precision_weights_load_into_fp32(saved) -> None:
    model = load_pretrained(saved(lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()})))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


WRONG_WEIGHTS = {
    "missing": (lambda t: t.pop(FC), f"missing: {FC}"),
    "many missing": (lambda t: [t.pop(n) for n in list(t) if ".h.2." in n], "and 9 more"),
    "unexpected": (lambda t: t.update({"transformer.extra": torch.ones(2)}), "unexpected: transformer.extra"),
    "shape": (lambda t: t.update({FC: t[FC].t().contiguous()}), f"{FC} (has (96, 24), needs (24, 96))"),
    "untied": (lambda t: t.update({"lm_head.weight": t[WTE] + 1}), f"lm_head.weight differs from {WTE}"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(saved, case: str) -> None:
    change, message = WRONG_WEIGHTS[case]
    folder = saved(change)
    model = GPT2(SMALL)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        load_weights(model, folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_tied_output_layer_in_the_file_is_accepted(saved) -> None:
    load_pretrained(saved(lambda tensors: tensors.update({"lm_head.weight": tensors[WTE].clone()})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_head": None}, "has no 'n_head'"),
        ({"n_head": 5}, "do not fit a width of 24"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"n_inner": 48}, "n_inner is 48"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_a_config_of_another_architecture_is_refused(saved, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(saved(**settings))


def test_broken_directories_are_named(saved, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: No such file"):
        load_pretrained(tmp_path / "nowhere")
    folder = saved()
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read"):
        load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="has no weight_map"):
        load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(UsageError, match=r"part-1\.safetensors: no such file"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        load_config(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "{here}/model.safetensors", "model.bin", 3, ["a"], None])
def test_an_index_that_names_no_file_of_its_directory_is_refused(saved, file: object) -> None:
    here = saved()
    folder = here / "inner"
    folder.mkdir()
    (here / "config.json").rename(folder / "config.json")
    named = file.format(here=here) if isinstance(file, str) else file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(UsageError, match=r"weight_map: 'a' .*same directory"):
        load_pretrained(folder)


def test_without_the_package_safetensors_it_is_asked_for(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"need the package safetensors \(pip install safetensors\)"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.44), ("gpt2-medium", 354.82), ("gpt2-large", 774.03), ("gpt2-xl", 1557.61)],
)
def test_published_sizes_have_the_published_numbers_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.named(name))
    assert parameter_count(model) / 1e6 == pytest.approx(millions, abs=0.005)


def test_the_default_size_has_27_million_parameters_on_bytes() -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.named("27m", vocab_size=256))
    assert round(parameter_count(model) / 1e6) == 27


def test_embedding_and_output_layer_are_one_tensor() -> None:
    model = GPT2(SMALL)
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert "lm_head.weight" in model.state_dict()


def test_start_values() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, block_size=256, layers=8, heads=4, embd=128)
    for name, p in GPT2(config).requires_grad_(False).named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
            assert float(p.std()) == pytest.approx(expected, rel=0.05), name
            assert abs(float(p.mean())) < 0.05 * expected, name


def test_a_position_does_not_see_later_ones() -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    tokens = torch.randint(0, 61, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 61
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**{**vars(SMALL), "dropout": 0.5}))
    tokens = torch.randint(0, 61, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("context", [None, 5, 1, 100])
def test_generate_appends_tokens_beyond_the_block_size(context: int | None) -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    start = torch.randint(0, 61, (3, 4))
    random = torch.Generator().manual_seed(5)
    tokens = model.generate(start, 40, context, top_k=7, generator=random)
    assert tokens.shape == (3, 44)
    assert torch.equal(tokens[:, :4], start)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 61
    again = model.generate(start, 40, context, top_k=7, generator=torch.Generator().manual_seed(5))
    assert torch.equal(tokens, again)


def test_generate_remembers_what_a_whole_pass_computes() -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)  # so that the likeliest token is clear
    tokens = model.generate(torch.tensor([[3, 1]]), 14, top_k=1)
    for length in range(2, 16):
        with torch.no_grad():
            likeliest = model(tokens[:, :length])[0, -1].argmax()
        assert tokens[0, length] == likeliest


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 5}, "5 heads do not fit a width of 24"),
        ({"heads": 48}, "48 heads do not fit a width of 24"),
        ({"layers": 0}, "layers: got 0"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GPT2Config(**{**vars(SMALL), **sizes})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=", ".join(SIZES)):
        GPT2Config.named("gpt5")
