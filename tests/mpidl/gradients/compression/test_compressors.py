"""Each compressor by itself: what is sent and what remains is the gradient, on every rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from collectives import Communicator
from mpidl.gradients.compression import Compression, OwnedCompressor
from mpidl.gradients.compression.blockwise import BLOCK, Blockwise
from mpidl.gradients.compression.sign import Sign
from tests.mpidl.gradients.compression.methods import (
    STEPS_TO_VANISH,
    VARIANTS,
    contribution,
    exchange_over,
    reduce_section,
    total,
    whole_parameters,
)

SIZES = (1, 7, 255, 256, 257, 100_003)
methods = pytest.mark.parametrize("method", VARIANTS)
owned = pytest.mark.parametrize(
    "method", [name for name in VARIANTS if isinstance(Compression(name).compressor(), OwnedCompressor)]
)


@pytest.mark.mpi
@pytest.mark.each("method")
@methods
@pytest.mark.parametrize("needs_all", [True, False])
def test_mean_and_remainders_make_up_all_gradients(comm: Communicator, method: str, needs_all: bool) -> None:
    compressor = Compression(method).compressor()
    for elements in (5, 1000, 70_001):
        values = contribution(comm.rank, elements)
        expected = total(comm, values)
        mean = reduce_section(compressor, comm, values, needs_all=needs_all)
        needs_all = needs_all or compressor.needs_whole
        whole = torch.zeros(elements)
        edges = [number * elements // comm.size for number in range(comm.size + 1)]
        own = slice(edges[comm.rank], edges[comm.rank + 1])
        if needs_all:
            theirs = mean.clone()
            comm.broadcast(theirs)
            assert torch.equal(theirs, mean), "all ranks have the same bits"
            whole[own] = mean[own]
        else:
            whole[own] = mean
        found = total(comm, whole) * comm.size + total(comm, values)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        error = float((total(comm, whole) * comm.size - expected).norm() / expected.norm())
        assert error <= VARIANTS[method]
        assert comm.size > 1 or needs_all or error < 1e-6 or not isinstance(compressor, OwnedCompressor)


@pytest.mark.mpi
@methods
def test_without_remainders_the_mean_is_the_same(comm: Communicator, method: str) -> None:
    values = contribution(comm.rank, 3001)
    kept = reduce_section(Compression(method).compressor(), comm, values.clone())
    dropped = reduce_section(Compression(method).compressor(), comm, values.clone(), keeps_remainder=False)
    assert torch.equal(kept, dropped)


@pytest.mark.mpi
@methods
def test_errors_fed_back_vanish_in_the_mean_of_many_steps(comm: Communicator, method: str) -> None:
    compressor, gradient = Compression(method).compressor(), contribution(comm.rank, 2000)
    exact = total(comm, gradient) / comm.size
    values, summed = torch.zeros(2000), torch.zeros(2000, dtype=torch.float64)
    steps, exchange = STEPS_TO_VANISH.get(method, 20), exchange_over(comm, compressor)
    for step in range(steps):
        values += gradient
        summed += reduce_section(compressor, comm, values, step=step, exchange=exchange)
    without = float((reduce_section(compressor, comm, gradient.clone()) - exact).norm())
    assert float((summed / steps - exact).norm()) <= max(0.2 * without, 1e-4)


@owned
@pytest.mark.parametrize("divisor", [1, 3])
def test_any_number_of_values_is_compressed(method: str, divisor: int) -> None:
    compressor = Compression(method).compressor()
    assert isinstance(compressor, OwnedCompressor)
    for elements in SIZES:
        values = contribution(3, elements)
        message = torch.empty(compressor.message_bytes(elements), dtype=torch.uint8)
        remainder, sent = values.clone(), torch.empty(elements)
        compressor.compress(remainder, message, remainder, divisor)
        compressor.decompress(message, sent)
        atol = 1e-6 if divisor == 1 else 4e-6
        torch.testing.assert_close(divisor * sent.double() + remainder, values.double(), rtol=1e-6, atol=atol)
        added = torch.ones(elements)
        compressor.decompress(message, added, add=True)
        assert torch.equal(added, 1 + sent)
        of_quotient = torch.empty_like(sent)
        compressor.compress(values / divisor, message, None)
        compressor.decompress(message, of_quotient)
        torch.testing.assert_close(sent, of_quotient, rtol=2**-7, atol=1e-6)  # of 16 bits the last one may differ


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_rounded_as_in_float64(bits: int) -> None:
    elements = 3 * BLOCK + 17
    values = contribution(0, elements)
    message = torch.empty(Blockwise(bits).message_bytes(elements), dtype=torch.uint8)
    Blockwise(bits).compress(values, message, None)
    sent = torch.empty(elements)
    Blockwise(bits).decompress(message, sent)
    largest = 2 ** (bits - 1) - 1
    for start in range(0, elements, BLOCK):
        block = values[start : start + BLOCK].double().numpy()
        scale = np.abs(block).max() / largest
        expected = np.rint(block / scale) * scale
        # A value in the middle between two integers may go to either.
        difference = np.abs(sent[start : start + BLOCK].double().numpy() - expected)
        assert (difference > 1e-5 * scale * largest).sum() <= 1
        assert np.abs(sent[start : start + BLOCK].double().numpy() - block).max() <= 0.5001 * scale


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_of_zeros_and_of_the_smallest_numbers(bits: int) -> None:
    values = torch.zeros(2 * BLOCK)
    values[BLOCK:] = 1e-45
    message = torch.empty(Blockwise(bits).message_bytes(2 * BLOCK), dtype=torch.uint8)
    remainder, sent = torch.empty(2 * BLOCK), torch.empty(2 * BLOCK)
    Blockwise(bits).compress(values, message, remainder)
    Blockwise(bits).decompress(message, sent)
    assert torch.equal(sent + remainder, values)


@pytest.mark.parametrize("count", [None, 50_000])
def test_signs_have_the_root_mean_square_of_the_counted_values(count: int | None) -> None:
    elements = 70_003
    values = contribution(0, elements)
    values[5:4000], values[7] = 0.0, -0.0
    scale = float(np.linalg.norm(values.double().numpy()) / math.sqrt(count or elements))
    message = torch.empty(Sign().message_bytes(elements), dtype=torch.uint8)
    sent, remainder = torch.empty(elements), values.clone()
    Sign().compress(remainder, message, remainder, count=count)
    Sign().decompress(message, sent)
    expected = np.where(values.numpy() >= 0, scale, -scale)
    np.testing.assert_allclose(sent.numpy(), expected, rtol=1e-6)
    assert torch.equal(remainder, values - sent)


def test_a_message_of_zeros_is_of_zeros() -> None:
    message, sent = torch.empty(Sign().message_bytes(9), dtype=torch.uint8), torch.ones(9)
    Sign().compress(torch.zeros(9), message, None, count=0)
    Sign().decompress(message, sent)
    assert not sent.any()


@owned
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_leaves_no_trace(method: str, wrong: float) -> None:
    compressor = Compression(method).compressor()
    assert isinstance(compressor, OwnedCompressor)
    values = contribution(0, 1000)
    values[300] = wrong
    message = torch.empty(compressor.message_bytes(1000), dtype=torch.uint8)
    remainder, sent = values.clone(), torch.empty(1000)
    compressor.compress(remainder, message, remainder)
    compressor.decompress(message, sent)
    assert not torch.isfinite(sent[300])
    assert torch.isfinite(remainder).all()


@pytest.mark.parametrize(
    ("method", "bytes_each"), [("int8", 1 + 4 / 256), ("int4", 0.5 + 4 / 256), ("bf16", 2.0), ("sign", 1 / 8)]
)
def test_bytes_sent_follow_the_formula(method: str, bytes_each: float) -> None:
    compressor = Compression(method).compressor()
    elements, ranks = 1 << 20, 4
    expected = 2 * (ranks - 1) / ranks * elements * bytes_each
    assert compressor.sent_bytes(elements, ranks, needs_all=True) == pytest.approx(expected, rel=1e-3)
    assert compressor.sent_bytes(elements, ranks, needs_all=False) == pytest.approx(expected / 2, rel=1e-3)


@pytest.mark.mpi
@pytest.mark.each("method")
@methods
@pytest.mark.parametrize("needs_all", [True, False])
def test_bytes_of_the_operations_are_those_of_the_formula(comm: Communicator, method: str, needs_all: bool) -> None:
    """Over two steps, as some methods send other things in every second one. Random states stay as they are."""
    compressor, elements = Compression(method).compressor(), 48 * BLOCK
    exchange = exchange_over(comm, compressor)
    random, numpy_random = torch.get_rng_state(), np.random.get_state()
    for step in range(2):
        reduce_section(
            compressor, comm, contribution(comm.rank, elements), needs_all=needs_all, step=step, exchange=exchange
        )
    assert torch.equal(torch.get_rng_state(), random)
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_random, strict=True))
    shapes = [p.shape for p in whole_parameters(elements)]
    sent = sum(each.sent for each in exchange.phases)  # type: ignore[attr-defined]
    needs_all = needs_all or compressor.needs_whole
    assert sent == pytest.approx(2 * compressor.sent_bytes(elements, comm.size, needs_all, shapes), rel=1e-6)
