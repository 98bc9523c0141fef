"""Cuts: which elements of a whole parameter a rank holds."""

import copy
import pickle

import pytest
import torch

import mpidl
from mpidl.mesh import Cut, place, placement


def test_a_cut_takes_its_runs_in_their_order() -> None:
    whole = torch.arange(2 * 12).view(2, 12)
    cut = Cut.along(whole.shape, 1, [(0, 2), (4, 6), (8, 10)])
    part = cut.of(whole)
    assert cut.part_shape == tuple(part.shape) == (2, 6)
    assert part.tolist() == [[0, 1, 4, 5, 8, 9], [12, 13, 16, 17, 20, 21]]


def test_a_cut_of_two_dimensions_is_their_product() -> None:
    whole = torch.arange(24).view(4, 3, 2)
    cut = Cut((4, 3, 2), (((1, 3),), ((0, 1), (2, 3)), ((0, 2),)))
    assert torch.equal(cut.of(whole), whole[1:3][:, [0, 2]])


def test_a_part_shares_no_memory_with_the_whole() -> None:
    whole = torch.zeros(4, 3)
    for cut in (Cut.along(whole.shape, 0, [(0, 4)]), Cut.along(whole.shape, 0, [(1, 2)])):
        cut.of(whole).fill_(1.0)
    assert not whole.any()


def test_a_placement_keeps_its_cut_in_copies() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 3))
    cut = Cut.along((4, 3), 0, [(2, 4)])
    place(p, "tp", cut=cut)
    for other in (p, copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert placement(other).cut == cut


def test_a_cut_of_another_shape_is_refused() -> None:
    with pytest.raises(mpidl.ConfigurationError, match=r"\(1, 3\).*\(2, 3\)"):
        place(torch.nn.Parameter(torch.zeros(2, 3)), "tp", cut=Cut.along((4, 3), 0, [(3, 4)]))
