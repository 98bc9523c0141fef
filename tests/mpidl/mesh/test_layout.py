"""Layouts place ranks: every rank once, tp inside nodes where it fits, ep a part of dp x cp."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from mpidl import UsageError
from mpidl.mesh import AXES, EXPERT_AXES, Layout

NODES = {
    "one": [0] * 12,
    "even": [0] * 6 + [1] * 6,
    "threes": [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3,
    "uneven": [0] * 3 + [1] * 4 + [2] * 5,
    "round robin": [0, 1, 2] * 4,
    "alone": list(range(12)),
    "first has one": [7] + [3] * 11,
}
SHAPES = [shape for shape in product((1, 2, 3, 4, 6, 12), repeat=4) if np.prod(shape) == 12]


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_every_rank_has_one_place_and_groups_agree_with_coordinates(nodes: list[int]) -> None:
    for pp, dp, cp, tp in SHAPES:
        for ep in (n for n in range(1, 13) if dp * cp % n == 0):
            layout = Layout.of(nodes, dp=dp, pp=pp, tp=tp, cp=cp, ep=ep)
            places = [layout.coordinates(rank) for rank in range(12)]
            for frame in (AXES, EXPERT_AXES):
                assert len({tuple(place[axis] for axis in frame) for place in places}) == 12
                assert np.prod([layout.size(axis) for axis in frame]) == 12
                for axes in [(frame[0],), (frame[1],), frame[1:3], (frame[2], frame[3]), (frame[0], frame[3]), frame]:
                    groups = layout.groups(*axes)
                    assert sorted(rank for group in groups for rank in group) == list(range(12))
                    for group in groups:
                        assert len(group) == layout.size(*axes)
                        assert [layout.rank_along(rank, *axes) for rank in group] == list(range(len(group)))
                        others = [axis for axis in frame if axis not in axes]
                        assert len({tuple(places[rank][axis] for axis in others) for rank in group}) == 1
            assert set(places[0].values()) == {0}
            if ep > 1:
                parts = [set(group) for group in layout.groups("dp", "cp")]
                assert all(any(set(group) <= part for part in parts) for group in layout.groups("ep"))
                assert layout.edp * ep == dp * cp


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("tp", [2, 3, 4, 6])
def test_as_many_tp_groups_lie_inside_nodes_as_can(nodes: list[int], tp: int) -> None:
    layout = Layout.of(nodes, tp=tp)
    inside = sum(nodes.count(node) // tp for node in set(nodes))
    assert len(layout.across_nodes("tp")) == 12 // tp - inside


def test_ranks_that_are_numbered_node_by_node_are_placed_in_their_order() -> None:
    for pp, dp, cp, tp in SHAPES:
        for size in (1, 2, 3, 4, 6, 12):
            blocks = (tp, tp * cp, tp * cp * dp)
            if all(size % block == 0 or block % size == 0 for block in blocks):
                layout = Layout.of([rank // size for rank in range(12)], dp=dp, pp=pp, cp=cp, tp=tp)
                assert layout.ranks == tuple(range(12)), (pp, dp, cp, tp, size)


def test_tp_is_innermost_and_pp_outermost() -> None:
    layout = Layout.of([0] * 16, pp=2, cp=2, tp=2, ep=2)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.group(0, "tp") == (0, 1)
    assert layout.group(0, "cp") == layout.group(0, "ep") == (0, 2)
    assert layout.group(0, "dp") == layout.group(0, "edp") == (0, 4)
    assert layout.group(0, "pp") == (0, 8)
    assert layout.group(5, "cp", "dp") == (1, 3, 5, 7)
    assert layout.coordinates(13) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1, "edp": 1, "ep": 0}


def test_ranks_that_are_dealt_to_nodes_in_turn_get_tp_groups_inside_nodes() -> None:
    layout = Layout.of([0, 1] * 4, tp=2)
    assert layout.groups("tp") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert not layout.across_nodes("tp")
    assert Layout.of([0, 1] * 4).ranks == tuple(range(8))  # one axis: as the world is


@pytest.mark.parametrize(
    ("sizes", "inside"),
    [
        ({"dp": 4, "ep": 2}, "ep"),
        ({"dp": 1, "cp": 4, "ep": 2}, "ep"),
        ({"dp": 2, "cp": 2, "ep": 2}, "cp"),
        ({"dp": 2, "cp": 2, "ep": 4}, "cp"),
    ],
    ids=str,
)
def test_ranks_that_are_dealt_to_nodes_in_turn_get_other_groups_inside_nodes_too(
    sizes: dict[str, int], inside: str
) -> None:
    """Also where one axis has all ranks, and ep is shorter or has others within it."""
    assert Layout.of([0, 1, 0, 1], **sizes).groups(inside) == [(0, 2), (1, 3)]
    assert Layout.of([0, 1, 0, 1], dp=4, ep=4).ranks == (0, 1, 2, 3)


def test_only_what_no_node_has_whole_crosses_nodes() -> None:
    layout = Layout.of([0, 0, 0, 1, 1, 1], tp=2)
    assert layout.groups("tp") == [(0, 1), (2, 5), (3, 4)]
    assert layout.across_nodes("tp") == [(2, 5)]


def test_what_the_others_leave() -> None:
    assert Layout.of([0] * 12, pp=3).dp == 4
    assert Layout.of([0] * 12, dp=2, pp=1, tp=-1).tp == 6
    assert Layout.of([0] * 12, dp=np.int64(6), cp=2, ep=-1).ep == 12
    assert Layout.of([0]).sizes == {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "edp": 1, "ep": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 5}, r"got pp=1, dp=-1, cp=1, tp=5, ep=1 on 12 ranks; needs the others to divide 12"),
        ({"dp": 2, "tp": 2}, r"got pp=1, dp=2, cp=1, tp=2, ep=1 on 12 ranks; needs pp \* dp \* cp \* tp = 12"),
        ({"dp": 24}, r"needs pp \* dp \* cp \* tp = 12"),
        ({"tp": -1}, r"got .*dp=-1.*tp=-1.*; needs -1 on one axis at most, and dp is -1 unless it is given"),
        ({"tp": 0}, r"got tp=0; needs an integer of at least 1, or -1"),
        ({"tp": -2}, r"got tp=-2; needs an integer"),
        ({"pp": 2.0}, r"got pp=2.0; needs an integer"),
        ({"pp": True}, r"got pp=True; needs an integer"),
        ({"cp": "2"}, r"got cp='2'; needs an integer"),
        ({"dp": None}, r"got dp=None; needs an integer"),
        ({"tp": 2, "ep": 4}, r"got .*ep=4 on 12 ranks; needs an ep that divides dp \* cp = 6"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Layout.of([0] * 12, **sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("axes", [("xp",), ("dp", "dp"), ("dp", "ep"), ("cp", "edp"), (), (("dp", "cp"),)])
def test_axes_that_are_no_product_are_refused(axes: tuple[str, ...]) -> None:
    layout = Layout.of([0] * 4)
    for ask in (layout.size, layout.groups, lambda *given: layout.rank_along(0, *given)):
        with pytest.raises(UsageError, match="Mesh: got ax"):
            ask(*axes)
