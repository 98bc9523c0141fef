"""A step that is skipped leaves no trace in what compression keeps: training goes on as if its passes never were."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.undo import undo_step
from tests.mpidl.gradients.compression.test_engines import Training, engines
from tests.mpidl.small_models import sequences

pytestmark = pytest.mark.mpi
METHOD = "int4"


def loss_of(training: Training, step: int) -> torch.Tensor:
    x, y = (part.chunk(training.comm.size)[training.comm.rank] for part in sequences(step, 0))
    loss: torch.Tensor = training.called(x, y)
    return loss


def scaled_step(training: Training, scaler: torch.amp.GradScaler, step: int, factor: float = 1.0) -> None:
    # Only one rank overflows.
    wrong = factor if training.comm.rank == training.comm.size - 1 else 1.0
    scaler.scale(loss_of(training, step) * wrong).backward()
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


def check_same(found: Training, expected: Training) -> None:
    """Weights, remainders, the compressor's states and steps, to the bit."""
    weights = found.weights()
    for name, values in expected.weights().items():
        assert torch.equal(weights[name], values), name
    mine, theirs = found.compressed.state_dict(), expected.compressed.state_dict()
    assert mine["steps"] == theirs["steps"]
    assert mine["remainders"].keys() == theirs["remainders"].keys()
    for name, values in theirs["remainders"].items():
        assert torch.equal(mine["remainders"][name], values), name
    assert mine["states"].keys() == theirs["states"].keys()
    for name, kept in theirs["states"].items():
        for key, values in kept.items():
            assert torch.equal(mine["states"][name][key], values), (name, key)


@engines
def test_a_step_that_the_scaler_skips_leaves_no_trace(comm: Communicator, engine: str) -> None:
    plain, skipping = Training(comm, engine, METHOD), Training(comm, engine, METHOD)
    scaler = mpidl.GradScaler(init_scale=256.0, process_group=comm)
    # DDP cuts its buckets anew after the first pass.
    for training in (plain, skipping):
        scaled_step(training, scaler, 0)
        scaled_step(training, scaler, 1)
    other = mpidl.GradScaler(init_scale=256.0, process_group=comm)
    scaled_step(skipping, other, 9, math.inf)
    scaled_step(skipping, other, 8, math.nan)
    assert other.skipped_steps == 2
    assert other.get_scale() == 64.0
    # Remainders are in the unit of the gradients, which is another one now.
    back = {name: 4 * mean for name, mean in skipping.compressed.state_dict()["remainders"].items()}
    for name, mean in plain.compressed.state_dict()["remainders"].items():
        assert torch.equal(back[name], mean), name
    for step in (2, 3):
        scaled_step(plain, scaler, step)
        scaled_step(skipping, other, step)
    other.update(256.0)
    check_same(skipping, plain)


@pytest.mark.parametrize("method", [METHOD, "powersgd:2", "powersgd:2,alternating", "gradzip:2"])
@engines
def test_a_step_that_the_guard_skips_leaves_no_trace(comm: Communicator, engine: str, method: str) -> None:
    """Its gradients may all be finite, and come from several passes."""
    plain, skipping = (Training(comm, engine, Compression(method, start_step=0)) for _ in range(2))
    zero = skipping.optimizer if engine != "ddp" else None
    guard = mpidl.NonfiniteGuard(skipping.called, zero, "skip")
    for step in range(4):
        plain.run(1, first=step)
        if step == 2:
            for other in (7, 8):
                loss_of(skipping, other).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert not guard.allows(math.nan if comm.rank == 0 else 1.0)
            skipping.optimizer.zero_grad()
        loss = loss_of(skipping, step)
        loss.backward()
        assert guard.allows(loss.item())
        skipping.optimizer.step()
        skipping.optimizer.zero_grad()
    check_same(skipping, plain)


