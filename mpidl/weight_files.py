"""The safetensors files of a path: one file, or a directory as Hugging Face saves it.

model.safetensors, or several files and model.safetensors.index.json, which tells what is in which. An index comes from
anywhere: what it names is a file of its own directory, or it is refused.

model_files            weights of a model under ZeRO or tensor parallelism, each rank its part
models.pretrained      published weights of GPT-2 and BERT, whole
checkpoint.importing   weights into a model of any engine; takes the names in an index, and opens the files itself
"""

from __future__ import annotations

import json
import re
import reprlib
from pathlib import Path
from typing import Any

from .errors import ConfigurationError
from .optional_packages import import_optional
from .regular_files import read_regular

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_INDEX = 256 << 20  # bytes
FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)


def names_in(index: Path) -> list[str]:
    """Lists the files that an index names. Raises OSError, and ValueError for an index that is none."""
    try:
        content = json.loads(read_regular(index, _LONGEST_INDEX))
    except RecursionError as error:
        raise ValueError(f"is nested too deeply: {error}") from None
    files = content.get("weight_map") if type(content) is dict else None
    if type(files) is not dict:
        raise ValueError("has no weight_map, an object of a file's name for each tensor's")
    for name, file in files.items():
        if type(file) is not str or not FILE_NAME.fullmatch(file):
            raise ValueError(
                f"weight_map: {reprlib.repr(name)} is in {reprlib.repr(file)}; needs the name of a file in the same "
                "directory, such as model-00001-of-00002.safetensors"
            )
    return sorted({*files.values()})


def files_of(path: Path) -> list[Path]:
    """Lists the files of a path. Raises ConfigurationError for one that is not there, and for an index that is none."""
    if path.is_file():
        return [path]
    index = path / INDEX
    names = [SINGLE]
    if index.exists():
        try:
            names = names_in(index)
        except OSError as error:
            raise ConfigurationError(f"weights: {index}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigurationError(f"weights: {index}: {error}") from None
    for name in names:
        if not (path / name).is_file():
            raise ConfigurationError(f"weights: {path / name}: no such file")
    return [path / name for name in names]


def import_safe_open() -> tuple[Any, type[Exception]]:
    """Returns safetensors' `safe_open`, and its error. Raises ConfigurationError without the package."""
    needed = "weights need the package safetensors (pip install safetensors)"
    safetensors = import_optional("safetensors", needed, ConfigurationError)
    return safetensors.safe_open, safetensors.SafetensorError
