"""Lazy names of a package: their modules are imported when a name is first used, so that a program starts sooner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package's `__getattr__` and `__dir__`.

    names: the module in which each name is, such as "ema"; a module's own name stands for the module. Type checkers do
    not see them: the package imports them for those under TYPE_CHECKING.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{names[name]}")
        found = module if name == names[name] else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing
