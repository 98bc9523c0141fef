"""Published weights: the names of their tensors, and the files with which transformers' `from_pretrained` opens them.

config.json               the architecture and its sizes: of a GPT2 or BERT of this package, or of transformers
generation_config.json    how a model of transformers generates text, if it does
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from . import pretrained, pretrained_bert
from .bert import BERT
from .gpt2 import GPT2

CONFIG, GENERATION = "config.json", "generation_config.json"
FILES = (CONFIG, GENERATION)
_OF_DTYPE = ("dtype", "torch_dtype")  # the setting's name, and its former one


def published_names(model: torch.nn.Module) -> Callable[[str], str | None]:
    """Returns a function from a published tensor's name to the model's, or to None if the model does not need it."""
    if isinstance(model, GPT2):
        return pretrained.our_name
    if isinstance(model, BERT):
        return pretrained_bert.our_name
    return lambda name: name


def published_files(model: torch.nn.Module) -> dict[str, str]:
    """The texts of the files by their names; none for a model that transformers does not know."""
    if isinstance(model, GPT2):
        return {CONFIG: _text(pretrained.settings_of(model.config))}
    if isinstance(model, BERT):
        return {CONFIG: _text(pretrained_bert.settings_of(model.config))}
    config: Any = vars(model).get("config")
    # A module of the user's own may have such settings for a part of it.
    if not (hasattr(config, "to_json_string") and hasattr(model, "from_pretrained")):
        return {}
    settings = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    settings[_OF_DTYPE[not hasattr(config, "dtype")]] = _name_of(dtype)
    found = {CONFIG: _text(settings)}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        found[GENERATION] = generation.to_json_string()
    return found


def with_dtype(text: str, dtype: torch.dtype) -> str:
    """A config.json of weights of this dtype, if it names one."""
    settings = json.loads(text)
    return _text({name: _name_of(dtype) if name in _OF_DTYPE else value for name, value in settings.items()})


def same_model(text: str, other: str) -> bool:
    """Returns whether two texts of a config.json are of models of one class."""
    one, two = json.loads(text), json.loads(other)
    names = ("architectures", "model_type")
    named = [value for name in names for value in (one.get(name), two.get(name)) if value is not None]
    return all(one.get(name) == two.get(name) for name in names) if named else bool(one.keys() == two.keys())


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
