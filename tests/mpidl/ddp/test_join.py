"""Uneven inputs under DistributedDataParallel.join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.job import communicator_pool

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
    """Trains in one process: gradients of the ranks that have a batch, divided by all or by those."""
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


def test_a_rank_may_leave_the_block_while_its_passes_only_accumulate(comm) -> None:
    """Its setting comes back when it has stood in for the others."""
    model = Net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with wrapped.join():
        for x in batches(comm.rank):
            optimizer.zero_grad()
            wrapped(x).backward()
            optimizer.step()
        wrapped.require_backward_grad_sync = False
    for name, expected in by_hand(comm.size, True).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, rtol=1e-5, atol=1e-6)
    assert not wrapped.require_backward_grad_sync
    optimizer.zero_grad()
    if comm.rank == 0:
        wrapped(torch.ones(1, 3)).backward()  # alone
    assert (model.second.bias.grad is None) == (comm.rank > 0)
    wrapped.require_backward_grad_sync = True
    wrapped(torch.ones(1, 3)).backward()
    theirs = model.first.weight.grad.clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, model.first.weight.grad)


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
        wrapped.step_in_backward(torch.optim.SGD(wrapped.parameters(), lr=0.1))  # refused where ranks join


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
    with first.join(), pytest.raises(mpidl.ConfigurationError, match="another join is active"), second.join():
        pass
    normed = mpidl.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), comm)
    wrapped = mpidl.DistributedDataParallel(normed, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="SyncBatchNorm"), wrapped.join():
        pass


class Stepping:
    """State of a hook whose optimizer's steps are collective."""

    needs_every_rank = True


