"""Uneven inputs under DistributedDataParallel.join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl

pytestmark = pytest.mark.mpi


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.second(torch.tanh(self.first(x))).square().sum()


def batches(rank: int) -> list[torch.Tensor]:
    """The higher the rank the more of them; rank 0 has none."""
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 3, generator=random) for _ in range(2 * rank)]


def by_hand(ranks: int, initial: bool) -> dict[str, torch.Tensor]:
    """The same training in one process: gradients of the ranks that have a batch, divided by all or by those."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    everyone = [batches(rank) for rank in range(ranks)]
    for step in range(max(map(len, everyone))):
        active = [b[step] for b in everyone if step < len(b)]
        optimizer.zero_grad()
        (sum(model(x) for x in active) / (ranks if initial else len(active))).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("initial", [True, False])
def test_ranks_with_fewer_batches(comm, initial: bool) -> None:
    model = Net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with wrapped.join(divide_by_initial_world_size=initial):
        for x in batches(comm.rank):
            optimizer.zero_grad()
            wrapped(x).backward()
            optimizer.step()
    for name, expected in by_hand(comm.size, initial).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, rtol=1e-5, atol=1e-6)
    assert model.passes == 2 * (comm.size - 1)
    wrapped(torch.ones(1, 3)).backward()  # and together again
    theirs = model.first.weight.grad.clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, model.first.weight.grad)


def test_accumulation_inside(comm) -> None:
    """Passes under no_sync need no partner."""
    model = Net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    with wrapped.join():
        for x in batches(comm.rank):
            with wrapped.no_sync():
                wrapped(x).backward()
            wrapped(x).backward()
    ends = model.second.bias.detach().clone()
    comm.broadcast(ends)
    assert torch.equal(ends, model.second.bias)


def test_a_rank_that_ends_early_can_be_an_error(comm) -> None:
    if comm.size == 1:
        return
    wrapped = mpidl.DistributedDataParallel(Net(), process_group=comm)

    def train() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for x in batches(comm.rank):
                wrapped(x).backward()

    with pytest.raises(mpidl.TrainingError, match="no batches left on rank 0"):
        train()


def test_synchronised_norms_where_the_first_rank_that_ends_is_an_error(comm) -> None:
    """The others wait in no forward pass for it; one rank alone may evaluate meanwhile."""
    normed = nn.Sequential(nn.Linear(3, 4), mpidl.SyncBatchNorm(4, process_group=comm))
    wrapped = mpidl.DistributedDataParallel(normed, process_group=comm)
    passes: list[None] = []

    def train(number: int) -> None:
        with wrapped.join(throw_on_early_termination=True):
            for _ in range(number):
                wrapped(torch.ones(2, 3) + comm.rank).square().sum().backward()
                passes.append(None)
                if comm.rank == 0:
                    wrapped.eval()(torch.ones(1, 3))
                    wrapped.train()

    train(2)
    if comm.size > 1:
        with pytest.raises(mpidl.TrainingError, match="no batches left on rank 0"):
            train(2 + (comm.rank > 0))
        assert len(passes) == 4


def test_switched_off_it_does_nothing(comm) -> None:
    wrapped: Any = mpidl.DistributedDataParallel(Net(), process_group=comm)
    with wrapped.join(enable=False):
        wrapped(torch.ones(1, 3)).backward()
    assert wrapped._reducer.rounds is None


def test_a_static_graph_of_which_one_rank_sees_nothing_at_first(comm) -> None:
    model = Net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, static_graph=True, bucket_cap_mb=1e-5)
    for epoch in range(2):  # in the second one, rank 0 has batches
        with wrapped.join():
            for x in batches(comm.rank + epoch):
                wrapped(x).backward()
    theirs = model.second.bias.detach().clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, model.second.bias)


def test_what_cannot_be_in_a_join_is_refused(comm) -> None:
    first, second = (mpidl.DistributedDataParallel(Net(), process_group=comm) for _ in range(2))
    with first.join(), pytest.raises(mpidl.ConfigurationError, match="another wrapper's join"), second.join():
        pass
    normed = mpidl.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), comm)
    wrapped = mpidl.DistributedDataParallel(normed, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="SyncBatchNorm"), wrapped.join():
        pass
