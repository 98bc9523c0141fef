"""Captures, checks and restores the states of the random generators of python, numpy and torch."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

_MT19937_WORDS = 624


def capture() -> dict[str, Any]:
    """Returns this process's states, as values that `json_encoding` can encode."""
    kind, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": kind, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),  # type: ignore[arg-type, call-overload]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> None:
    """Sets the generators to captured states, without those of GPUs that are not here."""
    random.setstate(_of_python(states))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for number, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, number)


def check(states: Any, file: Path) -> None:
    """Raises CheckpointError, naming the file, unless `restore` can work; the random numbers stay as they are."""
    try:
        random.Random().setstate(_of_python(states))
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        fits = 0 <= states["numpy"]["state"]["pos"] <= _MT19937_WORDS  # which numpy takes as it is
        fits &= all(state.dtype == torch.uint8 for state in states.get("cuda", []))
    except Exception as error:  # of three libraries
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file}: the random states cannot be restored: {why}") from error
    if not fits:
        raise CheckpointError(f"{file}: the random states cannot be restored: they are no states")


def _of_python(states: dict[str, Any]) -> tuple[Any, ...]:
    python = states["python"]
    return python["version"], tuple(python["numbers"].tolist()), python["gauss"]


def derive(states: dict[str, Any], rank: int) -> None:
    """Seeds the generators of a rank that the saving run did not have, with the same seed at each load."""
    seed = zlib.crc32(states["torch"].numpy().tobytes() + rank.to_bytes(8, "little"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
