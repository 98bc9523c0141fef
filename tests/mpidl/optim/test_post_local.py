"""Post-local SGD: when weights and gradients are averaged, against a numpy simulation of all ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.comm_hooks import GradBucket
from mpidl.errors import ConfigurationError
from mpidl.optim import (
    PeriodicAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_local_sgd_hook,
    warmup_linear,
)

pytestmark = pytest.mark.mpi


def equal_on_all(comm, tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is the same on all ranks, to the bit."""
    own = tensor.detach().contiguous().flatten()
    everything = torch.empty(comm.size * own.numel(), dtype=own.dtype)
    comm.all_gather(everything, own)
    return all(torch.equal(own, other) for other in everything.chunk(comm.size))


def test_parameters_of_any_kind_become_their_mean(comm) -> None:
    torch.manual_seed(comm.rank)
    made = [
        torch.randn(5, 3),
        torch.randn(4, dtype=torch.float64),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7).bfloat16(),
        torch.randn(1),
    ]
    parameters = [nn.Parameter(tensor.clone()) for tensor in made]
    views = [p.detach() for p in parameters]
    PeriodicAverager([*parameters, parameters[0]], comm).average_parameters()
    for p, view, own in zip(parameters, views, made, strict=True):
        everything = torch.empty(comm.size * own.numel(), dtype=own.dtype)
        comm.all_gather(everything, own.contiguous())
        mean = everything.double().view(comm.size, *own.shape).mean(0)
        rtol = 1e-2 if own.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(p.detach().double(), mean, rtol=rtol, atol=rtol)
        assert equal_on_all(comm, p)
        assert view.data_ptr() == p.data_ptr()  # in place
        assert p.stride() == own.stride()


@pytest.mark.parametrize(("period", "warmup"), [(1, 0), (3, 0), (2, 4), (4, 1)])
def test_weights_are_averaged_when_it_is_time(comm, period: int, warmup: int) -> None:
    steps, lr = 12, 0.5
    slopes = np.random.default_rng(0).normal(size=(steps, comm.size, 3))
    weights = np.ones((comm.size, 3))
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([p], lr=lr), PeriodicAverager([p], comm, period, warmup))
    for step in range(steps):
        p.grad = torch.from_numpy(slopes[step, comm.rank])
        optimizer.step()
        weights -= lr * slopes[step]
        if step + 1 > warmup and (step + 1 - warmup) % period == 0:
            weights[:] = weights.mean(0)
            assert equal_on_all(comm, p)
        np.testing.assert_allclose(p.detach().numpy(), weights[comm.rank], rtol=1e-12)


