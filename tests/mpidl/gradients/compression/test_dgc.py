"""Deep Gradient Compression against its formulas in float64, and its velocities wherever remainders go."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.dgc import DeepGradient
from mpidl.job.objects import all_gather_object
from tests.mpidl.gradients.compression.methods import contribution, exchange_over, reduce_section
from tests.mpidl.gradients.compression.test_engines import Training, check_equal_on_all_ranks
from tests.mpidl.small_models import sequences
from tests.mpidl.zero.ways import WAYS

ELEMENTS, MU, LR, PART = 1500, 0.7, 0.05, 0.05
METHOD = f"dgc:{PART},momentum={MU}"
engines = pytest.mark.parametrize("engine", ["ddp", "stage 2", "stage 3"])


class Pull(nn.Module):
    """Pulls its values to targets: a gradient is the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.w - target).square().sum()


class Reference:
    """The paper's algorithm in float64, of all senders: ranks, or nodes of as many ranks. pieces: (start, stop)."""

    def __init__(self, senders: int, pieces: Iterable[tuple[int, int]]) -> None:
        self.pieces = list(pieces)
        self.u, self.v = (np.zeros((senders, ELEMENTS)) for _ in range(2))

    @classmethod
    def of(cls, comm: Communicator, compressed: Any) -> Reference:
        """The reference for an engine whose only parameter lies in one bucket."""
        (own,) = compressed.own_parts()
        return cls(compressed.peers, {piece for given in all_gather_object(comm, own) for piece in given})

    def mean(self, gradients: np.ndarray, begins_step: bool = True) -> np.ndarray:
        """Takes a pass's gradients of all ranks; returns the mean of what is sent."""
        ranks = len(gradients)
        gradients = gradients.reshape(len(self.v), -1, ELEMENTS).sum(1)
        self.u = (MU if begins_step else 1.0) * self.u + gradients
        self.v += self.u if begins_step else gradients
        mean = np.zeros(ELEMENTS)
        for u, v in zip(self.u, self.v, strict=True):
            for start, stop in self.pieces:
                count = math.ceil(PART * (stop - start))  # a bucket ends with padding, of which none is sent
                places = start + np.argsort(-np.abs(v[start:stop]))[:count]
                mean[places] += v[places] / ranks
                u[places] = v[places] = 0
        return mean


