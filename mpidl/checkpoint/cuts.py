"""Elements that two cuts of one tensor have in common, and the indices at which each has them.

    whole      [ 0 1 2 3 4 5 6 7 8 ]
    one        [ 0 1 2     6 7 8 ]      runs (0, 3), (6, 9); its own elements are 0..6
    another    [     2 3 4 5 6 ]        runs (2, 7);         its own elements are 0..5
    in common        2       6          at 2 and 3 of the one, at 0 and 4 of the other

A cut is the product of the runs of its dimensions, so what two have in common is the product of what their runs have
in common, dimension by dimension. Trailing dimensions that both hold equally are contiguous in both: what is left are
runs of elements, computed for many rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..mesh.placement import Cut, Run

Runs = tuple[Run, ...]
RUNS_AT_ONCE = 1 << 16  # runs of elements in memory
_FEW = 1 << 8  # runs whose comparison is remembered
MOST_CELLS = 1 << 24  # into which the edges of all cuts of a tensor may divide it


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Cut:
    """Returns the cut that is all of a tensor."""
    return Cut(shape, tuple(((0, size),) for size in shape))


def element_count(cut: Cut) -> int:
    """Number of elements of a cut."""
    return math.prod(cut.part_shape)


def problem_of(cut: Cut) -> str | None:
    """Explains the first runs of a cut that are none, or overlap; None if all are sound."""
    if len(cut.runs) != len(cut.shape):
        return f"has runs of {len(cut.runs)} dimensions, and the shape {cut.shape}"
    for dim, (runs, size) in enumerate(zip(cut.runs, cut.shape, strict=True)):
        ordered = sorted(runs)
        if any(not 0 <= start <= stop <= size for start, stop in ordered):
            return f"has runs outside the {size} indices of dimension {dim}"
        if any(stop > start for (_, stop), (start, _) in pairwise(run for run in ordered if run[0] < run[1])):
            return f"has runs of dimension {dim} that overlap"
    return None


def normalised_cut(cut: Cut) -> Cut:
    """Returns the same cut without empty runs, and with runs joined that follow one another."""
    joined = []
    for runs in cut.runs:
        kept: list[Run] = []
        for start, stop in runs:
            if kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            elif start < stop:
                kept.append((start, stop))
        joined.append(tuple(kept))
    made = Cut(tuple(cut.shape), tuple(joined))
    return whole(made.shape) if all(r == ((0, n),) or n == 0 for r, n in zip(joined, made.shape, strict=True)) else made


def common_runs(one: Cut, other: Cut, low: int, high: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the elements low..high of the flattened `one` that `other` holds too, as runs of elements.

    Three arrays at a time: where the runs begin in the flattened `one`, where in `other`, and their lengths; ascending
    in `one`.
    """
    if one == other and low < high:
        yield np.array([low]), np.array([low]), np.array([high - low])
        return
    shared = [_in_common(*runs) for runs in zip(one.runs, other.runs, strict=True)]
    if low >= high or any(not len(table) for table in shared):
        return
    sizes, others = one.part_shape, other.part_shape
    dim, inner = len(sizes), 1
    while dim and len(shared[dim - 1]) == 1 and shared[dim - 1][0, 2] == sizes[dim - 1] == others[dim - 1]:
        dim -= 1
        inner *= sizes[dim]
    row = shared[dim - 1] * inner if dim else np.array([[0, 0, inner]], np.int64)
    outer = [_expanded(table) for table in shared[: max(dim - 1, 0)]]
    strides = _strides(sizes), _strides(others)
    lengths = [len(index) for index, _ in outer]
    first = _row_at(low, sizes, [index for index, _ in outer])
    last = min(_row_at(high - 1, sizes, [index for index, _ in outer]) + 1, math.prod(lengths))
    step = max(1, RUNS_AT_ONCE // len(row))
    for begin in range(first, last, step):
        rows = np.arange(begin, min(begin + step, last))
        places = np.unravel_index(rows, lengths) if outer else ()
        starts = []
        for side in (0, 1):
            offsets = np.zeros(len(rows), np.int64)
            for number, place in enumerate(places):
                offsets += outer[number][side][place] * strides[side][number]
            starts.append((offsets[:, None] + row[:, side]).ravel())
        at, elsewhere = starts
        stop = np.minimum(at + np.tile(row[:, 2], len(rows)), high)
        start = np.maximum(at, low)
        kept = start < stop
        yield start[kept], (elsewhere + start - at)[kept], (stop - start)[kept]


def _in_common(one: Runs, other: Runs) -> Any:
    """Returns rows of (place in the first, place in the second, length), ascending in the first, joined if they can."""
    return (_intersect_runs_cached if len(one) + len(other) <= _FEW else _intersect_runs)(one, other)


def _intersect_runs(one: Runs, other: Runs) -> Any:
    a, b = _table(one), _table(other)
    b = b[np.argsort(b[:, 0], kind="stable")]
    first = np.searchsorted(b[:, 1], a[:, 0], "right")
    number = np.maximum(np.searchsorted(b[:, 0], a[:, 1], "left") - first, 0)
    own_index = np.repeat(np.arange(len(a)), number)
    other_index = np.arange(len(own_index)) - np.repeat(np.cumsum(number) - number, number) + np.repeat(first, number)
    a, b = a[own_index], b[other_index]
    start, stop = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
    found = np.stack([a[:, 2] + start - a[:, 0], b[:, 2] + start - b[:, 0], stop - start], 1)
    goes_on = (found[1:, :2] == found[:-1, :2] + found[:-1, 2:]).all(1)
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on])) if len(found) else np.zeros(0, np.int64)
    lengths = np.add.reduceat(found[:, 2], begins) if len(found) else found[:, 2]
    return np.stack([found[begins, 0], found[begins, 1], lengths], 1)