def test_the_optimizer_and_its_wrapper_are_one(comm) -> None:
    p = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicAverager([p], comm))
    scheduler = warmup_linear(optimizer, 0, 4)
    p.grad = torch.ones(2)
    assert optimizer.step(lambda: 3.0) == 3.0
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.75
    assert optimizer.state[p]["momentum_buffer"].tolist() == [1.0, 1.0]
    optimizer.zero_grad()
    assert p.grad is None
    with pytest.raises(ConfigurationError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_loaded_state_keeps_the_beat(comm) -> None:
    def make() -> tuple[nn.Parameter, PostLocalSGDOptimizer]:
        p = nn.Parameter(torch.ones(1))
        return p, PostLocalSGDOptimizer(torch.optim.SGD([p], lr=1.0, momentum=0.5), PeriodicAverager([p], comm, 3))

    p, optimizer = make()
    for _ in range(2):
        p.grad = torch.full((1,), float(comm.rank))
        optimizer.step()
    q, other = make()
    q.data.copy_(p.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.averager.steps == 2
    for value, each in ((p, optimizer), (q, other)):
        value.grad = torch.full((1,), float(comm.rank))
        each.step()
        assert equal_on_all(comm, value)
    assert torch.equal(p, q)
    with pytest.raises(ConfigurationError, match=r"lacks 'averager'"):
        other.load_state_dict(other.optimizer.state_dict())


def reduced(state: PostLocalSGDState, gradients: torch.Tensor, last: bool) -> torch.Tensor:
    handle = post_local_sgd_hook(state, GradBucket(0, last, gradients, [gradients], []))
    result = handle.wait()
    return gradients if result is None else result


@pytest.mark.parametrize("nodes", ["alone", "pairs"])
def test_gradients_are_averaged_until_the_start_step(comm, nodes: str) -> None:
    group = comm.split(comm.rank // 2, comm.rank) if nodes == "pairs" else None
    state = PostLocalSGDState(comm, start_step=2, local_group=group)
    partners = [rank for rank in range(comm.size) if group is not None and rank // 2 == comm.rank // 2] or [comm.rank]
    for step in range(4):
        for bucket in range(3):  # those of one pass are treated the same
            found = reduced(state, torch.full((5,), float(comm.rank)), last=bucket == 2)
            among = range(comm.size) if step < 2 else partners
            assert found.tolist() == pytest.approx([np.mean(among)] * 5)
    assert state.steps == 4
    if group is not None:
        group.close()


def test_later_no_rank_waits_for_another(comm) -> None:
    state = PostLocalSGDState(comm, start_step=0)
    if comm.rank == 0:  # the others do not take part
        gradients = torch.ones(3)
        assert reduced(state, gradients, last=True) is gradients
    comm.barrier()


def test_hook_averager_and_optimizer_together_train_as_by_hand(comm) -> None:
    """Each rank's steps on its own data, in one process: averaged gradients at first, averaged weights later."""
    start, period, steps, lr = 2, 3, 9, 0.1

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x).square().sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    models = [copy.deepcopy(model) for _ in range(comm.size)]
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    averager = PeriodicAverager(model.parameters(), comm, period=period, warmup_steps=start)
    wrapped.register_comm_hook(PostLocalSGDState(comm, averager=averager), post_local_sgd_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=lr), averager)
    for step in range(steps):
        optimizer.zero_grad()
        loss(wrapped, comm.rank, step).backward()
        optimizer.step()
        gradients = [torch.autograd.grad(loss(m, rank, step), list(m.parameters())) for rank, m in enumerate(models)]
        if step < start:
            gradients = [[sum(g) / comm.size for g in zip(*gradients, strict=True)]] * comm.size
        with torch.no_grad():
            for m, gradient in zip(models, gradients, strict=True):
                for p, g in zip(m.parameters(), gradient, strict=True):
                    p -= lr * g
            if step + 1 > start and (step + 1 - start) % period == 0:
                for each in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(each) / comm.size
                    for p in each:
                        p.copy_(mean)
        for p, q in zip(model.parameters(), models[comm.rank].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_hook_follows_the_steps_of_its_averager(comm) -> None:
    """A skipped step and a pass that adds up with another do not end the averaging of gradients too early."""
    averager = PeriodicAverager([nn.Parameter(torch.zeros(1))], comm, period=2, warmup_steps=2)
    state = PostLocalSGDState(comm, averager=averager)
    mean, found = np.mean(range(comm.size)), []
    for made_a_step in (False, True, False, True, True, True):
        found.append(reduced(state, torch.full((1,), float(comm.rank)), last=True).item())
        if made_a_step:
            averager.step()
    assert found == pytest.approx([mean] * 4 + [comm.rank] * 2)
    with pytest.raises(ConfigurationError, match="start_step: got 3; needs the averager's warmup_steps, 2"):
        PostLocalSGDState(comm, 3, averager=averager)


def test_the_averager_tells_when_weights_are_equal(comm) -> None:
    p = nn.Parameter(torch.zeros(3))
    averager, found = PeriodicAverager([p], comm, period=3, warmup_steps=1), []
    for step in range(8):
        with torch.no_grad():
            p += 1.0 if step < 1 else float(comm.rank + 1)
        averager.step()
        assert averager.is_synchronised == equal_on_all(comm, p) or comm.size == 1
        found.append(averager.is_synchronised)
    assert found == [True, False, False, True, False, False, True, False]


def test_the_hook_goes_on_from_its_state(comm) -> None:
    state = PostLocalSGDState(comm, start_step=1)
    reduced(state, torch.ones(2), last=True)
    other = PostLocalSGDState(comm, start_step=1)
    other.load_state_dict(state.state_dict())
    assert reduced(other, torch.full((2,), float(comm.rank)), last=False).tolist() == [comm.rank] * 2


def test_arguments_that_do_not_fit_are_refused(comm) -> None:
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"parameters: got .*; needs at least one tensor"):
        PeriodicAverager([], comm)
    with pytest.raises(ConfigurationError, match=r"torch\.int64; needs floating-point tensors"):
        PeriodicAverager([torch.ones(1, dtype=torch.int64)], comm)
    with pytest.raises(ConfigurationError, match="period: got 0; needs an integer of at least 1"):
        PeriodicAverager([p], comm, period=0)
    with pytest.raises(ConfigurationError, match="warmup_steps: got -1"):
        PeriodicAverager([p], comm, warmup_steps=-1)
    with pytest.raises(ConfigurationError, match=r"start_step: got 0\.5"):
        PostLocalSGDState(comm, 0.5)
    with pytest.raises(ConfigurationError, match=r"optimizer: got list; needs a torch\.optim\.Optimizer"):
        PostLocalSGDOptimizer([p], PeriodicAverager([p], comm))
    with pytest.raises(ConfigurationError, match="averager: got int; needs a PeriodicAverager"):
        PostLocalSGDOptimizer(torch.optim.SGD([p], lr=1.0), 4)
    model = nn.Linear(3, 3)
    sharded = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=1, process_group=comm, lr=0.1)
    with pytest.raises(ConfigurationError, match="optimizer: got a ZeroOptimizer, whose weights lie in slices"):
        PostLocalSGDOptimizer(sharded, PeriodicAverager(model.parameters(), comm))


@pytest.mark.parametrize("setting", ["period", "warmup_steps"])
def test_ranks_that_would_average_at_other_steps_are_refused(comm, setting: str) -> None:
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match=f"rank 0 has {setting}=3, rank 1 has {setting}=4"):
            PeriodicAverager([nn.Parameter(torch.ones(1))], comm, **{setting: 3 + comm.rank})


