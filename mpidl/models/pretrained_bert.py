"""Published BERT weights, in a directory as Hugging Face's transformers saves it; see `pretrained` for the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .bert import BERT, BERTConfig
from .pretrained import copy_weights, read_settings, read_tensors

# Settings that the architecture here takes for granted; a directory with others would give other logits.
_TAKEN_FOR_GRANTED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "layer_norm_eps": (1e-12,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Weights of the other pre-training task, and counters that old files hold.
_NOT_NEEDED = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")


def load_pretrained(folder: str | Path, config: BERTConfig | None = None) -> BERT:
    """A model with a directory's weights; config: by default the directory's own.

    Raises UsageError for what is missing or does not fit.
    """
    model = BERT(load_config(folder) if config is None else config)
    load_weights(model, folder)
    return model


def load_config(folder: str | Path, **changes: Any) -> BERTConfig:
    """The sizes in a directory of published weights, with changes to single settings."""
    path = Path(folder) / "config.json"
    settings = read_settings(path, "BERT", _TAKEN_FOR_GRANTED)
    try:
        sizes = BERTConfig(
            vocab_size=settings["vocab_size"],
            block_size=settings["max_position_embeddings"],
            layers=settings["num_hidden_layers"],
            heads=settings["num_attention_heads"],
            embd=settings["hidden_size"],
            inner=settings["intermediate_size"],
            types=settings.get("type_vocab_size", 2),
        )
    except KeyError as missing:
        raise UsageError(f"{path}: has no {missing}; is it a BERT?") from None
    return replace(sizes, **changes)


def settings_of(config: BERTConfig) -> dict[str, Any]:
    """The settings with which transformers opens the weights as its BertForMaskedLM."""
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    return {
        "architectures": ["BertForMaskedLM"],
        **{name: values[0] for name, values in _TAKEN_FOR_GRANTED.items()},
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.embd,
        "intermediate_size": config.inner_width,
        "type_vocab_size": config.types,
        **dropouts,
    }


def load_weights(model: BERT, folder: str | Path) -> None:
    """Copies a directory's weights into a plain model, converted to its dtype.

    Norms may have their old names, gamma and beta. Raises UsageError naming tensors that are missing, left over, or
    of another shape; the model is unchanged then.
    """
    tensors = {our_name(name): tensor for name, tensor in read_tensors(Path(folder)).items()}
    copy_weights(model, {name: tensor for name, tensor in tensors.items() if name is not None}, _TIED, Path(folder))


def our_name(name: str) -> str | None:
    """A published tensor's name in BERT; None for what it does not need."""
    if name.startswith(_NOT_NEEDED):
        return None
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