# Layers have the same runs, and states those of their parameters.
_intersect_runs_cached = lru_cache(maxsize=4096)(_intersect_runs)


def _table(runs: Runs) -> Any:
    """Rows of (start, stop, place in the part), of runs that are not empty."""
    table = np.array(runs, np.int64).reshape(-1, 2)
    table = table[table[:, 0] < table[:, 1]]
    lengths = table[:, 1] - table[:, 0]
    return np.concatenate([table, (np.cumsum(lengths) - lengths)[:, None]], 1)


def _expanded(table: Any) -> tuple[Any, Any]:
    """Returns the places of every single index in the one and in the other."""
    return places(table[:, 0], table[:, 2]), places(table[:, 1], table[:, 2])


def places(starts: Any, lengths: Any) -> Any:
    """Returns the place of every single element of runs of elements."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _row_at(element: int, sizes: Sequence[int], outer: Sequence[Any]) -> int:
    """Returns the number of the row in common that holds an element, or of the next one. outer: indices in common."""
    found, rows = 0, math.prod(len(index) for index in outer)
    for stride, index in zip(_strides(sizes), outer, strict=False):
        rows //= len(index)
        wanted, element = divmod(element, stride)
        place = int(np.searchsorted(index, wanted))
        found += place * rows
        if place == len(index) or index[place] != wanted:
            break
    return found


def without(cut: Cut, other: Cut) -> list[Cut]:
    """Returns cuts that together are what `cut` holds and `other` does not, in the order of `cut`."""
    if any(not len(_in_common(*runs)) for runs in zip(cut.runs, other.runs, strict=True)):
        return [cut]
    remaining = []
    runs = list(cut.runs)
    for dim, other_runs in enumerate(other.runs):
        in_both, in_one = _divided(runs[dim], other_runs)
        if in_one:
            remaining.append(Cut(cut.shape, (*runs[:dim], in_one, *runs[dim + 1 :])))
        runs[dim] = in_both
    return remaining


def _divided(runs: Runs, by: Runs) -> tuple[Runs, Runs]:
    """Divides runs into what `by` holds too and what it does not."""
    edges = np.unique(np.array(by, np.int64))
    ordered = _table(by)
    ordered = ordered[np.argsort(ordered[:, 0])]
    in_both: list[Run] = []
    in_one: list[Run] = []
    for start, stop in runs:
        inside = edges[(edges > start) & (edges < stop)].tolist()
        for first, last in pairwise([start, *inside, stop]):
            number = int(np.searchsorted(ordered[:, 0], first, "right")) - 1
            (in_both if number >= 0 and first < ordered[number, 1] else in_one).append((first, last))
    shape = (max(stop for _, stop in runs),)
    return normalised_cut(Cut(shape, (tuple(in_both),))).runs[0], normalised_cut(Cut(shape, (tuple(in_one),))).runs[0]


def coverage_problem(shape: tuple[int, ...], cuts: Sequence[Cut]) -> str | None:
    """Explains why cuts, each sound, do not cover a tensor exactly once; None if they do.

    The edges of all cuts divide the tensor into cells, of which no two cuts may have the same.
    """
    held, size = sum(map(element_count, cuts)), math.prod(shape)
    tables = [[_table(cut.runs[dim]) for cut in cuts] for dim in range(len(shape))]
    edges = [np.unique(np.concatenate([table[:, :2].ravel() for table in of_dim])) for of_dim in tables]
    dims = [dim for dim, edge in enumerate(edges) if len(edge) > 2]
    cells = [len(edges[dim]) - 1 for dim in dims]
    if math.prod(cells) > MOST_CELLS:
        return f"is cut into more than {MOST_CELLS} pieces"
    covered = np.zeros(cells, np.bool_)
    for number in range(len(cuts)):
        inside = []
        for dim in dims:
            spans = np.searchsorted(edges[dim], tables[dim][number][:, :2])
            inside.append(_expanded(np.stack([spans[:, 0], spans[:, 0], spans[:, 1] - spans[:, 0]], 1))[0])
        at = np.ix_(*inside)
        if covered[at].any():
            return "has cuts that overlap"
        covered[at] = True
    return None if held == size else f"has cuts of {held} of its {size} elements"
