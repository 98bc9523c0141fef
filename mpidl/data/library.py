"""The package tokenizers, asked for when a vocabulary in files needs it."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import UsageError


def tokenizers_library(needed_by: str) -> ModuleType:
    """Imports the package tokenizers; UsageError that says how to install it where it is missing."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError(f"{needed_by} needs the package tokenizers (pip install 'mpidl[text]')") from None
