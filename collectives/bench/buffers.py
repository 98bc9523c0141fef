"""The arrays that calls work on: one set that stays warm, or many that calls rotate through so that each is cold.

    warm    call 1: set 0      call 2: set 0      call 3: set 0 ...     all as the untimed call before has left it
    cold    call 1: set 0      call 2: set 1      call 3: set 2 ...     and set 0 again after more than the caches hold
    fresh   call 1: set 0      call 2: set 0      call 3: set 0 ...     all as the program has read and written it

Sets lie one behind the other in an arena. For small arrays this would be more sets than the Communicator keeps prepared
calls. Then there are fewer sets, and before each call a rank reads as much other memory as is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..communicator import Communicator
from .operations import Case

_LINE = 64  # bytes; sets share no line
_OF_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")  # the root alone has the input, the result
_MORE = 1.25  # than the caches hold


@dataclass
class Arrays:
    """The arrays of one call on this rank: x goes in, out comes out. In place they are, or lie in, one memory."""

    x: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """The number of sets, and the bytes of other memory that a rank reads before a call."""

    sets: int
    swept: int = 0


WARM = Rotation(1)


def cold(touched: int, caches: int, most: int) -> Rotation:
    """The rotation in which more bytes than the caches hold are touched between two uses of a set.

    touched: bytes that a call touches at least.
    caches: bytes that they hold.
    most: sets.
    """
    needed = int(caches * _MORE)
    sets = min(1 + max(1, -(-needed // touched)), max(2, most))
    return Rotation(sets, max(0, -(-(needed - (sets - 1) * touched) // sets)))


class Sweep:
    """Memory that is read only to push other memory out of the caches. size: bytes in all."""

    def __init__(self, size: int) -> None:
        self._memory = np.ones(-(-max(size, 8) // 8), np.int64)  # ones: zeros would all be one page
        self._place = 0

    def read(self, nbytes: int) -> None:
        """Reads the next so many bytes."""
        left = -(-nbytes // 8)
        while left > 0:
            some = self._memory[self._place : self._place + left]
            some.sum()
            left -= some.size
            self._place = (self._place + some.size) % self._memory.size


class ArraySets:
    """All sets of one kind of arrays for a case. Collective.

    kind: "user" is any memory; "symmetric" that of `Communicator.empty`, and for the output of an all_gather that of
        `Communicator.shared`, one for the node.
    has_second: whether each set needs its second array.
    """

    def __init__(self, comm: Communicator, case: Case, kind: str, sets: int, device: str, *, has_second: bool) -> None:
        self._operation, self._rank, self._root = case.operation, comm.rank, case.root
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.part = max(1, case.size // dtype.itemsize // comm.size)
        self.whole = self.part * comm.size
        self.nbytes = self.whole * dtype.itemsize
        second = (self.part if self._operation.parts else self.whole) if has_second else 0
        line = max(1, _LINE // dtype.itemsize)
        self._strides = tuple(-(-size // line) * line for size in (self.whole, second))

        def make(elements: int, *, shared: bool = False) -> torch.Tensor:
            if kind == "user" or not elements:
                made = torch.empty(elements, dtype=dtype, device=device)
            else:
                made = (comm.shared if shared else comm.empty)(elements, dtype, device=device)
            return made.zero_()  # has pages of its own from now on

        self._wholes = make(self._strides[0] * sets, shared=self._operation.name == "all_gather")
        self._seconds = make(self._strides[1] * sets)
        self._second = second
        self._copies: tuple[torch.Tensor, torch.Tensor] | None = None  # the program's own

    def zero(self) -> None:
        """Sets all to zero, on which reductions may run again and again."""
        self._wholes.zero_()
        self._seconds.zero_()

    def between_calls(self, place: str) -> Callable[[], None]:
        """Returns a function that does what a program does between two calls: read a result, write the next input."""
        arrays = self.arrays(0, place)
        if self._copies is None:
            self._copies = torch.zeros(self.whole, dtype=arrays.x.dtype), torch.empty(self.whole, dtype=arrays.x.dtype)
        given, taken = (
            memory[: each.numel()] for memory, each in zip(self._copies, (arrays.x, arrays.out), strict=True)
        )
        others = self._rank != self._root
        gives = not (others and self._operation.name in _OF_ROOT)
        takes = not (others and self._operation.name in _TO_ROOT)

        def read_and_write() -> None:
            if takes:
                taken.copy_(arrays.out)
            if gives:
                arrays.x.copy_(given)

        return read_and_write

    def arrays(self, number: int, place: str) -> Arrays:
        """The arrays of a set, for a call out of place or in place."""
        whole = self._wholes[number * self._strides[0] :][: self.whole]
        second = self._seconds[number * self._strides[1] :][: self._second]
        takes_part = self._operation.name in ("reduce_scatter", "scatter")  # and hands in a whole array
        if not self._operation.parts:
            return Arrays(whole if place == "in" else second, whole)
        if place == "in" and (not self._operation.rooted or self._rank == self._root):
            second = whole[self._rank * self.part :][: self.part]
        return Arrays(whole, second) if takes_part else Arrays(second, whole)


def call_in_place(call: Callable[[torch.Tensor], Any], arrays: Arrays, *, copies: bool) -> Callable[[], Any]:
    """Makes a call that has its result where its input was: on x, or on out after a copy of x to it."""
    if not copies:
        return partial(call, arrays.x)

    def after_a_copy() -> Any:
        arrays.out.copy_(arrays.x)
        return call(arrays.out)

    return after_a_copy


def touched_bytes(case: Case, ranks: int) -> int:
    """Bytes that a call touches at least on any rank: where there is a root, the others have a part alone."""
    itemsize = getattr(torch, case.dtype).itemsize
    part = max(1, case.size // itemsize // ranks) * itemsize
    return int(part if case.operation.rooted and case.operation.parts else part * ranks)


def needs_second(case: Case, places: tuple[str, ...]) -> bool:
    """Returns whether a set needs its second array."""
    return "out" in places or (case.operation.rooted and case.operation.parts)
