"""Settings of a step that must be equal on all ranks, compared by a fingerprint in the step's all-reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...digest import DIGEST, digest
from ...optimizer_trial import comparable


def settings_of(groups: Iterable[Mapping[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """The groups' settings of these names, by group and name."""
    listed = [(number, comparable(group)) for number, group in enumerate(groups)]
    return {f"group {n}'s {name}": group[name] for n, group in listed for name in names if name in group}


def fingerprint(settings: Mapping[str, Any]) -> list[int]:
    """Bytes that a maximum over the ranks leaves as they are, at the end of others, if all have these settings."""
    own = digest(repr(settings))
    return [*own, *(255 - byte for byte in own)]


def same_fingerprints(agreed: np.ndarray) -> bool:
    """Tells if the bytes at the end are still a fingerprint."""
    largest, least = agreed[-2 * DIGEST : -DIGEST], 255 - agreed[-DIGEST:]
    return bool((largest == least).all())
