"""The chunks of a staged operation: what of an array goes to the host, what the host does, what comes back.

    GPU    x    | . . a a a | . . b b b |            a Chunk's gives: pieces of x, each to its offset in host memory
                      |           |
    host        | a a a | b b b | . . . |            the host's operation, on parts of that memory
                      |
    GPU    out        | a a a |                      its takes: pieces of host memory, each to its offset in out

Every rank cuts an operation into as many chunks. A chunk is the n-th piece of every rank's part, so that each of the
host's operations is of the same kind as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ...base.buffers import Buffer
from ...base.partition import Range, Splits, nth_pieces, ranges

IN_PLACE = ("all_reduce", "scan", "exscan", "reduce", "broadcast")  # on one array


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Elements first <= i < last of an array on the GPU, and where in the host's memory they begin."""

    first: int
    last: int
    place: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of the host's operations.

    x, out: where in the host's memory its arrays lie.
    counts: elements of each rank's part, or of what is sent to each rank.
    arriving: of what comes from each.
    elements: of its larger array, the same on all ranks.
    """

    gives: tuple[CopyPiece, ...]
    takes: tuple[CopyPiece, ...]
    x: Range | None
    out: Range | None
    elements: int
    counts: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """All chunks. own: elements of x that stay on this GPU, and where in out they go: (first, last, place)."""

    chunks: tuple[Chunk, ...]
    own: tuple[int, int, int] | None = None


def whole(size: int, room: int, *, gives: bool = True, takes: bool = True) -> StagingPlan:
    """Cuts an operation of IN_PLACE, on arrays of one size.

    room: elements that the host's memory has place for.
    """
    chunks = []
    for first in range(0, max(size, 1), room):
        last = min(first + room, size)
        piece = (CopyPiece(first, last, 0),)
        given, taken = piece if gives else (), piece if takes else ()
        chunks.append(Chunk(given, taken, (0, last - first), None, last - first))
    return StagingPlan(tuple(chunks))


def reduce_scatter(rank: int, counts: Sequence[int], room: int) -> StagingPlan:
    """Cuts a reduce_scatter; the host's result overwrites its own part."""
    chunks = []
    for parts in chunk_ranges(counts, room):
        places = _starts(parts)
        own = CopyPiece(parts[rank][0] - sum(counts[:rank]), parts[rank][1] - sum(counts[:rank]), places[rank])
        gives = tuple(CopyPiece(*part, place) for part, place in zip(parts, places, strict=False))
        out = (places[rank], places[rank + 1])
        chunks.append(Chunk(gives, (own,), (0, places[-1]), out, places[-1], _sizes(parts)))
    return StagingPlan(tuple(chunks))


def all_gather(rank: int, counts: Sequence[int], room: int) -> StagingPlan:
    """Cuts an all_gather; the GPU copies its own part directly."""
    chunks = []
    start = sum(counts[:rank])
    for parts in chunk_ranges(counts, room):
        places = _starts(parts)
        own = CopyPiece(parts[rank][0] - start, parts[rank][1] - start, places[rank])
        chunks.append(
            Chunk((own,), _others(parts, places, rank), (places[rank], places[rank + 1]), (0, places[-1]), places[-1],
                  _sizes(parts))
        )  # fmt: skip
    return StagingPlan(tuple(chunks), (0, counts[rank], start))


def gather(rank: int, root: int, counts: Sequence[int], room: int) -> StagingPlan:
    """Cuts a gather: as `all_gather`, to the root alone."""
    if rank == root:
        found = all_gather(rank, counts, room)
        chunks = (Chunk((), c.takes, c.x, c.out, c.elements, c.counts) for c in found.chunks)
        return StagingPlan(tuple(chunks), found.own)
    return StagingPlan(tuple(_alone(rank, counts, room, gives=True)))


def scatter(rank: int, root: int, counts: Sequence[int], room: int) -> StagingPlan:
    """Cuts a scatter from the root."""
    if rank == root:
        made = []
        for parts in chunk_ranges(counts, room):
            places = _starts(parts)
            own = (places[rank], places[rank + 1])
            made.append(Chunk(_others(parts, places, rank), (), (0, places[-1]), own, places[-1], _sizes(parts)))
        start = sum(counts[:rank])
        return StagingPlan(tuple(made), (start, start + counts[rank], 0))
    return StagingPlan(tuple(_alone(rank, counts, room, gives=False)))


