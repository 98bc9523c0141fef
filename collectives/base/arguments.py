"""Checks of what a caller gives, each with an error that says what was given and what is needed."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from .buffers import Buffer, memory_name
from .partition import even_counts

_MOMENT = 1e-3  # seconds


def wrong_type(name: str, value: Any, needed: str) -> ArgumentTypeError:
    """The error for an object of the wrong kind."""
    return ArgumentTypeError(f"{name}: got {value!r} of type {type(value).__name__}; needs {needed}")


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int within low..high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, "an integer") from None
    if isinstance(value, bool):
        raise wrong_type(name, value, "an integer")
    if not low <= number <= high:
        raise ArgumentError(f"{name}: got {number}; needs a number from {low} to {high}")
    return number


def seconds(name: str, value: Any) -> float:
    """`value` as a positive number of seconds, at most the longest that a lock can be waited for."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong_type(name, value, "a number of seconds") from None
    if not 0 < number < math.inf:
        raise ArgumentError(f"{name}: got {value!r}; needs a number of seconds above 0")
    return min(number, threading.TIMEOUT_MAX)


def timeout(operation: str, value: Any, async_op: bool = False) -> float:
    """`value` as the seconds that a synchronous operation may take."""
    number = seconds(f"{operation}: timeout", value)
    if async_op:
        raise ArgumentError(
            f"{operation}: got timeout={value} and async_op; needs Work.wait(timeout), after which the "
            "operation goes on"
        )
    return number


class TimeLimit:
    """The time that all parts of an operation may take together. timeout: seconds; None: no limit."""

    def __init__(self, operation: str, timeout: Any) -> None:
        number = None if timeout is None else seconds(f"{operation}: timeout", timeout)
        self._end = None if number is None else time.monotonic() + number

    def left(self) -> float | None:
        """Seconds for the next part, or None for no limit; at least a moment, so that the part can time out."""
        return None if self._end is None else max(_MOMENT, self._end - time.monotonic())


def elements(name: str, shape: Any) -> int:
    """The number of elements of an array of this shape."""
    try:
        sizes = [shape] if isinstance(shape, int) else list(shape)
    except TypeError:
        raise wrong_type(name, shape, "an integer or a sequence of integers") from None
    return math.prod(integer(name, size, 0, 2**62) for size in sizes)


def root_rank(operation: str, root: Any, ranks: int) -> int:
    """`root` as a rank of the group."""
    return integer(f"{operation}: root", root, 0, ranks - 1)


def parts(name: str, counts: Sequence[int] | None, size: int, ranks: int) -> list[int]:
    """Elements of each rank's part of `size`; by default as even as possible."""
    if counts is None:
        return even_counts(size, ranks)
    found = _counts(name, counts, ranks)
    if sum(found) != size:
        raise ArgumentError(f"{name}: got {found}, in all {sum(found)}; needs {size}, the array's elements")
    return found


def given_parts(name: str, counts: Sequence[int] | None, own: int, ranks: int) -> list[int]:
    """Elements of each rank's part where only the root sees the whole; by default all have this rank's."""
    return [own] * ranks if counts is None else _counts(name, counts, ranks)


def refuse_counts(operation: str, counts: Any) -> None:
    """Raises if counts are given with a list of arrays, each of which is cut as evenly as possible."""
    if counts is not None:
        raise ArgumentError(f"{operation}: got counts {counts!r} and a list of arrays; needs one or the other")


def _counts(name: str, counts: Sequence[int], ranks: int) -> list[int]:
    try:
        found = [integer(f"{name}: counts", c, 0, 2**62) for c in counts]
    except TypeError:
        raise wrong_type(f"{name}: counts", counts, f"a sequence of {ranks} integers") from None
    if len(found) != ranks:
        raise ArgumentError(f"{name}: got {len(found)} counts; needs {ranks}, one for each rank")
    return found


def check_same_dtype(operation: str, out: Buffer, x: Buffer) -> None:
    """Raises unless both arrays have one element type, and are on one GPU or both on the host."""
    if memory_name(out) != memory_name(x):
        raise ArgumentTypeError(
            f"{operation}: got out on {memory_name(out)} and x on {memory_name(x)}; needs both in one place"
        )
    if out.dtype != x.dtype:
        raise ArgumentTypeError(f"{operation}: got out of {out.dtype.name} and x of {x.dtype.name}; needs one dtype")


def check_own_part(name: str, array: Buffer, counts: Sequence[int], rank: int) -> None:
    """Raises unless the array has as many elements as this rank's part."""
    if array.size != counts[rank]:
        raise ArgumentError(
            f"{name}: got {array.size} elements; needs {counts[rank]}, the part of rank {rank} in {list(counts)}"
        )


def refuse_overlap(
    operation: str, part: Buffer, whole: Buffer, counts: Sequence[int] | None = None, rank: int = 0
) -> None:
    """Raises ArgumentError if the two arrays share memory, unless `part` is exactly this rank's own part of `whole`."""
    (a, a_stop), (b, b_stop) = part.span(), whole.span()
    if a >= b_stop or b >= a_stop or part.size == 0:
        return
    if counts is None:
        raise ArgumentError(f"{operation}: out and x share memory; needs two separate arrays")
    place = b + sum(counts[:rank]) * whole.dtype.itemsize
    if a != place:
        raise ArgumentError(
            f"{operation}: out and x share memory, {a - b} bytes from each other; needs two separate arrays, or the "
            f"smaller one exactly at rank {rank}'s part of the larger, {place - b} bytes in"
        )
