"""A step that would spoil the weights is not taken, on any rank, and its cause is named."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import mpidl
from tests.mpidl.small_models import Perceptron
from tests.mpidl.zero.ways import zero

ENGINES = ["plain", "ddp", "stage 1", "stage 3"]


def engine(comm, kind: str):
    torch.manual_seed(0)
    model: torch.nn.Module = Perceptron()
    if kind == "plain":
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "ddp":
        model = mpidl.DistributedDataParallel(model, process_group=comm)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, zero(model, comm, kind, torch.optim.SGD, lr=0.1)


def backward(comm, model: torch.nn.Module, spoilt: bool) -> float:
    """A pass of which the last rank's gradients below the last layer are no numbers."""
    plain = getattr(model, "module", model)
    handle = None
    if spoilt and comm.rank == comm.size - 1:
        handle = plain.layers[2].register_full_backward_pre_hook(lambda _, g: (g[0] * float("nan"),))
    tokens = torch.tensor([[1], [2 + comm.rank]])
    loss = model(tokens, tokens)
    loss.backward()
    if handle is not None:
        handle.remove()
    return loss.item()


def norm_of(model, optimizer) -> float:
    if isinstance(optimizer, mpidl.ZeroOptimizer):
        return float(optimizer.clip_grad_norm_(1.0))
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.mpi
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_gradient_that_is_no_number_stops_all_ranks_and_is_named(comm, kind: str, with_norm: bool) -> None:
    model, optimizer = engine(comm, kind)
    guard = mpidl.NonfiniteGuard(model, optimizer, process_group=comm)
    loss = backward(comm, model, spoilt=False)
    assert guard.allows(loss, norm_of(model, optimizer) if with_norm else None)
    optimizer.step()
    optimizer.zero_grad()
    loss = backward(comm, model, spoilt=True)
    norm = norm_of(model, optimizer) if with_norm else None
    with pytest.raises(mpidl.TrainingError) as raised:
        guard.allows(loss, norm)
    assert str(raised.value).startswith(f"the gradient of layers.2.bias on rank {comm.size - 1} is not finite") or str(
        raised.value
    ).startswith(f"the gradient of layers.2.weight on rank {comm.size - 1} is not finite")
    guard.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_where_only_the_mean_overflows_no_rank_is_named_and_each_parameter_counts_once(comm) -> None:
    model = torch.nn.Linear(2, 1)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = mpidl.NonfiniteGuard(wrapped, optimizer, process_group=comm)
    (wrapped(torch.ones(1, 2)) * 3e38).sum().backward()
    with pytest.raises(mpidl.TrainingError) as raised:
        guard.allows(1.0)
    assert str(raised.value) == "the gradient of bias is not finite, and of 1 after it"
    optimizer.zero_grad()
    loss = wrapped(torch.full((1, 2), torch.inf)).sum()  # on every rank the gradient of the weights alone
    loss.backward()
    with pytest.raises(mpidl.TrainingError) as raised:
        guard.allows(1.0)
    assert str(raised.value) == "the gradient of weight on rank 0 is not finite"
    guard.close()


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ENGINES)
def test_a_skipped_step_leaves_the_weights_and_the_next_one_is_taken(comm, kind: str) -> None:
    model, optimizer = engine(comm, kind)
    guard = mpidl.NonfiniteGuard(model, optimizer, "skip", watch=False, process_group=comm)
    taken = []
    for step in range(4):
        loss = backward(comm, model, spoilt=step in (1, 2))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            taken.append(guard.allows(loss))
        assert len([w for w in said if "the step is skipped" in str(w.message)]) == (not taken[-1] and comm.rank == 0)
        if taken[-1]:
            optimizer.step()
        optimizer.zero_grad()
    assert taken == [True, False, False, True]
    assert guard.skipped == 2
    assert torch.tensor(backward(comm, model, spoilt=False)).isfinite()


@pytest.mark.mpi
def test_a_loss_is_named_with_its_rank_and_skipping_comes_to_an_end(comm) -> None:
    model, optimizer = engine(comm, "plain")
    guard = mpidl.NonfiniteGuard(model, optimizer, "skip", give_up_after=3, process_group=comm)
    loss = float("inf") if comm.rank == comm.size - 1 else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not guard.allows(loss, 1.0)
        assert not guard.allows(loss, 1.0)
        assert guard.allows(1.0, 1.0)
        assert not guard.allows(loss, 1.0)
        assert not guard.allows(loss, 1.0)
        where = f"on rank {comm.size - 1}"
        with pytest.raises(mpidl.TrainingError, match=f"the loss is inf {where}; steps skipped in a row: 3, and"):
            guard.allows(loss, 1.0)


