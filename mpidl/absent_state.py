"""Placeholder for a whole state, which `model_state_dict` and the like return on all ranks but rank 0.

An empty dictionary would be saved as a checkpoint without an error, and loaded as one without content. The mark
is a dictionary of plain types, so that `torch.save`, `torch.load(weights_only=True)` and frameworks carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "the whole state is on rank 0, this is rank"


def absent_state(rank: int) -> dict[str, Any]:
    """The mark for this rank."""
    return {_KEY: rank}


def refusal(given: Any, giver: str = "state_dict()") -> str | None:
    """The reason why a state that is such a mark cannot be loaded; None for any other state. giver: what gave it."""
    if not (isinstance(given, Mapping) and _KEY in given):
        return None
    return (
        f"got on rank 0 what {giver} gave on rank {given[_KEY]}, which holds no state; needs what it gave on rank "
        "0: save that, or each rank's in a file of its own"
    )
