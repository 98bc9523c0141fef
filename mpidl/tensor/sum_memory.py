"""Symmetric memory in which summands become sums that a model may keep, without a copy.

    row-parallel layer 1   product ─▶ [ buffer 0 ] ─ all-reduce in place ─▶ y, until nothing refers to it any more
    row-parallel layer 2   product ─▶ [ buffer 1 ] ...
    row-parallel layer 3   product ─▶ [ buffer 0 ], if the first y is gone by then; else a copy of the sum

A residual connection adds a sum to its input and drops it, so two buffers are enough for most models. A buffer is taken
as long as the tensor's storage lives: views of it count, and what autograd keeps for backward. The storage refers to an
array: the buffer is free when only this pool refers to that array. The array is kept for the next sum of this shape, as
making one takes long compared with a small all-reduce. Each rank decides by itself which buffer it takes: the ranks of
an all-reduce tell each other where their summands lie. Between two all-reduces no rank touches another's buffer, as an
all-reduce ends on all ranks together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_NUM_BUFFERS = 2
_PAGE = 4096  # bytes, by which buffers are aligned
_SMALLEST_BUFFERED = 1 << 15  # bytes, below which a copy costs less than a tensor over given memory
_VIEWS = 64  # of a buffer, for sums of so many shapes
_IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


class Summand(NamedTuple):
    """Memory for one summand.

    reduce: makes it the sum over the ranks, in place; collective.
    is_kept_in_place: the sum may stay there; else it is to be copied, as the next summand comes to the same memory.
    """

    tensor: torch.Tensor
    reduce: Callable[[], object]
    is_kept_in_place: bool


class _SumBuffer:
    """Memory for one sum at a time. prepare: returns the reduction of an array."""

    def __init__(self, memory: np.ndarray[Any, Any], prepare: Callable[[Any], Callable[[], object]]) -> None:
        self.memory, self._prepare = memory, prepare
        self._views: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}
        self._reductions: dict[tuple[Any, ...], Callable[[], object]] = {}
        # What the last tensor refers to, if it still lives.
        self._array_of_last_tensor = self._view(memory.shape, torch.uint8)
        self._references_without_tensor = self._references()

    def _references(self) -> int:
        return sys.getrefcount(self._array_of_last_tensor)

    @property
    def is_free(self) -> bool:
        """True if no tensor's storage refers to it."""
        return self._references() == self._references_without_tensor

    def summand(self, shape: Sequence[int], dtype: torch.dtype) -> Summand:
        """Takes the buffer. The tensor is no view, as those could not be written into behind a function of autograd."""
        self._array_of_last_tensor = view = self._view(shape, dtype)
        key = (*shape, dtype)
        reduce = self._reductions.get(key)
        if reduce is None:  # of another array over the same bytes, so as not to keep this one
            reduce = self._reductions[key] = self._prepare(self._tensor(view[:], shape, dtype))
        return Summand(self._tensor(view, shape, dtype), reduce, is_kept_in_place=True)

    def _view(self, shape: Sequence[int], dtype: torch.dtype) -> np.ndarray[Any, Any]:
        """Returns the array over as many bytes: of this dtype and shape, or of bytes where NumPy has not the dtype."""
        key = (*shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
                self._reductions.clear()
            view = self.memory[: math.prod(shape) * dtype.itemsize]
            if dtype in _IN_NUMPY:
                view = view.view(_IN_NUMPY[dtype]).reshape(shape)
            self._views[key] = view
        return view

    @staticmethod
    def _tensor(view: np.ndarray[Any, Any], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype in _IN_NUMPY:
            return torch.from_numpy(view)
        return torch.frombuffer(view, dtype=dtype).resize_(shape)


class SumMemory:
    """Buffers for sums in memory of the CPU.

    allocate: makes symmetric memory of so many bytes for them all, of so many bytes each; collective. It also makes
    ready what a rank without a free buffer takes, as that is no matter of all ranks.
    prepare: returns the reduction of an array, in place, over the ranks.
    """

    def __init__(
        self,
        allocate: Callable[[int, int], torch.Tensor],
        prepare: Callable[[Any], Callable[[], object]],
    ) -> None:
        self._allocate, self._prepare = allocate, prepare
        self._sum_buffers: list[_SumBuffer] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in self._sum_buffers)

    @staticmethod
    def nbytes_for(nbytes: int) -> int:
        """Bytes of all memory for sums of so many bytes on CPUs: of the buffers, and of a summand without one.

        Small ones have no buffers, and are copied.
        """
        return nbytes if nbytes < _SMALLEST_BUFFERED else (_NUM_BUFFERS + 1) * _whole_pages(nbytes)

    def take(self, shape: Sequence[int], like: torch.Tensor) -> Summand | None:
        """Uninitialised memory of this shape, with the dtype of `like`; None where there is no buffer. Collective.

        Every rank asks for as many bytes, and more than before are allocated on all of them, but one rank may get
        a buffer where another does not.
        """
        nbytes = math.prod(shape) * like.element_size()
        if nbytes < _SMALLEST_BUFFERED or not like.is_cpu:
            return None
        if not self._sum_buffers or self._sum_buffers[0].memory.nbytes < nbytes:
            size = _whole_pages(nbytes)
            memory = self._allocate(_NUM_BUFFERS * size, size).numpy()
            starts = range(0, memory.nbytes, size)
            self._sum_buffers = [_SumBuffer(memory[start : start + size], self._prepare) for start in starts]
        for buffer in self._sum_buffers:
            if buffer.is_free:
                return buffer.summand(shape, like.dtype)
        return None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
