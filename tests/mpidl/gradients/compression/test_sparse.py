"""Top-k and random-k against their formulas in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.randomk import RandomK
from mpidl.gradients.compression.topk import TopK, largest_indices
from tests.mpidl.gradients.compression.methods import contribution, exchange_over, reduce_section

ELEMENTS = 1201  # pieces of different sizes


@pytest.mark.mpi
@pytest.mark.parametrize("needs_all", [True, False])
@pytest.mark.parametrize("fraction", [0.02, 0.7])
def test_top_k_follows_the_formula(comm: Communicator, fraction: float, needs_all: bool) -> None:
    """Three steps; also where owners send dense sums back."""
    compressor = TopK(fraction)
    exchange = exchange_over(comm, compressor)
    edges = [number * ELEMENTS // comm.size for number in range(comm.size + 1)]
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    errors = [np.zeros(ELEMENTS) for _ in range(comm.size)]
    values = torch.zeros(ELEMENTS)
    for step in range(3):
        values += contribution(comm.rank, ELEMENTS, step)
        mean = np.zeros(ELEMENTS)
        for rank in range(comm.size):
            fed_back = errors[rank] + contribution(rank, ELEMENTS, step).double().numpy()
            for start, stop in pairwise(edges):
                indices = start + np.argsort(-np.abs(fed_back[start:stop]))[: math.ceil(fraction * (stop - start))]
                mean[indices] += fed_back[indices] / comm.size
                fed_back[indices] = 0
            errors[rank] = fed_back
        found = reduce_section(compressor, comm, values, needs_all=needs_all, step=step, exchange=exchange)
        np.testing.assert_allclose(found.double().numpy(), mean if needs_all else mean[own], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values.double().numpy(), errors[comm.rank], rtol=1e-4, atol=1e-4)


@pytest.mark.mpi
@pytest.mark.parametrize("needs_all", [True, False])
def test_random_k_sends_the_indices_of_the_step(comm: Communicator, needs_all: bool) -> None:
    compressor = RandomK(0.1)
    edges = [number * ELEMENTS // comm.size for number in range(comm.size + 1)]
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    for step in (0, 1):
        values, expected = contribution(comm.rank, ELEMENTS, step), np.zeros(ELEMENTS)
        indices = compressor.indices(ELEMENTS, step).numpy()
        for rank in range(comm.size):
            expected[indices] += contribution(rank, ELEMENTS, step).double().numpy()[indices] / comm.size
        found = reduce_section(compressor, comm, values, needs_all=needs_all, step=step)
        expected = expected if needs_all else expected[own]
        np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-4, atol=1e-4)
        remaining = contribution(comm.rank, ELEMENTS, step)
        remaining[indices] = 0
        assert torch.equal(values, remaining)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["topk:0.01", "topk:1", "randomk:0.01", "randomk:1"])
def test_sections_of_one_element_or_none(comm: Communicator, method: str) -> None:
    """A node's rank may have no part of a small bucket."""
    compressor = Compression(method).compressor()
    exchange = exchange_over(comm, compressor)
    for elements in (0, 1):
        for needs_all in (True, False):
            values = torch.full((elements,), 3.0 + comm.rank)
            found = reduce_section(compressor, comm, values, needs_all=needs_all, exchange=exchange)
            assert not values.any()
            torch.testing.assert_close(found, torch.full_like(found, 3 + (comm.size - 1) / 2))


def test_random_indices_are_all_different_and_reach_every_element() -> None:
    compressor, reached = RandomK(0.1), torch.zeros(1003, dtype=torch.int64)
    for step in range(400):
        indices = compressor.indices(1003, step)
        assert len(indices.unique()) == len(indices) == math.ceil(100.3)
        reached[indices] += 1
    assert reached.min() > 10
    assert reached.max() < 90
    assert torch.equal(RandomK(1.0).indices(1003, 5), torch.arange(1003))


@pytest.mark.parametrize("elements", [10, 40_000, 300_001])
@pytest.mark.parametrize("kind", ["normal", "zeros", "few", "equal", "infinite"])
def test_the_indices_are_those_of_the_largest_values(elements: int, kind: str) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    if kind in ("zeros", "few", "equal"):
        values = values * 0 + (kind == "equal")
    if kind == "few":
        values[torch.arange(0, elements, 7)[:5]] = -3.0
    if kind == "infinite":
        values[0], values[-1] = -math.inf, math.nan
    sizes = values.abs().nan_to_num(math.inf, math.inf)
    for count in (1, math.ceil(elements / 100), elements):
        indices = largest_indices(values, count)
        assert len(indices.unique()) == count
        assert torch.equal(sizes[indices].sort(descending=True).values, sizes.sort(descending=True).values[:count])


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["topk:0.01", "topk:0.9", "randomk:0.01"])
def test_what_is_not_finite_is_seen_on_every_rank_and_leaves_no_trace(comm: Communicator, method: str) -> None:
    """More of it than is sent."""
    values = contribution(comm.rank, 2000)
    if comm.rank == comm.size - 1:
        values[33:99] = math.inf
        values[50] = math.nan
    mean = reduce_section(Compression(method).compressor(), comm, values)
    assert not torch.isfinite(mean).all()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("name", ["topk", "randomk"])
@pytest.mark.parametrize("given", ["0", "1.5", "-1", "few", "nan", ""])
def test_wrong_settings_are_refused(name: str, given: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=f"fraction '{given}'"):
        Compression(f"{name}:{given}")
    with pytest.raises(mpidl.ConfigurationError, match="'fast'; needs"):
        Compression(f"{name}:0.1,fast")
