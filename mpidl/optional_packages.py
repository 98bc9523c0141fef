"""Imports packages that mpidl does not depend on, when something needs them, and says how to install a missing one."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import UsageError


def import_optional(module: str, needed: str, refusal: type[Exception] = UsageError) -> Any:
    """Imports a module. Where it is missing, raises the refusal, which says what needs it and how to install it.

    needed: the text of the refusal.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise refusal(needed) from None
