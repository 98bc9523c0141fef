"""Operations on a list of arrays, run as one: small arrays are packed side by side, so that they cost one operation.

    all_reduce, reduce, broadcast       a | b | c
    all_gather, reduce_scatter          rank 0's parts of a, b, c | rank 1's parts of a, b, c | ...

Arrays of one dtype are packed together, in their order, into memory of a fixed size that is symmetric where the node
can share memory; when it is full the operation runs, and packing begins anew. A large array gains nothing from being
packed, and goes by itself. So what is written may share no memory with another array of the list: which of them is read
before the other is written would depend on their sizes. In a broadcast nothing is read on the ranks that write, and
an array may be in the list twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from . import arguments, buffers
from .buffers import Buffer, DeviceBuffer, memory_name
from .partition import even_counts

PACKED_BYTES = 4 << 20  # a batch
_ALONE_BYTES = 1 << 20  # an array that is not packed


@dataclass(frozen=True, slots=True)
class Item:
    """One array of a list.

    whole: as long on every rank.
    own: this rank's part of it, where the operation has such, else None.
    counts: elements of each rank's part; of one part, the whole, where there is none.
    """

    whole: Buffer
    own: Buffer | None
    counts: tuple[int, ...]


def array_name(operation: str, number: int) -> str:
    """The name of an array of a list, for errors."""
    return f"{operation}: array {number} of the list"


def inspect(operation: str, wholes: list[Any], owns: Any, rank: int, ranks: int, *, writable: bool) -> list[Item]:
    """The items of checked arrays. owns: this rank's parts, for all_gather and reduce_scatter.

    writable: whether `wholes` must be, where these have no parts.
    """
    if operation not in ("all_gather", "reduce_scatter"):
        data = [buffers.inspect(array, array_name(operation, i), writable=writable) for i, array in enumerate(wholes)]
        if operation in ("all_reduce", "reduce"):  # on all ranks, also where only the root's is written
            _refuse_shared_memory(operation, data, ())
        return [Item(whole, None, (whole.size,)) for whole in data]
    if not isinstance(owns, list) or len(owns) != len(wholes):
        given = len(owns) if isinstance(owns, list) else type(owns).__name__
        raise ArgumentError(f"{operation}: got a list of {len(wholes)} and {given}; needs two lists of one length")
    items = []
    for number, (array, part) in enumerate(zip(wholes, owns, strict=True)):
        gathers, called = operation == "all_gather", array_name(operation, number)
        whole = buffers.inspect(array, called, writable=gathers)
        own = buffers.inspect(part, called, writable=not gathers)
        counts = even_counts(whole.size, ranks)
        arguments.check_same_dtype(called, own, whole)
        arguments.check_own_part(called, own, counts, rank)
        arguments.refuse_overlap(called, own, whole, counts, rank)
        items.append(Item(whole, own, tuple(counts)))
    larger, parts = [item.whole for item in items], [item.own for item in items if item.own is not None]
    _refuse_shared_memory(operation, *((larger, parts) if operation == "all_gather" else (parts, larger)))
    return items


def _refuse_shared_memory(operation: str, written: Sequence[Buffer], read: Sequence[Buffer]) -> None:
    """Raises ArgumentError if an array that is written shares memory with an array of another item.

    read: the other arrays of the same items, if these have two.
    """
    spans = sorted((*data.span(), number) for number, data in enumerate(written) if data.size)
    pairs = [(one, other) for (_, stop, one), (start, _, other) in pairwise(spans) if start < stop]
    for number, data in enumerate(read):
        first, end = data.span()
        after = bisect_right(spans, first, key=itemgetter(1))  # the first that ends behind the start of this one
        reached = (other for start, _, other in spans[after : after + 2] if start < end and other != number)
        pairs += [(number, other) for other in reached if data.size]
    if pairs:
        one, other = sorted(pairs[0])
        raise ArgumentError(f"{operation}: arrays {one} and {other} of the list share memory; needs separate arrays")


def common_device(operation: str, items: Sequence[Item]) -> int | None:
    """The number of the GPU that all arrays are on; None where all are on the host, or there are none."""
    there = [item.whole for item in items if isinstance(item.whole, DeviceBuffer)]
    if not there:
        return None
    if len(there) < len(items) or any(data.device != there[0].device for data in there):
        found = sorted({memory_name(item.whole) for item in items})
        raise ArgumentTypeError(f"{operation}: got a list of arrays on {', '.join(found)}; needs all in one place")
    return there[0].device


def batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Items that go together; the same on every rank. One with a single item is not worth packing."""
    open_batches: dict[str, list[Item]] = {}
    filled: dict[str, int] = {}
    for item in items:
        if item.whole.nbytes >= _ALONE_BYTES:
            yield [item]
            continue
        name = item.whole.dtype.name
        batch = open_batches.setdefault(name, [])
        filled[name] = filled.get(name, 0) + item.whole.nbytes
        if filled[name] > PACKED_BYTES:
            yield batch
            batch = open_batches[name] = []
            filled[name] = item.whole.nbytes
        batch.append(item)
    yield from open_batches.values()


