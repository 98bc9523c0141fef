"""PowerSGD and GradZIP against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from benchmarks.compression_table import models, ratio
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.compressor import Compressor
from mpidl.gradients.compression.low_rank import drawn
from tests.mpidl.gradients.compression.methods import exchange_over, reduce_section, total
from tests.mpidl.gradients.compression.test_engines import Training, check_equal_on_all_ranks

ROWS, COLUMNS = 40, 56
Array = Any


def gradient(rank: int, step: int, elements: int = ROWS * COLUMNS) -> torch.Tensor:
    """A matrix of falling singular values, and other elements."""
    random = torch.Generator().manual_seed(100 * step + rank)
    left, right = torch.randn(ROWS, 8, generator=random), torch.randn(8, COLUMNS, generator=random)
    matrix = (left * torch.logspace(0, -3, 8)) @ right
    return torch.cat([matrix.flatten(), torch.randn(elements - matrix.numel(), generator=random)])


def powersgd(grads: list[Array], right: Array) -> tuple[Array, Array]:
    """One step: the mean, and the right factor of the next step."""
    left = np.linalg.qr(sum(m @ np.linalg.qr(right)[0] for m in grads))[0]
    right = sum(m.T @ left for m in grads) / len(grads)
    return left @ right.T, right


def gradzip(grads: list[Array], right: Array) -> tuple[Array, Array]:
    def ridged(factor: Array) -> Array:
        gram = factor.T @ factor
        return np.linalg.inv(gram + 1e-4 * np.trace(gram) / len(gram) * np.eye(len(gram)))

    left = sum(m @ right @ ridged(right) for m in grads) / len(grads)
    right = sum(m.T @ left @ ridged(left) for m in grads) / len(grads)
    return left @ right.T, right


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["powersgd:2", "powersgd:2,alternating", "gradzip:2", "gradzip:2,bf16"])
def test_what_is_not_sent_stays_bounded_over_hundreds_of_steps(comm: Communicator, method: str) -> None:
    """A gradient that does not change: the direction that is sent least is in the remainder, and comes next."""
    slope = gradient(0, 0).view(ROWS, COLUMNS) + torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    compress = Compression(method, where="everywhere", start_step=0)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=compress)
    sent = torch.zeros_like(slope)
    for _ in range(300):
        model.zero_grad()
        (wrapped(torch.eye(COLUMNS)).T * slope).sum().backward()
        assert model.weight.grad is not None
        sent += model.weight.grad
    assert float((sent - 300 * slope).norm()) < 20 * float(slope.norm())


@pytest.mark.mpi
@pytest.mark.each("method")
@pytest.mark.parametrize(
    ("method", "formula", "error"),
    [
        ("powersgd:3", powersgd, 1e-5),
        ("powersgd:3,cold", powersgd, 1e-5),
        ("powersgd:3,fp16", powersgd, 5e-3),
        ("powersgd:3,batched", powersgd, 1e-5),
        ("gradzip:3", gradzip, 1e-5),
        ("gradzip:3,batched,bf16", gradzip, 5e-2),
    ],
)
def test_a_reduction_follows_the_formula(
    comm: Communicator, method: str, formula: Callable[..., tuple[Array, Array]], error: float
) -> None:
    compressor = Compression(method).compressor()
    exchange, p = exchange_over(comm, compressor), torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    side = math.ceil(math.sqrt(ROWS * COLUMNS))
    shape = (side, side) if "batched" in method else (ROWS, COLUMNS)

    def as_matrix(flat: Array) -> Array:
        return np.pad(flat, (0, math.prod(shape) - flat.size)).reshape(shape)

    remainders = [np.zeros(ROWS * COLUMNS) for _ in range(comm.size)]
    right: Array = None
    for step in range(4):
        values = torch.from_numpy(remainders[comm.rank]).float() + gradient(comm.rank, step)
        if right is None or "cold" in method:
            right = drawn((3, shape[1]), "p0", step).T.double().numpy()
        every = [e + gradient(rank, step).double().numpy() for rank, e in enumerate(remainders)]
        expected, right = formula([as_matrix(m) for m in every], right)
        expected = expected.flatten()[: ROWS * COLUMNS]
        found = reduce_section(compressor, comm, values, parameters=[p], step=step, exchange=exchange)
        assert np.linalg.norm(found.double().numpy() - expected) <= error * np.linalg.norm(expected)
        np.testing.assert_allclose(values, every[comm.rank] - found.double().numpy(), atol=1e-4)
        remainders = [m - expected for m in every]


@pytest.mark.mpi
def test_the_alternating_variant_does_half_an_iteration_a_step(comm: Communicator) -> None:
    compressor = Compression("powersgd:3,alternating").compressor()
    exchange, p = exchange_over(comm, compressor), torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    known = drawn((3, COLUMNS), "p0", 0).T.double().numpy()
    for step in range(4):
        every = [gradient(rank, step).double().numpy().reshape(ROWS, COLUMNS) for rank in range(comm.size)]
        mean, basis = sum(every) / comm.size, np.linalg.qr(known)[0]
        expected = mean @ basis @ basis.T if step % 2 == 0 else basis @ basis.T @ mean
        known = mean @ basis if step % 2 == 0 else mean.T @ basis
        values = gradient(comm.rank, step)
        found = reduce_section(compressor, comm, values, parameters=[p], step=step, exchange=exchange)
        error = np.linalg.norm(found.double().numpy() - expected.flatten())
        assert error <= 1e-5 * np.linalg.norm(expected)


def run(compressor: Compressor, comm: Communicator, values: torch.Tensor, step: int, **settings: Any) -> torch.Tensor:
    p = settings.pop("parameters", None) or [torch.nn.Parameter(torch.empty(ROWS, COLUMNS))]
    return reduce_section(compressor, comm, values, parameters=p, step=step, **settings)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.each("method")
@pytest.mark.parametrize("method", ["powersgd:3", "powersgd:3,alternating", "gradzip:3"])
def test_factors_recover_from_gradients_of_zeros_and_of_rank_one(comm: Communicator, method: str) -> None:
    compressor, p = Compression(method).compressor(), torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    first = gradient(comm.rank, 0).view(ROWS, COLUMNS)
    for step, values in enumerate([torch.zeros(ROWS, COLUMNS)] * 2 + [first[:, :1] * first[:1]] * 3):
        run(compressor, comm, values.clone().flatten(), step, parameters=[p])
    random = torch.Generator().manual_seed(5)
    exact = torch.randn(ROWS, 3, generator=random) @ torch.randn(3, COLUMNS, generator=random)
    for step in range(5, 30):
        found = run(compressor, comm, exact.clone().flatten(), step, parameters=[p]).view(ROWS, COLUMNS)
    assert float((found - exact).norm()) <= 1e-2 * float(exact.norm())


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.each("method")
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["powersgd:3", "powersgd:3,fp16,alternating", "powersgd:3,batched", "gradzip:3"])
def test_what_is_not_finite_is_seen_on_every_rank_and_leaves_no_trace(
    comm: Communicator, method: str, wrong: float
) -> None:
    compressor, p = Compression(method).compressor(), torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    run(compressor, comm, gradient(comm.rank, 0), 0, parameters=[p])
    before, values = compressor.state()[p], gradient(comm.rank, 2)
    if comm.rank == 0:
        values[77] = wrong
    mean = run(compressor, comm, values, 2, parameters=[p])
    assert not torch.isfinite(mean).all()
    assert torch.isfinite(values).all()
    assert all(torch.equal(kept, before[side]) for side, kept in compressor.state()[p].items())


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.each("method")
@pytest.mark.parametrize("method", ["powersgd:3", "powersgd:3,batched", "powersgd:3,alternating"])
def test_needed_elements_are_those_of_the_whole_mean(comm: Communicator, method: str) -> None:
    """Elements between parameters have a mean of zero with `batched`, in which they would get a part of the matrix."""
    parameters = [torch.nn.Parameter(torch.empty(ROWS, COLUMNS)), torch.nn.Parameter(torch.empty(100))]
    values = gradient(comm.rank, 0, ROWS * COLUMNS + 100)
    whole = run(Compression(method).compressor(), comm, values.clone(), 0, parameters=parameters)
    for needed in ((0, 7), (101, 1203), (2000, 2340), (2300, 2340)):
        compressor = Compression(method).compressor()
        part = run(compressor, comm, values.clone(), 0, parameters=parameters, needed=needed)
        torch.testing.assert_close(part[slice(*needed)], whole[slice(*needed)], rtol=1e-5, atol=1e-6)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_state_goes_on_with_the_same_bits(comm: Communicator) -> None:
    compressor, p = Compression("powersgd:3").compressor(), torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    run(compressor, comm, gradient(comm.rank, 0), 0, parameters=[p])
    other = Compression("powersgd:3").compressor()
    other.load(compressor.state())
    expected = run(compressor, comm, gradient(comm.rank, 1), 1, parameters=[p])
    assert torch.equal(run(other, comm, gradient(comm.rank, 1), 1, parameters=[p]), expected)
    assert compressor.state_bytes([p.shape]) == sum(kept.nbytes for kept in compressor.state()[p].values())
    theirs = total(comm, expected) / comm.size
    assert torch.equal(theirs.float(), expected)


@pytest.mark.parametrize("method", ["powersgd", "powersgd:4", "powersgd:1,fp16,batched,min_rate=3", "powersgd:2,cold"])
def test_the_name_makes_the_same_compressor(method: str) -> None:
    made = Compression(method).compressor()
    assert repr(Compression(made.name).compressor()) == made.name


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("powersgd:0", "rank '0'; needs an integer from 1 up"),
        ("powersgd:two", "rank 'two'; needs an integer from 1 up"),
        ("powersgd:", "rank ''; needs an integer"),
        ("powersgd:4,fast", "'fast'; needs powersgd:rank, then any of fp16, bf16"),
        ("powersgd:4,fp16,bf16", "fp16 and bf16; needs one of them"),
        ("powersgd:4,min_rate=0", "min_rate '0'; needs a number from 1 up"),
        ("powersgd:4,alternating,cold", "got alternating and cold; needs one"),
        ("gradzip:4,ridge=0", "ridge '0'; needs a number between 0 and 1"),
    ],
)
def test_wrong_settings_are_refused(method: str, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Compression(method)


def test_bytes_of_the_shapes_of_known_models() -> None:
    """Rank 1 on GPT-2 small and ResNet-50: fp32's bytes by those of the formula, counted from the shapes alone."""
    for name, parameters in models():
        shapes, elements = [p.shape for p in parameters], sum(p.numel() for p in parameters)
        pairs = [(shape[0], shape.numel() // shape[0]) for shape in shapes]
        taken = [(n, m) for n, m in pairs if 2 * (n + m) < n * m]
        factors, rest = sum(n + m for n, m in taken), elements - sum(n * m for n, m in taken)
        square = 2 * math.sqrt(elements)
        expected = {
            "powersgd:1": factors + rest,
            "powersgd:1,fp16": factors / 2 + rest,
            "powersgd:1,batched": square,
            "powersgd:1,fp16,batched": square / 2,
        }
        for method, sent in expected.items():
            assert ratio(method, [shapes]) == pytest.approx(elements / sent, rel=1e-3), (name, method)


@pytest.mark.mpi
@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("method", ["powersgd:2", "powersgd:2,batched"])
def test_replicas_of_shards_exchange_whole_parameters(comm: Communicator, method: str) -> None:
    """With shard_group= too the weights are the same bits on all ranks, and near those of full precision."""
    shards = comm.split(comm.rank // 2)
    losses = {}
    for compress in (None, Compression(method, start_step=0)):
        training = Training(comm, "stage 2", compress, shard_group=shards)
        losses[compress] = training.run(5)
        check_equal_on_all_ranks(comm, training.weights())
    plain, compressed = losses.values()
    assert compressed == pytest.approx(plain, abs=0.2)
    assert compressed != plain