@pytest.mark.parametrize(
    ("wrong", "message"), [({"period": 0}, "period: got 0"), ({"warmup_steps": -1}, "warmup_steps: got -1")]
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_every_rank(comm, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PeriodicAverager([nn.Parameter(torch.ones(1))], comm, **(wrong if comm.rank == comm.size - 1 else {}))


def test_ranks_with_other_shapes_or_a_state_of_another_step_are_refused(comm) -> None:
    if comm.size == 1:
        return
    with pytest.raises(mpidl.ModelMismatch, match=r"PeriodicAverager: rank 0 has parameters=\[\(\(1,\).*rank 1 has"):
        PeriodicAverager([nn.Parameter(torch.ones(1 + comm.rank))], comm)
    averager = PeriodicAverager([nn.Parameter(torch.ones(1))], comm)
    averager.step()
    averager.load_state_dict({"steps": 2 + comm.rank})
    with pytest.raises(mpidl.ModelMismatch, match="PeriodicAverager: rank 0 has steps=2, rank 1 has steps=3"):
        averager.step()


def test_ranks_that_would_end_the_averaging_of_gradients_at_other_steps_are_refused(comm) -> None:
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match="PostLocalSGDState: rank 0 has start_step=2, rank 1 has start_s"):
            PostLocalSGDState(comm, 2 + comm.rank)
        with pytest.raises(ConfigurationError, match="start_step: got -1"):
            PostLocalSGDState(comm, -1 if comm.rank == 0 else 2)


def test_ranks_without_batches_are_refused(comm) -> None:
    model = mpidl.DistributedDataParallel(nn.Linear(2, 2), process_group=comm)
    state = PostLocalSGDState(comm, averager=PeriodicAverager(model.parameters(), comm))
    model.register_comm_hook(state, post_local_sgd_hook)
    with pytest.raises(ConfigurationError, match="join: got a hook with PostLocalSGDState, which needs all ranks"):
        model.join().__enter__()


def test_a_wrapper_over_other_ranks_is_refused(comm) -> None:
    if comm.size == 1:
        return
    with comm.split(comm.rank) as alone:
        model = mpidl.DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
        model.register_comm_hook(PostLocalSGDState(comm, start_step=1), post_local_sgd_hook)
        with pytest.raises(
            ConfigurationError, match=r"PostLocalSGDState: its process_group has ranks 0, 1.* has \d; ne"
        ):
            model(torch.ones(1, 2)).sum().backward()