def arguments_of(
    operation: str, whole: Buffer, own: Buffer | None, root: int, op: Any, counts: Sequence[int]
) -> tuple[Any, ...]:
    """The arguments of an operation, as backends take them, on one item or on packed ones."""
    return {
        "all_reduce": (whole, op),
        "reduce": (whole, root, op),
        "broadcast": (whole, root),
        "reduce_scatter": (own, whole, op, counts),
        "all_gather": (whole, own, counts),
    }[operation]


class Packed:
    """A batch, packed into `memory` (uint8).

    whole, counts: the packed elements, and how many are in each part.
    rank: whose part `own` is, where there are several.
    copy: of a target and a source, both flat views.
    """

    def __init__(
        self, items: Sequence[Item], memory: np.ndarray, rank: int, copy: Callable[..., Any] = np.copyto
    ) -> None:
        self._copy = copy
        dtype = items[0].whole.dtype
        elements = sum(item.whole.size for item in items)
        self.whole = Buffer(memory[: elements * dtype.itemsize].view(dtype.storage), dtype)
        self.counts = [sum(column) for column in zip(*(item.counts for item in items), strict=True)]
        rank = rank if len(self.counts) > 1 else 0
        self._own: list[tuple[slice, slice, Item]] = []  # where in the packed and in the item, by part
        self._pairs: list[tuple[slice, slice, Item]] = []
        place = 0
        starts = [0] * len(items)
        for part in range(len(self.counts)):
            for number, item in enumerate(items):
                size = item.counts[part]
                pair = (slice(place, place + size), slice(starts[number], starts[number] + size), item)
                self._pairs.append(pair)
                if part == rank:
                    self._own.append(pair)
                place += size
                starts[number] += size
        start = sum(self.counts[:rank])
        self.own = self.whole.part(start, start + self.counts[rank]) if len(self.counts) > 1 else self.whole

    def pack(self, operation: str) -> None:
        """Copies in what the operation reads: this rank's parts for an all_gather, else all arrays."""
        if operation == "all_gather":
            for there, _, item in self._own:
                assert item.own is not None
                self._copy(self.whole.flat[there], item.own.flat)
            return
        for there, here, item in self._pairs:
            self._copy(self.whole.flat[there], item.whole.flat[here])

    def unpack(self, operation: str) -> None:
        """Copies out what the operation writes: this rank's parts for a reduce_scatter, else all arrays."""
        if operation == "reduce_scatter":
            for there, _, item in self._own:
                assert item.own is not None
                self._copy(item.own.flat, self.whole.flat[there])
            return
        for there, here, item in self._pairs:
            self._copy(item.whole.flat[here], self.whole.flat[there])
