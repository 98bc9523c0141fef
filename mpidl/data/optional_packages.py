"""Imports packages that mpidl does not depend on, when something needs them, and says how to install a missing one."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import UsageError


def library(module: str, needed: str) -> Any:
    """Imports a module. Where it is missing, raises UsageError that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(needed) from None
