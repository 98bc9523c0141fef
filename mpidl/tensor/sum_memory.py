"""Symmetric memory in which summands become sums that a model may keep, without a copy.

    row-parallel layer 1   product ─▶ [ place 0 ] ─ all-reduce in place ─▶ y, until nothing refers to it any more
    row-parallel layer 2   product ─▶ [ place 1 ] ...
    row-parallel layer 3   product ─▶ [ place 0 ], if the first y is gone by then; else a copy of the sum

A residual connection adds a sum to its input and drops it, so two places are enough for most models. A place is taken
as long as the tensor's storage lives: views of it count, and what autograd keeps for backward. Which places are free is
each rank's own matter: the ranks of an all-reduce tell each other where their summands lie. Between two all-reduces no
rank touches another's place, as an all-reduce ends on all ranks together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_PLACES = 2
_PAGE = 4096  # bytes, by which places are aligned
_LEAST = 1 << 15  # bytes, below which a copy costs less than a tensor over given memory


class SumMemory:
    """Places for sums in memory of the CPU.

    allocate: makes symmetric memory of so many bytes for them all, of so many bytes each; collective. It also makes
    ready what a rank without a free place takes, as that is no matter of all ranks.
    """

    def __init__(self, allocate: Callable[[int, int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._places: list[np.ndarray[Any, Any]] = []
        self._taken: list[Callable[[], Any]] = []  # weak references to what the storages of sums hold

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return sum(place.nbytes for place in self._places)

    @staticmethod
    def nbytes_for(nbytes: int) -> int:
        """Bytes of all memory for sums of so many bytes on CPUs: of the places, and of a summand without one.

        Small ones have no places, and are copied.
        """
        return nbytes if nbytes < _LEAST else (_PLACES + 1) * _whole_pages(nbytes)

    def take(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Uninitialised memory of this shape, with the dtype of `like`; None where there is no place. Collective.

        Every rank asks for as many bytes, and more than before are allocated on all of them, but one rank may get
        a place where another does not.
        """
        nbytes = math.prod(shape) * like.element_size()
        if nbytes < _LEAST or not like.is_cpu:
            return None
        if not self._places or self._places[0].nbytes < nbytes:
            size = _whole_pages(nbytes)
            memory = self._allocate(_PLACES * size, size).numpy()
            self._places = [memory[start : start + size] for start in range(0, memory.nbytes, size)]
            self._taken = [lambda: None] * _PLACES
        for number, taken in enumerate(self._taken):
            if taken() is None:
                owner = self._places[number][:nbytes]
                self._taken[number] = weakref.ref(owner)
                found = torch.frombuffer(owner, dtype=like.dtype)  # its storage keeps `owner` as long as it lives
                return found.resize_(shape)  # a view could not be written into behind a function of autograd
        return None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