def all_to_all(splits: Splits, largest: int, room: int) -> StagingPlan:
    """Cuts an all_to_all.

    largest: elements of the largest part that any rank gives to any.
    """
    chunks = []
    size = max(1, room // 2 // len(splits.send_counts))
    both = ranges(splits.send_counts), ranges(splits.recv_counts)
    for number in range(max(1, -(-largest // size))):
        leaving, arriving = (nth_pieces(parts, number, size) for parts in both)
        send_starts, recv_starts = _starts(leaving), _starts(arriving, room // 2)
        gives = tuple(CopyPiece(*part, place) for part, place in zip(leaving, send_starts, strict=False))
        takes = tuple(CopyPiece(*part, place) for part, place in zip(arriving, recv_starts, strict=False))
        out = (recv_starts[0], recv_starts[-1])
        chunks.append(
            Chunk(gives, takes, (0, send_starts[-1]), out, send_starts[-1], _sizes(leaving), _sizes(arriving))
        )
    return StagingPlan(tuple(chunks))


def plan(operation: str, rank: int, room: int, arguments: Sequence[Any], largest: int = 0) -> StagingPlan:
    """The plan of an operation.

    arguments: as `Backend` has them.
    largest: see `all_to_all`.
    """
    if operation in ("all_reduce", "scan", "exscan"):
        return whole(arguments[0].size, room)
    if operation == "reduce":
        return whole(arguments[0].size, room, takes=rank == arguments[1])
    if operation == "broadcast":
        return whole(arguments[0].size, room, gives=rank == arguments[1], takes=rank != arguments[1])
    if operation == "reduce_scatter":
        return reduce_scatter(rank, arguments[3], room)
    if operation == "all_gather":
        return all_gather(rank, arguments[2], room)
    if operation == "all_to_all":
        return all_to_all(arguments[2], largest, room)
    return (gather if operation == "gather" else scatter)(rank, arguments[2], arguments[3], room)


def on_host(operation: str, chunk: Chunk, memory: Buffer, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the host's operation on a chunk in its memory."""
    x, out = _part(memory, chunk.x), _part(memory, chunk.out)
    if operation in IN_PLACE:
        return (x, *arguments[1:])
    if operation == "reduce_scatter":
        return out, x, arguments[2], chunk.counts
    if operation == "all_gather":
        return out, x, chunk.counts
    if operation == "all_to_all":
        even = arguments[2].uniform and len(set(chunk.counts)) == 1
        return out, x, Splits(chunk.counts, chunk.arriving, even)
    return out, x, arguments[2], chunk.counts


def _part(memory: Buffer, place: Range | None) -> Buffer | None:
    """Returns a part of the memory. An empty part is an array of its own, as its address must not be another's."""
    if place is None:
        return None
    return memory.part(*place) if place[1] > place[0] else Buffer(np.empty(0, memory.flat.dtype), memory.dtype)


def _alone(rank: int, counts: Sequence[int], room: int, *, gives: bool) -> list[Chunk]:
    """The chunks of a rank that gives its part to the root, or takes it from there."""
    chunks = []
    for parts in chunk_ranges(counts, room):
        (first, last), start = parts[rank], sum(counts[:rank])
        piece, here = (CopyPiece(first - start, last - start, 0),), (0, last - first)
        elements = sum(_sizes(parts))
        if gives:
            chunks.append(Chunk(piece, (), here, None, elements, _sizes(parts)))
        else:
            chunks.append(Chunk((), piece, None, here, elements, _sizes(parts)))
    return chunks


def chunk_ranges(counts: Sequence[int], room: int) -> list[list[Range]]:
    """The range of every rank's part, for each chunk; as many chunks on all ranks."""
    parts, size = ranges(counts), max(1, room // len(counts))
    return [nth_pieces(parts, number, size) for number in range(max(1, -(-max(counts) // size)))]


def _starts(parts: Sequence[Range], first: int = 0) -> tuple[int, ...]:
    """The starts of ranges that are packed one behind the other, and the end."""
    return tuple(accumulate(_sizes(parts), initial=first))


def _sizes(parts: Sequence[Range]) -> tuple[int, ...]:
    return tuple(last - first for first, last in parts)


def _others(parts: Sequence[Range], places: Sequence[int], rank: int) -> tuple[CopyPiece, ...]:
    return tuple(CopyPiece(*parts[peer], places[peer]) for peer in range(len(parts)) if peer != rank)