def clipped(gradient: np.ndarray, ranks: int, clip: float | None) -> np.ndarray:
    limit = math.inf if clip is None else clip / math.sqrt(ranks)
    return gradient * min(1.0, limit / (np.linalg.norm(gradient) / ranks))


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("needs_all", [True, False])
def test_velocities_follow_the_formula(comm: Communicator, needs_all: bool, clip: float | None) -> None:
    """Four steps of which the second has two passes."""
    compressor = DeepGradient(PART, momentum=MU, clip=clip)
    exchange = exchange_over(comm, compressor)
    edges = [number * ELEMENTS // comm.size for number in range(comm.size + 1)]
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    reference = Reference(comm.size, pairwise(edges))
    v, u = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for number, begins_step in enumerate([True, True, False, True, True]):
        gradients = [contribution(rank, ELEMENTS, number) for rank in range(comm.size)]
        given = np.stack([clipped(each.double().numpy(), comm.size, clip) for each in gradients])
        expected = reference.mean(given, begins_step)
        v += compressor.absorb(gradients[comm.rank], [u], begins_step, comm.size, comm.size)
        mean = reduce_section(compressor, comm, v, needs_all, step=number, exchange=exchange, arrays=[u])
        expected = expected if needs_all else expected[own]
        for found, wanted in ((mean, expected), (v, reference.v[comm.rank]), (u, reference.u[comm.rank])):
            np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.mpi
@engines
def test_engines_train_by_the_formula(comm: Communicator, engine: str) -> None:
    """The optimizer has no momentum. Under ZeRO every other step has two passes."""
    model = Pull()
    settings: dict[str, Any] = {"process_group": comm, "compress": METHOD}
    called: Any = model
    if engine == "ddp":
        called = mpidl.DistributedDataParallel(model, **settings)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    else:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, lr=LR, **WAYS[engine], **settings)
    compressed = (called if engine == "ddp" else optimizer).compressed
    expected, reference = np.zeros(ELEMENTS), None
    for step in range(6):
        passes = 1 if engine == "ddp" else 1 + step % 2
        given = np.zeros(ELEMENTS)
        for number in range(passes):
            targets = [contribution(rank, ELEMENTS, 10 * step + number) for rank in range(comm.size)]
            called(targets[comm.rank]).backward()
            if reference is None:
                reference = Reference.of(comm, compressed)
            gradients = np.stack([expected - each.double().numpy() for each in targets])
            given += reference.mean(gradients, begins_step=number == 0)
        optimizer.step()
        optimizer.zero_grad()
        expected = expected - LR * given
    with nullcontext() if engine == "ddp" else optimizer.gathered(writable=False):
        weights = model.w.detach().clone()
    np.testing.assert_allclose(weights.double().numpy(), expected, rtol=1e-4, atol=1e-4)
    check_equal_on_all_ranks(comm, {"w": weights})
    state = compressed.state_dict()
    assert reference is not None
    for found, wanted in (
        (state["remainders"]["w"], reference.v.sum(0) / comm.size),
        (state["states"]["w"]["momentum"], reference.u.sum(0) / comm.size),
    ):
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.mpi
def test_velocities_of_ranks_without_batches_decay(comm: Communicator) -> None:
    """Rank r has r + 1 batches."""
    model = Pull()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=METHOD)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with wrapped.join():
        for step in range(comm.rank + 1):
            wrapped(contribution(comm.rank, ELEMENTS, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert wrapped.compressed is not None
    weights, reference = np.zeros(ELEMENTS), Reference.of(comm, wrapped.compressed)
    for step in range(comm.size):
        gradients = [weights - contribution(rank, ELEMENTS, step).double().numpy() for rank in range(comm.size)]
        active = np.arange(comm.size) >= step
        weights = weights - LR * reference.mean(np.stack(gradients) * active[:, None])
    np.testing.assert_allclose(model.w.detach().double().numpy(), weights, rtol=1e-4, atol=1e-4)
    velocity = wrapped.compressed.state_dict()["states"]["w"]["momentum"]
    np.testing.assert_allclose(velocity.double().numpy(), reference.u.sum(0) / comm.size, rtol=1e-4, atol=1e-4)


def trained(comm: Communicator, engine: str, steps: int, **settings: Any) -> Training:
    training = Training(comm, engine, Compression(METHOD, **settings), optimizer={"lr": 0.05})
    training.run(steps)
    return training


@pytest.mark.mpi
def test_velocities_move_when_ddp_cuts_its_buckets_anew(comm: Communicator) -> None:
    training = trained(comm, "ddp", 1)
    before = copy.deepcopy(training.compressed.state_dict())
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))
    (0 * training.called(x, y)).backward()
    after = training.compressed.state_dict()["remainders"]
    assert before["states"].keys() == after.keys()
    for name, p in training.model.named_parameters():
        if name in before["states"]:
            assert p.grad is not None
            expected = before["remainders"][name].double() + MU * before["states"][name]["momentum"].double()
            torch.testing.assert_close(p.grad.double() + after[name].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["stage 2", "stage 3"])
def test_gradients_that_are_given_up_end_the_step(comm: Communicator, engine: str) -> None:
    """The next pass begins another one, in which the velocity decays."""
    training = trained(comm, engine, 2)
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(2, 0))
    training.called(x, y).backward()
    training.optimizer.zero_grad()
    before = training.compressed.state_dict()
    (0 * training.called(x, y)).backward()
    after = training.compressed.state_dict()["remainders"]
    for name, p in training.model.named_parameters():
        if name in before["states"]:
            gradient: Any = p.grad
            expected = before["remainders"][name].double() + MU * before["states"][name]["momentum"].double()
            found = gradient.full_tensor().double() + after[name].double()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.mpi
