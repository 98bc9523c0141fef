"""Count sketches against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.sketch import CountSketch, Hashes
from tests.mpidl.gradients.compression.methods import contribution, exchange_over, reduce_section

ELEMENTS = 601


def tables(hashes: Hashes) -> tuple[np.ndarray, np.ndarray]:
    """Column and sign of each element in each row, as sketches tell them of chunks that count their elements."""
    rows, width = hashes.signs.shape[0], hashes.columns
    columns, signs = np.zeros((rows, hashes.elements), np.int64), np.zeros((rows, hashes.elements))
    for start in range(0, hashes.elements, width):
        size = min(width, hashes.elements - start)
        values = torch.zeros(hashes.elements)
        values[start : start + size] = torch.arange(1.0, size + 1)
        for row, made in enumerate(hashes.sketch(values).numpy()):
            (found,) = made.nonzero()
            assert sorted(np.abs(made[found])) == list(range(1, size + 1)), "no two of a chunk meet"
            columns[row, start + np.abs(made[found]).astype(int) - 1] = found
        signs[:, start : start + size] = np.sign(
            np.take_along_axis(hashes.sketch(values).numpy(), columns[:, start : start + size], 1)
        )
    return columns, signs


def sketched(values: np.ndarray, columns: np.ndarray, signs: np.ndarray, width: int) -> np.ndarray:
    """The paper's sketch: each row adds up its signed values by columns."""
    made = np.zeros((len(columns), width))
    for row, places, sign in zip(made, columns, signs, strict=True):
        np.add.at(row, places, sign * values)
    return made


@pytest.mark.mpi
@pytest.mark.parametrize("needs_all", [True, False])
def test_the_values_of_the_largest_estimates_are_sent(comm: Communicator, needs_all: bool) -> None:
    compressor = CountSketch(0.02, rows=3, columns=4)
    kept, exchange = math.ceil(0.02 * ELEMENTS), exchange_over(comm, compressor)
    edges = [number * ELEMENTS // comm.size for number in range(comm.size + 1)]
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    errors, values = np.zeros((comm.size, ELEMENTS)), torch.zeros(ELEMENTS)
    for step in range(2):
        hashes = compressor.hashes(ELEMENTS, step)
        columns, signs = tables(hashes)
        errors += [contribution(rank, ELEMENTS, step).double().numpy() for rank in range(comm.size)]
        total = sketched(errors.sum(0), columns, signs, hashes.columns)
        estimates = np.median([sign * row[at] for row, at, sign in zip(total, columns, signs, strict=True)], axis=0)
        values += contribution(comm.rank, ELEMENTS, step)
        found = reduce_section(compressor, comm, values, needs_all=needs_all, step=step, exchange=exchange)
        # Elements that share the column of their median have the same estimate, so that places are not unique.
        is_sent = values.numpy() == 0
        assert is_sent.sum() == kept
        assert np.abs(estimates[is_sent]).min() >= np.abs(estimates[~is_sent]).max() * (1 - 1e-5)
        expected = np.where(is_sent, errors.mean(0), 0)
        errors[:, is_sent] = 0
        expected = expected if needs_all else expected[own]
        np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values.double().numpy(), errors[comm.rank], rtol=1e-4, atol=1e-4)


def test_hashes_are_spread_evenly_and_independent() -> None:
    """Pairs of elements share a column with probability 1/c, signs are as often equal as not."""
    width, draws = 20, 400
    meetings, equal, same_chunk = 0, 0, 0
    for step in range(draws):
        columns, signs = tables(Hashes.of(50, 1, width, step, torch.device("cpu")))
        meetings += int(columns[0, 3] == columns[0, 47])
        equal += int(signs[0, 3] == signs[0, 47])
        same_chunk += int(columns[0, 3] == columns[0, 17])
    assert same_chunk == 0
    assert abs(meetings / draws - 1 / width) < 4 * math.sqrt(1 / width / draws)
    assert abs(equal / draws - 0.5) < 4 * 0.5 / math.sqrt(draws)


def test_estimates_are_unbiased_and_as_near_as_the_paper_says() -> None:
    """A row's variance is at most the sum of squares over c."""
    values, width = contribution(0, 500), 64
    errors = []
    for step in range(300):
        hashes = Hashes.of(500, 1, width, step, torch.device("cpu"))
        errors.append((hashes.estimates(hashes.sketch(values)) - values).double().numpy())
    bound = float(values.double().square().sum()) / width
    assert np.mean(np.square(errors)) < 1.1 * bound
    assert np.abs(np.mean(errors, axis=0)).max() < 5 * math.sqrt(bound / 300)


def test_heavy_hitters_are_found() -> None:
    compressor, elements = CountSketch(0.001), 200_000
    values = torch.randn(elements, generator=torch.Generator().manual_seed(3)) * 0.01
    heavy = torch.randperm(elements, generator=torch.Generator().manual_seed(4))[:50]
    values[heavy] = 5.0
    hashes = compressor.hashes(elements, 7)
    largest = hashes.estimates(hashes.sketch(values)).abs().topk(200).indices
    assert set(heavy.tolist()) <= set(largest.tolist())


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["sketch:0.02,rows=3,columns=4", "sketch:0.5"])
def test_what_is_not_finite_is_seen_on_every_rank_and_leaves_no_trace(comm: Communicator, method: str) -> None:
    values = contribution(comm.rank, 2000)
    kept = values.clone()
    if comm.rank == comm.size - 1:
        values[33:99] = math.inf
        values[50] = math.nan
        kept[33:99] = 0
    mean = reduce_section(Compression(method).compressor(), comm, values)
    assert torch.isnan(mean).any()
    assert torch.equal(values, kept) or not values.any()


@pytest.mark.mpi
def test_sections_that_sketches_do_not_shorten_are_sent_whole(comm: Communicator) -> None:
    compressor = CountSketch()
    exchange = exchange_over(comm, compressor)
    for elements in (0, 1, 26):
        for needs_all in (True, False):
            values = torch.full((elements,), 3.0 + comm.rank)
            found = reduce_section(compressor, comm, values, needs_all=needs_all, exchange=exchange)
            assert not values.any()
            assert torch.equal(found, torch.full_like(found, 3 + (comm.size - 1) / 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", "fraction '0'; needs a part of the values"),
        ("2", "fraction '2'; needs a part of the values"),
        ("0.1,rows=4", "rows '4'; needs an odd number"),
        ("0.1,rows=0", "rows '0'; needs an odd number"),
        ("0.1,columns=0.5", "columns '0.5'; needs a number from 1 up"),
        ("0.1,fast", "'fast'; needs"),
    ],
)
def test_wrong_settings_are_refused(given: str, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Compression(f"sketch:{given}")
