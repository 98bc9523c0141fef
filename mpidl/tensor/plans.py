"""Plans: names of modules and their styles.

In a name `*` stands for any text without a dot, as in "model.layers.*.mlp", and `-1` for the last of a list, as in
"model.layers.-1".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from .styles import Style

Plan = Mapping[str, Style | Sequence[Style]]
StyledModules = list[tuple[str, nn.Module, list[Style]]]


def styled_modules(plan: Plan, model: nn.Module) -> StyledModules:
    """Lists the modules that a plan names, in the model's order, with their styles; a module with two names once.

    Raises ConfigurationError for a name that no module has, and for what is no style.
    """
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    order: dict[int, int] = {}
    first: dict[int, str] = {}
    for index, (name, module) in enumerate(named):
        order.setdefault(id(module), index)
        first.setdefault(id(module), name)
    found: dict[int, tuple[nn.Module, list[Style]]] = {}
    for pattern, styles in plan.items():
        matched_modules = _named(pattern, named)
        if not matched_modules:
            raise ConfigurationError(f"plan: {pattern!r} names no module of {type(model).__name__}")
        for _, module in matched_modules:
            of_module = found.setdefault(id(module), (module, []))[1]
            of_module += [style for style in _as_list(pattern, styles) if style not in of_module]
    return [(first[key], *found[key]) for key in sorted(found, key=order.__getitem__)]


def _named(pattern: str, named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    wanted = pattern.split(".")
    regexes = ["[0-9]+" if part == "-1" else "[^.]+".join(map(re.escape, part.split("*"))) for part in wanted]
    regex = re.compile(r"\.".join(regexes))
    matched_modules = [(name.split("."), name, module) for name, module in named if regex.fullmatch(name)]
    for index in [index for index, part in enumerate(wanted) if part == "-1"]:
        last: dict[tuple[str, ...], int] = {}  # by what stands before
        for parts, _, _ in matched_modules:
            before = tuple(parts[:index])
            last[before] = max(last.get(before, 0), int(parts[index]))
        matched_modules = [hit for hit in matched_modules if int(hit[0][index]) == last[tuple(hit[0][:index])]]
    return [(name, module) for _, name, module in matched_modules]


def _as_list(pattern: str, styles: Any) -> list[Style]:
    several = list(styles) if isinstance(styles, Sequence) and not isinstance(styles, str) else [styles]
    for style in several:
        if not hasattr(style, "apply") or isinstance(style, type):
            raise ConfigurationError(
                f"plan: {pattern!r}: got {style!r}; needs a style of mpidl.tensor, such as ColumnParallel()"
            )
    return several