class Normed(torch.nn.Module):
    """With a running mean, a counter, and a mask that is meant to be infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((4,), -torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x)).square().mean()


def normed(comm, kind: str) -> tuple[Normed, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Normed()
    if kind == "stage 3":
        return model, model, zero(model, comm, kind, torch.optim.SGD, lr=0.1)
    call = mpidl.DistributedDataParallel(model, process_group=comm) if kind == "ddp" else model
    return model, call, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["plain", "ddp", "stage 3"])
def test_a_skipped_step_leaves_running_statistics(comm, kind: str) -> None:
    """Rank 0's batch has a NaN in one step, of two micro-steps; without that step nothing differs in what is left."""
    found = []
    for spoilt_step in (True, False):
        model, call, optimizer = normed(comm, kind)
        guard = mpidl.NonfiniteGuard(call, optimizer, "skip", process_group=comm)
        for step in range(3):
            if step == 1 and not spoilt_step:
                continue
            for micro in range(2):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + micro))
                if step == 1 and micro == 0 and comm.rank == 0:
                    x[2, 3] = torch.nan
                loss = call(x)
                loss.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if guard.allows(loss):
                    optimizer.step()
            optimizer.zero_grad()
        assert guard.skipped == spoilt_step
        guard.close()
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert int(found[0]["norm.num_batches_tracked"]) == 4
    for name, buffer in found[0].items():
        assert torch.equal(buffer, found[1][name]), name


@pytest.mark.mpi
def test_what_is_loaded_between_steps_stays_and_validation_is_no_step(comm) -> None:
    model, call, optimizer = normed(comm, "plain")
    guard = mpidl.NonfiniteGuard(call, optimizer, "stop", process_group=comm)
    model.eval()
    call(torch.ones(2, 4))
    model.train()
    model.load_state_dict({**model.state_dict(), "norm.running_mean": torch.full((4,), 7.0)})
    loss = call(torch.full((6, 4), torch.nan))
    loss.backward()
    model.norm.running_var = torch.zeros(4)  # another tensor in its place
    with pytest.raises(mpidl.TrainingError, match="the loss is nan"):
        guard.allows(loss.item())
    assert torch.equal(model.norm.running_mean, torch.full((4,), 7.0))
    assert torch.equal(model.norm.running_var, torch.ones(4))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["plain", "ddp", "stage 3"])
def test_with_a_scaler_overflows_are_its_business_and_losses_the_guard_s(comm, kind: str) -> None:
    """Gradients overflow in step 0 on the last rank, the loss is no number in step 2 there."""
    model, call, optimizer = normed(comm, kind)
    scaler = mpidl.GradScaler(init_scale=8.0, process_group=comm)
    guard = mpidl.NonfiniteGuard(call, optimizer, "skip", scaler=scaler, process_group=comm)
    last, allowed, weights = comm.rank == comm.size - 1, [], []
    for step in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        loss = call(torch.full_like(x, torch.nan) if step == 2 and last else x)
        scaler.scale(loss * (1e38 if step == 0 and last else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = norm_of(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            allowed.append(guard.allows(loss.item(), norm))
        if allowed[-1]:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        gathered = optimizer.gathered(writable=False) if kind == "stage 3" else contextlib.nullcontext()
        with gathered:
            weights.append(model.last.weight.detach().clone())
    assert allowed == [True, True, False, True]
    assert scaler.skipped_steps == 1
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert all(weight.isfinite().all() for weight in weights)
    assert model.norm.running_mean.isfinite().all()
    guard.close()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_keeps_its_buffers_too(in_place: bool) -> None:
    model, _, optimizer = normed(mpidl.init(), "plain")
    call: torch.nn.Module = model
    if in_place:
        model.compile(backend="eager")
    else:
        call = torch.compile(model, backend="eager")  # type: ignore[assignment]
    guard = mpidl.NonfiniteGuard(call, optimizer, "skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert guard.allows(call(torch.ones(6, 4)))
        assert not guard.allows(call(torch.full((6, 4), torch.nan)))
    assert model.norm.running_mean.isfinite().all()
    assert int(model.norm.num_batches_tracked) == 1


@pytest.mark.mpi
def test_wrong_arguments(comm) -> None:
    model, _ = engine(comm, "stage 1")
    with pytest.raises(mpidl.ConfigurationError, match="pass it to NonfiniteGuard as optimizer="):
        mpidl.NonfiniteGuard(model, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="on_nan: got 'ignore'"):
        mpidl.NonfiniteGuard(model, on_nan="ignore")
    with pytest.raises(mpidl.ConfigurationError, match="give_up_after: got 0"):
        mpidl.NonfiniteGuard(model, give_up_after=0)
    with pytest.raises(mpidl.ConfigurationError, match="scaler: got int; needs a GradScaler"):
        mpidl.NonfiniteGuard(model, scaler=3)
    guard = mpidl.NonfiniteGuard(*engine(comm, "plain"), process_group=comm)
    for given, said in (((None,), "loss: got NoneType"), ((torch.ones(2),), r"loss: got Tensor of shape \(2,\)")):
        with pytest.raises(mpidl.ConfigurationError, match=f"{said}; needs a number"):
            guard.allows(*given)
    with pytest.raises(mpidl.ConfigurationError, match="norm: got str; needs a number"):
        guard.allows(1.0, "large")


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["ddp", "stage 1"])
def test_ranks_of_more_groups_than_one_skip_together(comm, kind: str) -> None:
    """Nodes that DiLoCo averages are such: a step of some alone would leave the others waiting at the next exchange."""
    group = comm.split(comm.rank)
    model, optimizer = engine(group, kind)
    guard = mpidl.NonfiniteGuard(model, optimizer, "skip", process_group=comm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = backward(comm, model, spoilt=False)
        assert guard.allows(loss, None)
        optimizer.zero_grad()
        assert not guard.allows(backward(comm, model, spoilt=True), None)
    guard.close()
