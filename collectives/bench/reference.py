"""Inputs that every rank can compute for all ranks, and what has to come out of them, in float64 by numpy.

Inputs are whole numbers so small that any order of reduction gives the same in every element type; they depend on the
rank, the index and the iteration, so that data that is not moved, or to a wrong index, is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .operations import Case

_CHUNK = 1 << 20  # elements that are compared at once
_LARGEST_SUM = 127  # that every type holds
_TWOS = 6  # ranks that may give a 2 to a product: 64 is in every type
Array = np.ndarray[Any, Any]


def contribution(op: str, rank: Array | int, index: Array, ranks: int, iteration: int) -> Array:
    """A rank's input at these indices of its array, for an operator or "none"; float64."""
    number = index.astype(np.uint64) + np.uint64(977) * np.asarray(rank, np.uint64) + np.uint64(131 * iteration + 1)
    mixed = number * np.uint64(2654435761)
    bits = (mixed >> np.uint64(13)) & np.uint64(0xFFFF)
    if op == "prod":
        return np.where((bits % 3 == 0) & (np.asarray(rank) < _TWOS), 2.0, 1.0)
    limit = max(1, _LARGEST_SUM // ranks) if op in ("sum", "avg") else _LARGEST_SUM
    found: Array = (bits % np.uint64(limit + 1)).astype(np.float64)
    return found


def fill(x: torch.Tensor, case: Case, rank: int, ranks: int, iteration: int) -> None:
    """Sets x to a rank's input."""
    for start in range(0, x.numel(), _CHUNK):
        some = x[start : start + _CHUNK]
        index = np.arange(start, start + some.numel())
        some.copy_(torch.from_numpy(contribution(case.op, rank, index, ranks, iteration)))


def expected(case: Case, index: Array, part: int, rank: int, ranks: int, iteration: int) -> Array | None:
    """The values of a rank's result at these indices, float64; None where the operation leaves it open.

    part: elements of a rank's part.
    """
    name = case.operation.name

    def given(by: Array | int, at: Array) -> Array:
        return contribution(case.op, by, at, ranks, iteration)

    if name in ("reduce", "gather") and rank != case.root:
        return None
    if name in ("all_gather", "gather"):
        return given(index // part, index % part)
    if name == "all_to_all":
        return given(index // part, rank * part + index % part)
    if name == "broadcast":
        return given(case.root, index)
    if name == "scatter":
        return given(case.root, rank * part + index)
    at = rank * part + index if name == "reduce_scatter" else index
    of = range({"scan": rank + 1, "exscan": rank}.get(name, ranks))
    if not of:
        return None  # MPI leaves open what the first rank of an exscan has
    combine = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(case.op, np.add)
    total = given(0, at)
    for other in of[1:]:
        total = combine(total, given(other, at))
    return total / ranks if case.op == "avg" else total


def wrong_elements(result: torch.Tensor, case: Case, part: int, rank: int, ranks: int, iteration: int) -> int:
    """Counts the elements of a result that are not what they have to be.

    An average, and a sum over so many ranks that a type no longer holds it, may be off by two units in the last place.
    """
    kind = result.dtype
    exact = case.op != "avg" and ranks <= _LARGEST_SUM
    tolerance = 0.0 if exact or not kind.is_floating_point else 2 * torch.finfo(kind).eps
    wrong = 0
    for start in range(0, result.numel(), _CHUNK):
        some = result[start : start + _CHUNK]
        want = expected(case, np.arange(start, start + some.numel()), part, rank, ranks, iteration)
        if want is None:
            continue
        if not kind.is_floating_point:
            want = torch.from_numpy(want.astype(np.int64)).to(kind).double().numpy()  # wraps as the type does
        found = some.double().cpu().numpy()
        wrong += int(np.count_nonzero(~(np.abs(found - want) <= tolerance * np.abs(want))))
    return wrong
