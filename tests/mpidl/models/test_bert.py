"""BERT equals transformers' with the same weights; sizes, start values, checkpoints of activations, unfit weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mpidl
from mpidl.checkpoint import import_safetensors
from mpidl.errors import UsageError
from mpidl.models.bert import BERT, SIZES, BERTConfig
from mpidl.models.gpt2 import parameter_count
from mpidl.models.pretrained_bert import load_config, load_pretrained, load_weights

safetensors = pytest.importorskip("safetensors.torch")
SMALL = BERTConfig(vocab_size=61, block_size=16, layers=3, heads=2, embd=24, inner=40)
SETTINGS = {
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
}
WORDS, DENSE = "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.intermediate.dense.weight"
DECODER = "cls.predictions.decoder"


@pytest.fixture(scope="module")
def reference():
    """A small random model of transformers, with biases and norms that do something."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SETTINGS)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Sequences of 16, 9, 3 and 12 tokens, padded with 0, with two types of segments and a few labels."""
    random = torch.Generator().manual_seed(4)
    attended = torch.arange(16) < torch.tensor([[16], [9], [3], [12]])
    tokens = torch.randint(1, 61, (4, 16), generator=random) * attended
    labelled = (torch.rand(4, 16, generator=random) < 0.4) & attended
    labels = torch.where(labelled, torch.randint(1, 61, (4, 16), generator=random), -100)
    types = torch.randint(0, 2, (4, 16), generator=random)
    return {"input_ids": tokens, "attention_mask": attended.long(), "token_type_ids": types, "labels": labels}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(change, **settings)`: a directory with weights after `change(tensors)`, and a config."""

    def save(change: Callable[[dict], object] = lambda tensors: None, **settings: object) -> Path:
        torch.manual_seed(1)
        tensors = {name: t.clone() for name, t in BERT(SMALL).state_dict().items() if not name.startswith(DECODER)}
        change(tensors)
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        config = {k: v for k, v in {**SETTINGS, **settings}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return save


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("types", [False, True])
def test_logits_and_loss_equal_those_of_transformers(reference, batch, tmp_path, padded: bool, types: bool) -> None:
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path).eval()
    used = {"input_ids": True, "attention_mask": padded, "token_type_ids": types, "labels": True}
    given = {name: value for name, value in batch.items() if used[name]}
    with torch.no_grad():
        expected, found = reference(**given), model(**given)
        assert expected.logits.std() > 0.5
        close(found.logits, expected.logits)
        close(found.loss, expected.loss)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_equal_those_of_transformers(reference, batch, tmp_path: Path, checkpoint: bool) -> None:
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, load_config(tmp_path, checkpoint_activations=checkpoint))
    reference.zero_grad()
    reference(**batch).loss.backward()
    model(**batch).loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_weights_load_into_transformers(batch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = BERT(SMALL).eval()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SETTINGS)).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        close(model(**batch).logits, theirs(**batch).logits)


def test_scores_of_chosen_positions_alone_are_the_same(batch) -> None:
    torch.manual_seed(0)
    model = BERT(SMALL).eval()
    where = batch["labels"] != -100
    whole, chosen = model(**batch), model(**batch, where=where)
    assert chosen.logits.shape == (int(where.sum()), 61)
    close(chosen.logits, whole.logits[where])
    close(chosen.loss, whole.loss)
    assert model(batch["input_ids"]).loss is None


def test_padding_changes_nothing_at_the_other_positions(batch) -> None:
    torch.manual_seed(0)
    model = BERT(SMALL).eval()
    tokens, attended = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        alone, padded = model(tokens[1:2, :9]), model(tokens, attended)
        unmasked = model(tokens)
    close(padded.logits[1:2, :9], alone.logits)
    assert not torch.allclose(unmasked.logits[1:2, :9], alone.logits, atol=1e-3)


def test_positions_see_both_sides(batch) -> None:
    torch.manual_seed(0)
    model = BERT(SMALL).eval()
    tokens = batch["input_ids"][:1]
    changed = tokens.clone()
    changed[0, 8] = tokens[0, 8] % 60 + 1
    with torch.no_grad():
        difference = (model(tokens).logits - model(changed).logits).abs().amax(-1)[0]
    assert (difference > 0).all()


def test_checkpoints_compute_layers_again_in_training_alone(batch) -> None:
    model = BERT(BERTConfig(**{**vars(SMALL), "checkpoint_activations": True}))
    calls: list[int] = []
    for number, layer in enumerate(model.bert["encoder"]["layer"]):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    with torch.no_grad():
        model(**batch)
    assert calls == [0, 1, 2]
    model(**batch).loss.backward()
    assert calls == [0, 1, 2, 0, 1, 2, 2, 1, 0]


def test_dropout_acts_in_training_alone_and_checkpoints_repeat_it(batch) -> None:
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = BERT(BERTConfig(**{**vars(SMALL), "dropout": 0.3, "checkpoint_activations": checkpoint}))
        model(**batch).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert not torch.equal(model(**batch).logits, model(**batch).logits)
        model.eval()
        assert torch.equal(model(**batch).logits, model(**batch).logits)
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_old_files_load(saved) -> None:
    def old(tensors: dict) -> None:
        for name in list(tensors):
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[new] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(16)[None]
        tensors["bert.pooler.dense.weight"] = torch.ones(24, 24)
        tensors["cls.seq_relationship.bias"] = torch.ones(2)

    imported = BERT(SMALL)
    import_safetensors(saved(old), imported)
    model = load_pretrained(saved(old))
    torch.manual_seed(1)
    for name, expected in BERT(SMALL).state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name
        assert torch.equal(imported.state_dict()[name], expected), name


WRONG_WEIGHTS = {
    "missing": (lambda t: t.pop(DENSE), f"missing: {DENSE}"),
    "unexpected": (lambda t: t.update({"bert.extra": torch.ones(2)}), "unexpected: bert.extra"),
    "shape": (lambda t: t.update({DENSE: t[DENSE].t().contiguous()}), f"{DENSE} (has (24, 40), needs (40, 24))"),
    "untied": (lambda t: t.update({f"{DECODER}.weight": t[WORDS] + 1}), f"{DECODER}.weight differs from {WORDS}"),
    "bias": (lambda t: t.update({f"{DECODER}.bias": torch.ones(61)}), f"{DECODER}.bias differs from cls.pred"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(saved, case: str) -> None:
    change, message = WRONG_WEIGHTS[case]
    folder = saved(change)
    model = BERT(SMALL)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        load_weights(model, folder)
    assert message in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'; is it a BERT"),
        ({"num_attention_heads": 5}, "do not fit a width of 24"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; this BERT"),
    ],
)
def test_a_config_of_another_architecture_is_refused(saved, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(saved(**settings))


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions", "within"),
    [
        ("base46m", 260, 46.7, 0.1),  # bytes and four marks
        ("bert-base", 30522, 109.514, 0.0005),  # as transformers counts BertForMaskedLM
        ("bert-large", 30522, 335.174, 0.0005),
    ],
)
def test_numbers_of_parameters(name: str, vocab_size: int, millions: float, within: float) -> None:
    with torch.device("meta"):
        model = BERT(BERTConfig.named(name, vocab_size=vocab_size))
    assert parameter_count(model) / 1e6 == pytest.approx(millions, abs=within)


def test_start_values() -> None:
    torch.manual_seed(0)
    for name, p in BERT(BERTConfig(vocab_size=256, layers=3, heads=4, embd=128)).named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "LayerNorm" in name:
            assert (p == 1).all(), name
        elif p.numel() > 1000:
            assert float(p.detach().std()) == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 5}, "5 heads do not fit a width of 24"),
        ({"layers": 0}, "layers: got 0"),
        ({"inner": -1}, "inner: got -1"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BERTConfig(**{**vars(SMALL), **sizes})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=", ".join(SIZES)):
        BERTConfig.named("bert-huge")


def summed(output, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, labels[labels != -100], reduction="sum")


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_ddp_and_zero_follow_one_process_with_unevenly_many_labels(comm, stage: int, checkpoint: bool) -> None:
    config = BERTConfig(**{**vars(SMALL), "checkpoint_activations": checkpoint})
    whole = torch.randint(1, 61, (12, 16), generator=torch.Generator().manual_seed(0))
    labels = whole.masked_fill(torch.arange(16) > torch.arange(12)[:, None], -100)  # 1 in the first, 12 in the last
    own, own_labels = whole.chunk(comm.size)[comm.rank], labels.chunk(comm.size)[comm.rank]
    torch.manual_seed(1)
    alone, model = BERT(config), BERT(config)
    model.load_state_dict(alone.state_dict())
    sgd = torch.optim.SGD(alone.parameters(), lr=1.0)
    call, optimizer = model, None
    if stage:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=comm, lr=1.0)
    else:
        call = mpidl.DistributedDataParallel(model, process_group=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        where = labels != -100
        (summed(alone(whole, where=where), labels) / where.sum()).backward()
        where = own_labels != -100
        mpidl.global_mean(summed(call(own, where=where), own_labels), int(where.sum()), comm).backward()
        for each in (sgd, optimizer):
            each.step()
            each.zero_grad()
    weights = optimizer.model_state_dict() if stage else model.state_dict()
    if comm.rank == 0:
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5, msg=name)
