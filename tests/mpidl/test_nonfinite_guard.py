"""A step that would spoil the weights is not taken, on any rank, and its cause is named."""

from __future__ import annotations

import warnings

import pytest
import torch

import mpidl
from tests.mpidl.models import Perceptron

ENGINES = ["plain", "ddp", "zero1", "zero3"]


def engine(comm, kind: str):
    torch.manual_seed(0)
    model: torch.nn.Module = Perceptron()
    if kind == "plain":
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "ddp":
        model = mpidl.DistributedDataParallel(model, process_group=comm)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=int(kind[-1]), lr=0.1, process_group=comm)


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
        with pytest.raises(mpidl.TrainingError, match=rf"the loss is inf on rank {comm.size - 1}; it is the 3. step"):
            guard.allows(loss, 1.0)


@pytest.mark.mpi
def test_wrong_arguments(comm) -> None:
    model, _ = engine(comm, "zero1")
    with pytest.raises(mpidl.ConfigurationError, match="give it too"):
        mpidl.NonfiniteGuard(model, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="on_nan: got 'ignore'"):
        mpidl.NonfiniteGuard(model, on_nan="ignore")
    with pytest.raises(mpidl.ConfigurationError, match="give_up_after: got 0"):
        mpidl.NonfiniteGuard(model, give_up_after=0)
