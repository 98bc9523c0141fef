"""Reads the values of many one-element tensors at once: on a GPU each reading would wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def values_of(scalars: Sequence[torch.Tensor]) -> list[Any]:
    """The values of tensors of no dimension and one dtype."""
    return torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []
