"""The safetensors files of a path: one file, or a directory as Hugging Face saves it.

model.safetensors, or several files and model.safetensors.index.json, which tells what is in which.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigurationError


def files_of(path: Path) -> list[Path]:
    """Lists the files of a path. Raises ConfigurationError for one that is not there."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"weights: {index}: has no weight_map: {error}") from None
    for name in names:
        if not (path / name).is_file():
            raise ConfigurationError(f"weights: {path / name}: no such file")
    return [path / name for name in names]


def library() -> tuple[Any, type[Exception]]:
    """Returns what opens a file, and its error. Raises ConfigurationError without the package."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigurationError("weights need the package safetensors (pip install safetensors)") from None
    return safe_open, SafetensorError
