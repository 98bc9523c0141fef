"""Checks of the groups' betas and eps, which schedules and loaded states may change from step to step.

All groups have the same, as their parameters are in the same buckets, of one momentum each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...setting_checks import require


def check_betas_and_eps(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless these are ones that work."""
    betas, eps = settings["betas"], settings["eps"]
    fits = isinstance(betas, tuple | list) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)
    require("betas", betas, fits, "two numbers of at least 0 and below 1")
    require("eps", eps, is_number(eps) and eps > 0, "a number above 0")


def check_groups(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigurationError unless betas and eps of all groups work, and are the same. optimizer: its name."""
    for number, group in enumerate(groups):
        check_betas_and_eps(group)
        for name in ("betas", "eps"):
            own, first = (tuple(each[name]) if name == "betas" else each[name] for each in (group, groups[0]))
            needed = f"{first!r}, those of group 0, as all groups are sent together"
            require(f"{optimizer}, group {number}, {name}", own, own == first, needed)


def is_number(value: Any) -> bool:
    """Tells if a value is a number, and not a flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)
