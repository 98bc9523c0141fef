"""Exported models of transformers open by from_pretrained, of the class they were and with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from mpidl.checkpoint import export_checkpoint, export_safetensors, index, save
from mpidl.checkpoint.__main__ import main
from mpidl.models.bert import BERT, BERTConfig
from mpidl.models.gpt2 import GPT2
from tests.mpidl.checkpoint.mutations import as_text
from tests.mpidl.small_models import SMALL_GPT2

transformers = pytest.importorskip("transformers")
mpi = pytest.mark.mpi
TOKENS = torch.arange(16).view(2, 8)
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Class, the one that opens any such, and settings of which the default ones would give another model.
MODELS: dict[str, tuple[str, str, Any]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "AutoModelForCausalLM",
        lambda: transformers.GPT2Config(vocab_size=37, n_positions=8, n_layer=2, n_head=2, n_embd=16, **ENDS),
    ),
    "llama": (
        "LlamaForCausalLM",
        "AutoModelForCausalLM",
        lambda: transformers.LlamaConfig(
            **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, **ENDS},
        ),
    ),
    "bert": (
        "BertForMaskedLM",
        "AutoModelForMaskedLM",
        lambda: transformers.BertConfig(
            **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "max_position_embeddings": 8, "layer_norm_eps": 1e-3},
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "AutoModelForSeq2SeqLM",
        lambda: transformers.T5Config(
            **{"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
            **{"decoder_start_token_id": 0, "relative_attention_num_buckets": 4, **ENDS},
        ),
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(3)
    of_class, _, config = MODELS[name]
    model = getattr(transformers, of_class)(config())
    if model.can_generate():
        model.generation_config.max_length = 17
    return model


def logits(model: Any, name: str) -> torch.Tensor:
    more = {"decoder_input_ids": TOKENS} if name == "t5" else {}
    with torch.no_grad():
        return model.eval()(TOKENS, **more).logits


def opened(folder: Path, name: str) -> Any:
    """By the class that opens all, which finds all its tensors and no others."""
    model, told = getattr(transformers, MODELS[name][1]).from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def trained(engine: str, comm: Any, model: Any, name: str) -> tuple[Any, Any]:
    """A step; what a program calls, and the optimizer."""
    call = model
    if engine == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=comm)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, 3, process_group=comm, lr=0.01)
    call(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return call, optimizer


@mpi
@pytest.mark.parametrize("engine", ["ddp", "stage 3"])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_opens_with_the_same_logits(comm, shared: Path, name: str, engine: str) -> None:
    model = made(name)
    call, optimizer = trained(engine, comm, model, name)
    assert model.config.architectures is None  # what was exported is not noted in the model
    save(shared, call, optimizer, step=1, process_group=comm)
    for _ in range(2):  # over an earlier one too
        export_safetensors(shared / "out", call, process_group=comm)
    whole = optimizer.model_state_dict() if engine == "stage 3" else model.state_dict()
    if comm.rank == 0:
        plain = made(name)
        plain.load_state_dict(whole)
        again = opened(shared / "out", name)
        assert type(again) is type(plain)
        assert again.dtype == torch.float32
        assert torch.equal(logits(again, name), logits(plain, name))
        assert (shared / "out" / "generation_config.json").exists() == model.can_generate()
        if model.can_generate():
            assert again.generation_config.max_length == 17
        export_checkpoint(shared / "step-00000001", shared / "of checkpoint")
        assert torch.equal(logits(opened(shared / "of checkpoint", name), name), logits(plain, name))
    comm.barrier()
    export_safetensors(shared / "half", call, dtype=torch.bfloat16, process_group=comm)
    if comm.rank == 0:
        assert opened(shared / "half", name).dtype == torch.bfloat16
        assert json.loads((shared / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_bert_of_mpidl_opens_with_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = BERT(BERTConfig(vocab_size=37, block_size=8, layers=2, heads=2, embd=16, inner=24, types=3, dropout=0.0))
    export_safetensors(tmp_path, model)
    torch.testing.assert_close(logits(opened(tmp_path, "bert"), "bert"), logits(model, "bert"), rtol=1e-5, atol=1e-5)


def test_a_module_around_a_model_or_with_its_settings_gets_none(tmp_path: Path) -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = MODELS["gpt2"][2]()
            self.inner = made("gpt2")

    export_safetensors(tmp_path, Mine())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_command_takes_settings_from_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2(SMALL_GPT2)
    save(tmp_path, model, step=1)
    given, checkpoint = tmp_path / "given", str(tmp_path / "step-00000001")
    given.mkdir()
    for text in (None, "{", "[]", "[" * 100_000):
        if text is not None:
            (given / "config.json").write_text(text)
        assert main(["export", checkpoint, str(tmp_path / "out"), "--config", str(given)]) == 1
        assert f"error: {given / 'config.json'}: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    export_checkpoint(checkpoint, given / "first")
    settings = json.loads((given / "first" / "config.json").read_text()) | {"resid_pdrop": 0.25, "dtype": "float64"}
    (given / "config.json").write_text(json.dumps(settings))
    (given / "generation_config.json").write_text('{"max_length": 9, "transformers_version": "5"}')
    assert main(["export", checkpoint, str(tmp_path / "out"), "--config", str(given), "--dtype", "bf16"]) == 0
    found = opened(tmp_path / "out", "gpt2")
    assert (found.config.resid_pdrop, found.dtype, found.generation_config.max_length) == (0.25, torch.bfloat16, 9)


def test_settings_in_a_checkpoint_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, GPT2(SMALL_GPT2), step=1)
    file = tmp_path / "step-00000001" / "index.json"
    for text in ("{", "[]", "[" * 100_000):
        content = json.loads(file.read_text())
        content["model"]["published"]["config.json"] = text
        file.write_text(as_text(content, index.content_checksum))
        assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
        assert f"error: {file.parent / 'config.json'}: cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_of_another_model_are_not_overwritten(tmp_path: Path, name: str) -> None:
    for text in ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', '{"mine": 1}', "[]", "["):
        (tmp_path / name).write_text(text)
        with pytest.raises(mpidl.CheckpointError, match=f"{name}: is not of an earlier export of this model"):
            export_safetensors(tmp_path, made("gpt2"))
        assert (tmp_path / name).read_text() == text
