"""Common elements of two cuts of a tensor, judged by those that numpy finds in both."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from mpidl.checkpoint import cuts
from mpidl.mesh import Cut

CASES = 200


def runs(rng: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    """Some runs of a dimension, in any order; all of it, or none, now and then."""
    if rng.random() < 0.3:
        return ((0, size),)
    edges = sorted(rng.sample(range(size + 1), rng.randint(0, min(size, 6))))
    found = [*zip(edges[::2], edges[1::2], strict=False)]
    if rng.random() < 0.3:
        rng.shuffle(found)
    return tuple(found)


def some_cuts(rng: random.Random, number: int) -> list[Cut]:
    """Cuts of one tensor of up to four dimensions."""
    shape = tuple(rng.randint(rng.random() > 0.1, 6) for _ in range(rng.randint(0, 4)))
    return [Cut(shape, tuple(runs(rng, size) for size in shape)) for _ in range(number)]


def elements(cut: Cut) -> Any:
    """The numbers of the elements, in the order in which the cut has them."""
    whole = np.arange(math.prod(cut.shape)).reshape(cut.shape)
    for dim, of_dim in enumerate(cut.runs):
        indices = [index for start, stop in of_dim for index in range(start, stop)]
        whole = whole.take(np.array(indices, np.int64), dim)
    return whole.reshape(-1)


@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_what_two_cuts_have_in_common_is_found_run_by_run(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(cuts, "RUNS_AT_ONCE", at_once)
    rng = random.Random(at_once)
    for _ in range(CASES):
        one, other = some_cuts(rng, 2)
        other = one if rng.random() < 0.1 else other
        mine, theirs = elements(one), {number: at for at, number in enumerate(elements(other).tolist())}
        low = rng.randint(0, len(mine))
        high = rng.randint(low, len(mine))
        found = [
            (at + step, elsewhere + step)
            for arrays in cuts.common_runs(one, other, low, high)
            for at, elsewhere, length in zip(*(array.tolist() for array in arrays), strict=True)
            for step in range(length)
        ]
        assert found == [(at, theirs[mine[at]]) for at in range(low, high) if mine[at] in theirs], (one, other)


def test_what_is_left_of_a_cut_without_another_is_cuts_in_its_order() -> None:
    rng = random.Random(1)
    for _ in range(CASES):
        one, other = some_cuts(rng, 2)
        mine = elements(one).tolist()
        left = [elements(cut).tolist() for cut in cuts.without(one, other)] if mine else []
        assert sorted(number for some in left for number in some) == sorted({*mine} - {*elements(other).tolist()}), (
            one,
            other,
        )
        assert all([mine.index(number) for number in some] == sorted(map(mine.index, some)) for some in left)


def test_cuts_that_cover_a_tensor_once_are_told_from_others() -> None:
    rng = random.Random(2)
    for _ in range(CASES):
        (one,) = some_cuts(rng, 1)
        if cuts.element_count(one):
            rest = cuts.without(cuts.whole(one.shape), one)
            assert cuts.coverage_problem(one.shape, [one, *rest]) is None
            assert cuts.coverage_problem(one.shape, [one, *rest, one]) == "has cuts that overlap"
            if rest:
                assert "elements" in str(cuts.coverage_problem(one.shape, [one, *rest[1:]]))


def test_plain_cuts_hold_the_same_and_unsound_ones_are_told() -> None:
    rng = random.Random(3)
    for _ in range(CASES):
        (one,) = some_cuts(rng, 1)
        assert cuts.problem_of(one) is None
        assert np.array_equal(elements(cuts.normalised_cut(one)), elements(one))
    assert cuts.normalised_cut(Cut((4,), (((0, 1), (1, 1), (1, 4)),))) is cuts.whole((4,))
    assert cuts.problem_of(Cut((4,), (((0, 2), (1, 3)),))) == "has runs of dimension 0 that overlap"
    assert cuts.problem_of(Cut((4, 4), (((0, 4),), ((-1, 2),)))) == "has runs outside the 4 indices of dimension 1"


def test_a_large_weight_takes_little_memory_at_a_time() -> None:
    """Each of the million rows of a weight is a run of its own."""
    column = Cut.along((1 << 20, 2), 1, [(0, 1)])
    sizes = [len(at) for at, _, _ in cuts.common_runs(column, cuts.whole(column.shape), 0, cuts.element_count(column))]
    assert sum(sizes) == 1 << 20
    assert max(sizes) <= 1 << 16