@engines
def test_a_skipped_step_leaves_no_trace(comm: Communicator, engine: str) -> None:
    training = trained(comm, engine, 2)
    guard = mpidl.NonfiniteGuard(training.called, training.optimizer if engine != "ddp" else None, "skip")
    training.run(1, first=2)
    before = copy.deepcopy(training.compressed.state_dict())
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(7, 0))
    (training.called(x, y) * (math.inf if comm.rank == 0 else 1.0)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not guard.allows(math.nan)
    after = training.compressed.state_dict()
    assert any(kept["momentum"].any() for kept in after["states"].values())
    for name, mean in before["remainders"].items():
        assert torch.equal(after["remainders"][name], mean)
        assert torch.equal(after["states"][name]["momentum"], before["states"][name]["momentum"])


@pytest.mark.mpi
def test_what_is_not_finite_leaves_velocities_finite(comm: Communicator) -> None:
    compressor, u = DeepGradient(0.01, clip=1.0), torch.zeros(2000)
    gradient = contribution(comm.rank, 2000)
    if comm.rank == comm.size - 1:
        gradient[33:99], gradient[50] = math.inf, math.nan
    v = compressor.absorb(gradient, [u], True, comm.size, comm.size).clone()
    mean = reduce_section(compressor, comm, v, arrays=[u])
    assert not torch.isfinite(mean).all()
    assert torch.isfinite(v).all()
    assert torch.isfinite(u).all()


@pytest.mark.mpi
def test_velocities_take_as_much_memory_as_remainders(comm: Communicator) -> None:
    def held(method: str) -> int:
        training = Training(comm, "stage 2", Compression(method, undo=False), optimizer={"lr": 0.05})
        training.run(1)
        return sum(t.nbytes for t in training.compressed.held_tensors())

    once = held("topk:0.1")
    assert (once > 0) == (comm.size > 1)
    assert comm.size == 1 or held(METHOD) == 2 * once


@pytest.mark.mpi
@engines
def test_momentum_of_the_optimizer_is_refused(comm: Communicator, engine: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=r"SGD has momentum=0\.9"):
        Training(comm, engine, METHOD).run(1)


@pytest.mark.mpi
def test_compressing_between_nodes_of_one_node_is_refused(comm: Communicator) -> None:
    if comm.nodes > 1:
        pytest.skip("there are several nodes")
    with pytest.raises(mpidl.ConfigurationError, match="where='between_nodes' on one node"):
        Training(comm, "ddp", Compression(METHOD, where="between_nodes"))


@pytest.mark.mpi
def test_two_reductions_in_a_step_are_refused_in_ddp(comm: Communicator) -> None:
    training = trained(comm, "ddp", 2)
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(2, 0))
    training.called(x, y).backward()
    with pytest.raises(mpidl.TrainingError, match="needs no_sync"):
        training.called(x, y).backward()
    training.optimizer.zero_grad()
    with training.called.no_sync():
        training.called(x, y).backward()
    training.called(x, y).backward()
    training.optimizer.step()


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["ddp", "stage 2"])
def test_clipping_of_scaled_gradients_is_refused(comm: Communicator, way: str) -> None:
    x, y = sequences(2, 0)
    for method, refused in ((METHOD, False), (f"{METHOD},clip=1", True)):
        training = Training(comm, way, Compression(method, where="everywhere"), {"lr": 0.1})
        scaler = mpidl.GradScaler(init_scale=256.0, process_group=comm)
        scaler.scale(training.called(x, y)).backward()
        with pytest.raises(mpidl.ConfigurationError, match="needs no clip=") if refused else nullcontext():
            scaler.step(training.optimizer)


def test_the_part_that_is_sent_falls_in_the_warm_up() -> None:
    parts = [DeepGradient(0.001, warmup=8).fraction_at(step) for step in range(10)]
    assert parts == [1 / 4] * 2 + [1 / 16] * 2 + [1 / 64] * 2 + [1 / 256] * 2 + [0.001] * 2
    assert [DeepGradient(0.1, warmup=4).fraction_at(step) for step in range(3)] == [0.25, 0.1, 0.1]
    assert DeepGradient(0.001).fraction_at(0) == 0.001


@pytest.mark.parametrize("name", ["dgc:0.001", "dgc:0.01,momentum=0.5,warmup=100,clip=2", "dgc:0.01,momentum=0"])
def test_names_make_one_like_it(name: str) -> None:
    assert Compression(name).compressor().name == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "dgc:0"}, "fraction '0'; needs a part of the values"),
        ({"method": "dgc:0.1,momentum=1"}, "momentum '1'; needs a number from 0 up, below 1"),
        ({"method": "dgc:0.1,warmup=-1"}, "warmup '-1'; needs a number of steps"),
        ({"method": "dgc:0.1,clip=0"}, "clip '0'; needs a norm above 0"),
        ({"method": "dgc:0.1,fast"}, "'fast'; needs"),
        ({"method": "dgc", "start_step": 5}, "got start_step=5; needs 0"),
        ({"method": "dgc", "error_feedback": False}, "got error_feedback=False"),
        ({"method": "auto", "allow": ("dgc",)}, "a choice by 'auto' would lose"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Compression(**given)