def test_a_hook_that_needs_every_rank_is_refused(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(Net(), process_group=comm)
    wrapped.register_comm_hook(Stepping(), lambda state, bucket: bucket.reduce(process_group=comm))
    message = "join: got a hook with Stepping, which needs all ranks in every step; give every rank as many batches"
    with pytest.raises(mpidl.ConfigurationError, match=message):
        wrapped.join().__enter__()


class Pair(nn.Module):
    """Two modules that are wrapped by themselves; the passes through the second are inside those through both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def losses(self, x: torch.Tensor, number: int) -> Iterator[torch.Tensor]:
        """Losses of one batch: a pass through both, and for every second one a pass through the second alone."""
        yield self.second(torch.tanh(self.first(x))).square().sum()
        if number % 2 == 0:
            yield self.second(torch.ones(1, 4)).square().sum()


@pytest.mark.parametrize("initial", [True, False])
def test_two_wrappers(comm, initial: bool) -> None:
    expected, pair = Pair(), Pair()
    sgd = {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(expected.parameters(), **sgd)
    everyone = [batches(rank) for rank in range(comm.size)]
    for step in range(max(map(len, everyone))):
        active = [b[step] for b in everyone if step < len(b)]
        for loss in zip(*(expected.losses(x, step) for x in active), strict=True):
            optimizer.zero_grad()
            (sum(loss) / (comm.size if initial else len(active))).backward()
            optimizer.step()
    first, second = pair.first, pair.second
    pair.first = mpidl.DistributedDataParallel(first, process_group=comm, bucket_cap_mb=1e-5)  # type: ignore[assignment]
    pair.second = mpidl.DistributedDataParallel(second, process_group=comm, bucket_cap_mb=1e-5)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(pair.parameters(), **sgd)
    with mpidl.Join([pair.first, pair.second], divide_by_initial_world_size=initial):
        for step, x in enumerate(batches(comm.rank)):
            for loss in pair.losses(x, step):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for p, wanted in zip(pair.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-5, atol=1e-6)
    with pair.first.join():  # type: ignore[operator]
        pass


def test_a_wrapper_is_a_joinable(comm) -> None:
    assert isinstance(mpidl.DistributedDataParallel(nn.Linear(2, 2), process_group=comm), mpidl.Joinable)


class Counter(mpidl.Joinable):
    """Counts the batches of all ranks, by a collective after each batch."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.total, self.last = comm, 0, False

    @property
    def join_process_group(self) -> Any:
        return self.comm

    def count(self, batches: int) -> None:
        found = torch.tensor([batches])
        self.comm.all_reduce(found)
        self.total += int(found)

    def __call__(self) -> None:
        mpidl.Join.notify_join_context(self)
        self.count(1)

    def join_hook(self, **kwargs: Any) -> mpidl.JoinHook:
        assert kwargs == {"divide_by_initial_world_size": False}
        counter = self

        class Hook(mpidl.JoinHook):
            def main_hook(self) -> None:
                counter.count(0)

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.last = is_last_joiner

        return Hook()


def test_an_object_of_ones_own(comm) -> None:
    counter = Counter(comm)
    wrapped = mpidl.DistributedDataParallel(Net(), process_group=comm)
    with mpidl.Join([wrapped, counter], divide_by_initial_world_size=False):
        for x in batches(comm.rank):
            wrapped(x).backward()
            counter()
    assert counter.total == comm.size * (comm.size - 1)
    if comm.size > 1:
        assert counter.last == (comm.rank == comm.size - 1)
    counter()  # outside of a join
    assert counter.total == comm.size**2


def test_ranks_that_are_not_in_step(comm) -> None:
    first, second = Counter(comm), Counter(comm)
    one = second if comm.rank == 1 else first

    def run() -> None:
        with mpidl.Join([first, second], divide_by_initial_world_size=False):
            one()

    if comm.size > 1:
        with pytest.raises(mpidl.TrainingError, match=r"not in step: rank 0: .*joinable 0, rank 1"):
            run()
    one = first
    run()
    assert first.total == comm.size


def test_what_a_join_refuses(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(Net(), process_group=comm)
    optimizer = mpidl.ZeroOptimizer(Net(), torch.optim.SGD, stage=1, lr=0.1, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="joinable 1 is a ZeroOptimizer"):
        mpidl.Join([wrapped, optimizer])
    other = comm.duplicate()
    with pytest.raises(mpidl.ConfigurationError, match="of 2 process groups"):
        mpidl.Join([wrapped, Counter(other)])
    other.close()
    with pytest.raises(mpidl.ConfigurationError, match="of 0 process groups"):
        mpidl.Join([])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.first(x) + self.second(x) if both else self.first(x)).square().sum()


@pytest.mark.parametrize("as_views", [True, False])
def test_what_a_rank_has_accumulated_is_averaged_after_the_block(comm, as_views: bool) -> None:
    """The rank has left with it, and has stood in for the others meanwhile; no later pass reaches `second`."""
    model, plain = Branches(), Branches()
    wrapped = mpidl.DistributedDataParallel(
        model,
        process_group=comm,
        bucket_cap_mb=1e-5,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_views,
    )
    passes = [torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    own = passes[comm.rank]
    wrapped(own[0], True).backward()  # lays out the buckets
    model.zero_grad(set_to_none=False)
    with wrapped.join():
        wrapped.require_backward_grad_sync = comm.rank == 0
        wrapped(own[1], True).backward()
    wrapped.require_backward_grad_sync = True
    if comm.rank == 0:
        model.zero_grad(set_to_none=False)
    wrapped(own[2], False).backward()
    for rank, x in enumerate(passes):
        ((plain(x[1], True) if rank else 0.0) + plain(x[2], False)).div(comm.size).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(p) if q.grad is None else q.grad
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-6, msg=name)


class Failing(mpidl.Joinable):
    """Its hook's end always fails, its begin as well if it is told so. ended: what has ended, in order."""

    def __init__(self, comm: Any, ended: list[Any], *, begins: bool = True) -> None:
        self.comm, self.ended, self.begins = comm, ended, begins

    @property
    def join_process_group(self) -> Any:
        return self.comm

    def join_hook(self, **kwargs: Any) -> mpidl.JoinHook:
        joinable = self

        class Hook(mpidl.JoinHook):
            def begin(self, turns: Any, number: int) -> None:
                super().begin(turns, number)
                if not joinable.begins:
                    raise ValueError("begin")

            def end(self) -> None:
                joinable.ended.append(joinable)
                raise KeyError("end")

        return Hook()


def test_every_hook_that_has_begun_ends_though_another_s_end_fails(comm) -> None:
    """And the Communicator of the turns is free for the next one."""
    group = comm.duplicate()
    spare = communicator_pool.take(group)
    spare.give_back()
    ended: list[Any] = []
    first, second, third = Failing(group, ended), Failing(group, ended), Failing(group, ended, begins=False)
    with pytest.raises(KeyError, match="end"), mpidl.Join([first, second]):
        pass
    assert ended == [second, first]
    assert communicator_pool.take(group) is spare
    spare.give_back()
    ended.clear()
    with pytest.raises(KeyError, match="end"), mpidl.Join([first, third, second]):
        pass
    assert ended == [first]
    assert communicator_pool.take(group) is spare
    spare.give_back()
