"""Memory of this rank for the intermediate results of operations, kept from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Scratch:
    """Memory that one communicator's operations use in turn; it grows to the largest and stays."""

    arrays: dict[str, Array] = field(default_factory=dict)

    def take(self, purpose: str, nbytes: int) -> Array:
        """Returns at least `nbytes` of memory, as uint8."""
        array = self.arrays.get(purpose)
        if array is None or array.size < nbytes:
            array = self.arrays[purpose] = np.empty(nbytes, np.uint8)
        return array[:nbytes]
