"""Pool of arrays that reductions use again from step to step.

Memory that is new in every step would be brought in page by page again, and operations on it prepared anew.
"""

from __future__ import annotations

import torch


class ArrayPool:
    """Free arrays, by size, dtype and device; there are as many as were in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an array with any content."""
        free = self._free.get((elements, dtype, device))
        return free.pop() if free else torch.empty(elements, dtype=dtype, device=device)

    def held_tensors(self) -> list[torch.Tensor]:
        """The free arrays."""
        return [array for arrays in self._free.values() for array in arrays]

    def give_back(self, *arrays: torch.Tensor) -> None:
        """Takes arrays back that nothing reads any more."""
        for array in arrays:
            self._free.setdefault((array.numel(), array.dtype, array.device), []).append(array)