@engines
def test_loaded_remainders_come_back_where_nothing_is_compressed(comm: Communicator, engine: str) -> None:
    """A pass in full precision sends them whole."""
    if comm.nodes > 1:
        pytest.skip("there are several nodes")
    given = Training(comm, engine, METHOD)
    given.run(2)
    state = given.compressed.state_dict()
    training = Training(comm, engine, Compression(METHOD, where="between_nodes", undo=True))
    training.compressed.load_state_dict(state)
    loss_of(training, 2).backward()
    training.compressed.undo()
    found = training.compressed.state_dict()["remainders"]
    assert found.keys() == state["remainders"].keys()
    for name, mean in state["remainders"].items():
        assert torch.equal(found[name], mean), name


@engines
def test_a_guard_that_is_asked_before_the_backward_pass_takes_no_step_back(comm: Communicator, engine: str) -> None:
    training = Training(comm, engine, METHOD)
    guard = mpidl.NonfiniteGuard(training.called, training.optimizer if engine != "ddp" else None, "skip")
    training.run(3)
    before = training.compressed.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not guard.allows(math.nan)
    after = training.compressed.state_dict()
    assert after["steps"] == before["steps"] == 3
    for name, mean in before["remainders"].items():
        assert torch.equal(after["remainders"][name], mean), name


def test_the_first_steps_can_be_skipped(comm: Communicator) -> None:
    """Scales begin too large. Buckets are cut anew in the second pass, within the passes that are undone."""
    training = Training(comm, "ddp", METHOD)
    scaler = mpidl.GradScaler(init_scale=2.0**16, process_group=comm)
    loss_of(training, 0).backward()
    training.optimizer.zero_grad()
    scaled_step(training, scaler, 1, math.inf)
    state = training.compressed.state_dict()
    assert state["steps"] == 0
    assert all(not mean.any() for mean in state["remainders"].values())
    scaled_step(training, scaler, 2)
    assert comm.size == 1 or any(mean.any() for mean in training.compressed.state_dict()["remainders"].values())


def test_torchs_scaler_can_be_undone_on_request(comm: Communicator) -> None:
    how = Compression(METHOD, undo=True)
    plain, skipping = Training(comm, "ddp", how), Training(comm, "ddp", how)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) for _ in range(2)]
    for step in range(5):
        scaled_step(plain, scalers[0], step)
        if step == 3:
            scaled_step(skipping, scalers[1], 9, math.inf)
            scalers[1].update(256.0)
        scaled_step(skipping, scalers[1], step)
    check_same(skipping, plain)


@pytest.mark.parametrize("method", ["int8", "sign", "randomk:0.9"])
def test_what_overflows_does_not_stay_between_parameters(comm: Communicator, method: str) -> None:
    """Buckets have room between them, whose values are rounded with those of parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=Compression(method, undo=True))
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0):
        (wrapped(torch.ones(2, 3)) * factor).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) == 4
        assert all(torch.isfinite(gradient).all() for gradient in gradients) == (factor == 1)
        wrapped.zero_grad()


def test_of_two_optimizers_only_one_is_undone(comm: Communicator) -> None:
    training = Training(comm, "ddp", METHOD)
    named = dict(training.model.named_parameters())
    first = {name for name in named if "wte" in name or "wpe" in name}
    optimizers = [
        torch.optim.SGD([p for name, p in named.items() if (name in first) == mine], lr=0.1) for mine in (True, False)
    ]
    training.run(2)
    training.compressed.announce_skips()
    before = training.compressed.state_dict()["remainders"]
    loss_of(training, 2).backward()
    after = training.compressed.state_dict()["remainders"]
    undo_step(optimizers[0])
    found = training.compressed.state_dict()["remainders"]
    for name in found:
        assert torch.equal(found[name], before[name] if name in first else after[name]), name


def test_former_remainders_are_kept_only_where_steps_may_be_skipped(comm: Communicator) -> None:
    def remainders(training: Training) -> int:
        return sum(t.numel() for t in training.compressed.held_tensors())

    training = Training(comm, "stage 2", METHOD)
    training.run(2)
    once = remainders(training)
    training.run(1, first=2)
    assert remainders(training) == once
    training.compressed.announce_skips()
    training.run(1, first=3)
    assert remainders(training) == 2 * once
    never = Training(comm, "stage 2", Compression(METHOD, undo=False))
    never.run(1)
    assert remainders(never) == once
