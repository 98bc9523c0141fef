"""Published GPT-2 weights, in a directory as Hugging Face's transformers saves it.

`config.json` has the sizes; `weight_files` finds the files with the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, UsageError, listed
from ..weight_files import files_of, import_safe_open
from .gpt2 import GPT2, GPT2Config

# Settings that the architecture here takes for granted; a directory with others would give other logits.
_TAKEN_FOR_GRANTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_TIED = {"lm_head.weight": "transformer.wte.weight"}


def load_pretrained(folder: str | Path, config: GPT2Config | None = None) -> GPT2:
    """A model with a directory's weights; config: by default the directory's own.

    Raises UsageError for what is missing or does not fit.
    """
    model = GPT2(load_config(folder) if config is None else config)
    load_weights(model, folder)
    return model


def load_config(folder: str | Path, **changes: Any) -> GPT2Config:
    """The sizes in a directory of published weights, with changes to single settings."""
    path = Path(folder) / "config.json"
    settings = read_settings(path, "GPT-2", _TAKEN_FOR_GRANTED)
    try:
        sizes = GPT2Config(
            vocab_size=settings["vocab_size"],
            block_size=settings["n_positions"],
            layers=settings["n_layer"],
            heads=settings["n_head"],
            embd=settings["n_embd"],
        )
    except KeyError as missing:
        raise UsageError(f"{path}: has no {missing}; is it a GPT-2?") from None
    inner = settings.get("n_inner")
    if inner not in (None, 4 * sizes.embd):
        raise UsageError(f"{path}: n_inner is {inner}; this GPT-2 has four times n_embd, {4 * sizes.embd}")
    return replace(sizes, **changes)


def settings_of(config: GPT2Config) -> dict[str, Any]:
    """The settings with which transformers opens the weights as its GPT2LMHeadModel."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    granted = {name: values[0] for name, values in _TAKEN_FOR_GRANTED.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **granted,
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.embd,
        **dropouts,
        # The vocabulary need not have GPT-2's end of text.
        "bos_token_id": min(50256, config.vocab_size - 1),
        "eos_token_id": min(50256, config.vocab_size - 1),
    }


def load_weights(model: GPT2, folder: str | Path) -> None:
    """Copies a directory's weights into a plain model, converted to its dtype.

    Names may lack "transformer."; causal masks, which old files hold too, are passed over. Raises UsageError
    naming tensors that are missing, left over, or of another shape; the model is unchanged then.
    """
    tensors = {our_name(name) or "": t for name, t in read_tensors(Path(folder)).items() if not _is_mask(name)}
    copy_weights(model, tensors, _TIED, Path(folder))


def read_settings(path: Path, model: str, granted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """A config.json. granted: settings with the values that `model` has here; another one raises UsageError."""
    settings = _read_json(path)
    for name, values in granted.items():
        if settings.get(name, values[0]) not in values:
            raise UsageError(f"{path}: {name} is {settings[name]!r}; this {model} has {values[0]!r}")
    return settings


def copy_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], folder: Path
) -> None:
    """Copies tensors into the model's of the same names, once all of them are known to fit.

    tied: names that may be missing, each with the name of the tensor that it is the same as.
    """
    _check(model, tensors, tied, folder)
    own = model.state_dict()
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by name. Raises UsageError for files that are missing or cannot be read."""
    try:
        safe_open, problem = import_safe_open()
        paths = files_of(folder)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
        except (problem, OSError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from None
    return tensors


def our_name(name: str) -> str | None:
    """A published tensor's name in GPT2; None for what it does not need. For `zero.Safetensors`."""
    if _is_mask(name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _is_mask(name: str) -> bool:
    return name.endswith((".attn.bias", ".attn.masked_bias"))


def _check(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], folder: Path) -> None:
    own = model.state_dict()
    problems = {
        "missing": sorted(own.keys() - tensors.keys() - tied.keys()),
        "unexpected": sorted(tensors.keys() - own.keys()),
        "of another shape": [
            f"{name} (has {tuple(t.shape)}, needs {tuple(own[name].shape)})"
            for name, t in sorted(tensors.items())
            if name in own and t.shape != own[name].shape
        ],
    }
    found = "; ".join(f"{problem}: {listed(names, 3)}" for problem, names in problems.items() if names)
    if found:
        raise UsageError(f"{folder}: the weights do not fit; {found}")
    for name, same in tied.items():
        if name in tensors and not torch.equal(tensors[name], tensors[same]):
            raise UsageError(f"{folder}: {name} differs from {same}; here they are one tensor")


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds no JSON object")
    return found
