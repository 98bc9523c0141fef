"""Placeholders: tensors of any shape in the memory of one element, where values are to come or have gone."""

from __future__ import annotations

import torch


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of any shape in the memory of one element: NaN until it is given values."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(shape)
