"""Several wrappers, copies of them, and what changes around them between passes."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import comm_hooks
from mpidl.ddp.used_gradient import UsedGradient
from mpidl.job import communicator_pool
from tests.mpidl.ddp.reference import Several, check, data, follow, made, mean_gradients

pytestmark = pytest.mark.mpi


def whole(m: Any, rank: int) -> torch.Tensor:
    return m(data(rank), (0, 1, 2)).sum()


def test_a_deep_copy_trains_by_itself(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm, bucket_cap_mb=1e-5)

    def loss(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (0, 1, 2)).sum()

    expected = mean_gradients(Several, loss, comm.size)
    loss(wrapped, comm.rank).backward()
    twin = copy.deepcopy(wrapped)
    plain = copy.deepcopy(wrapped.module)  # the module itself knows nothing of the wrapper
    loss(plain, comm.rank).backward()
    twin.zero_grad()
    loss(twin, comm.rank).backward()
    check(twin.module, expected)
    check(wrapped.module, expected)
    assert twin.process_group is comm
    assert list(twin.state_dict()) == [f"module.{name}" for name in made(Several).state_dict()]


def test_a_copy_with_a_hook(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm)
    wrapped.register_comm_hook(comm, comm_hooks.allreduce)
    twin = copy.deepcopy(wrapped)
    whole(twin, comm.rank).backward()
    check(twin.module, mean_gradients(Several, whole, comm.size))


def test_the_forward_pass_has_the_signature_of_the_module_s(comm) -> None:
    """For what looks at it to learn what the model takes, of copies and pickled ones too."""
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm)
    expected = inspect.signature(wrapped.module.forward)
    assert list(expected.parameters) == ["x", "order"]
    for each in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(copy.deepcopy(wrapped)))):
        assert inspect.signature(each.forward) == expected
        assert "forward" not in vars(each)
        assert each.forward == each.forward
        assert each.forward.__self__ is each
        assert torch.equal(each.forward(data(0), order=(0,)), each.module(data(0), (0,)))
    assert mpidl.DistributedDataParallel.forward.__name__ == wrapped.forward.__name__ == "forward"
    assert wrapped.forward != copy.deepcopy(wrapped).forward


def test_another_forward_pass_in_the_place_of_the_wrapper_s(comm) -> None:
    class Halved(mpidl.DistributedDataParallel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, (0, 1, 2)) / 2

    def halved(m: Any, rank: int) -> torch.Tensor:
        return whole(m, rank) / 2

    expected = mean_gradients(Several, halved, comm.size)
    wrapped = Halved(made(Several), process_group=comm)
    assert list(inspect.signature(wrapped.forward).parameters) == ["x"]
    wrapped(data(comm.rank)).sum().backward()
    check(wrapped.module, expected)
    patched = mpidl.DistributedDataParallel(made(Several), process_group=comm)
    before = patched.forward
    patched.forward = lambda x: before(x, (0, 1, 2)) / 2  # type: ignore[method-assign]
    patched(data(comm.rank)).sum().backward()
    check(patched.module, expected)


def test_one_rank_alone_can_evaluate_with_a_copy_and_with_the_wrapper(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(lambda: nn.BatchNorm1d(3)), process_group=comm)
    wrapped(data(comm.rank)).sum().backward()
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    average.update_parameters(wrapped)
    if comm.rank == 0:
        with torch.no_grad():
            average(data(0))
            wrapped(data(0))
    wrapped(data(comm.rank)).sum().backward()


def test_after_a_pass_all_ranks_evaluate_the_same(comm) -> None:
    """Rank 0's running statistics, without a forward pass to fetch them."""
    model = nn.BatchNorm1d(3)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped(data(comm.rank)).sum().backward()
    wrapped.eval()
    found = wrapped(data(0)).detach()
    theirs = found.clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, found)


def test_a_new_wrapper_takes_over_at_once(comm) -> None:
    """The garbage collector may have run before, on some ranks alone."""
    gc.disable()
    try:
        model = made(Several)
        for _ in range(3):
            wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
            model.zero_grad()
            whole(wrapped, comm.rank).backward()
            check(model, mean_gradients(Several, whole, comm.size))
            assert sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()) == 6
            del wrapped
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            if comm.rank == 1:
                gc.collect()
    finally:
        gc.enable()


class Trainer:
    """A program's object that has a wrapper, and to which the wrapper leads. by: which of its parts does."""

    def __init__(self, comm, model: nn.Module, by: str) -> None:
        self.comm = comm
        self.wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
        if by == "hook":
            self.wrapped.register_comm_hook(None, self.hook)
        elif by == "state":
            self.wrapped.register_comm_hook(self, Trainer.hook)
        else:
            model.trainer = [self]  # type: ignore[assignment]

    def hook(self, *of_bucket: Any) -> comm_hooks.Handle:
        return comm_hooks.allreduce(self.comm, of_bucket[-1])


@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("by", ["hook", "state", "module"])
def test_a_wrapper_that_leads_to_itself_is_freed(comm, by: str, steps: bool) -> None:
    """By the garbage collector, with what it has; and another wrapper has its Communicator."""
    group = comm.duplicate()
    for number in range(2):
        model = made(Several)
        trainer = Trainer(group, model, by)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if steps:
            trainer.wrapped.step_in_backward(optimizer)
        whole(trainer.wrapped, comm.rank).backward()
        parameters = list(model.parameters()) if number else []  # which may outlive it, as the optimizer
        kept = [weakref.ref(each) for each in (trainer, trainer.wrapped, model)]
        memory = [weakref.ref(each) for each in trainer.wrapped.held_tensors()["gradients"]]
        assert memory
        del trainer, model
        if not number:
            del optimizer
        gc.collect()
        assert [where() for where in kept] == [None] * 3
        assert all(where() is None for where in memory)
        assert not any(p._post_accumulate_grad_hooks for p in parameters)
        assert not any(isinstance(p.grad, UsedGradient) for p in parameters)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    free = communicator_pool.take(group)
    free.give_back()
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=group)
    assert communicator_pool.take(group) is not free
    del wrapped
    assert communicator_pool.take(group) is free


def test_another_model_trains_after_a_pass_that_was_cut_short(comm) -> None:
    """The garbage collector may have found the first one, or not."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    gc.disable()
    try:
        for _ in range(3):
            model = made(make)
            wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
            model[0].weight.register_hook(fail)  # when other buckets have been launched
            with pytest.raises(ArithmeticError):
                wrapped(data(comm.rank)).sum().backward()
            del model, wrapped
            follow(comm, make, lambda m, rank: m(data(rank)).square().sum(), bucket_cap_mb=1e-5)
    finally:
        gc.enable()


@pytest.mark.parametrize("hook", [None, comm_hooks.allreduce], ids=["", "hook"])
def test_two_wrappers_whose_buckets_fill_in_another_order_on_each_rank(comm, hook: Any) -> None:
    class Skips(Several):
        def forward(self, x, skip):  # type: ignore[override]
            return super().forward(x, (1, 2) if skip else (0, 1, 2))

    def loss(first: Any, second: Any, rank: int) -> torch.Tensor:
        return second(first(data(rank), rank == 0), rank == 1).sum()

    models = [made(Skips) for _ in range(2)]
    wrapped = [mpidl.DistributedDataParallel(m, process_group=comm, find_unused_parameters=True) for m in models]
    for each in wrapped if hook is not None else []:
        each.register_comm_hook(comm, hook)
    for _ in range(2):
        for model in models:
            model.zero_grad()
        loss(*wrapped, comm.rank).backward()
    expected: list[dict[str, Any]] = [{}, {}]
    for rank in range(comm.size):
        plain = [made(Skips) for _ in range(2)]
        loss(*plain, rank).backward()
        for found, model in zip(expected, plain, strict=True):
            for name, p in model.named_parameters():
                share = torch.zeros_like(p) if p.grad is None else p.grad / comm.size
                found[name] = found.get(name, 0) + share
    if comm.size > 2:  # with fewer, some parameters are reached by none
        for model, gradients in zip(models, expected, strict=True):
            check(model, gradients)


class Shares(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(self.shared(x)))


@pytest.mark.parametrize("as_views", [True, False], ids=["views", "own"])
def test_wrappers_that_share_a_layer_each_average_this_ranks_gradient(comm, as_views: bool) -> None:
    """However early the other one reduces."""

    def make() -> nn.Module:
        shared = nn.Linear(3, 3)
        return nn.ModuleList([Shares(shared), Shares(shared)])

    def loss(models: Any, rank: int) -> torch.Tensor:
        inner, outer = models
        return outer(inner(data(rank))).square().sum()

    def reduces_at_once(_: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen.setdefault(p, []).append(gradient.clone())
        bucket.buffer().mul_(10)
        return comm_hooks.completed()

    seen: dict[torch.Tensor, list[torch.Tensor]] = {}
    model, alone = made(make), made(make)
    loss(alone, comm.rank).backward()
    shared = [(p, q.grad) for p, q in zip(model[0].shared.parameters(), alone[0].shared.parameters(), strict=True)]
    wrapped = [mpidl.DistributedDataParallel(m, process_group=comm, gradient_as_bucket_view=as_views) for m in model]
    for each in wrapped:
        each.register_comm_hook(None, reduces_at_once)
    for _ in range(3):
        seen.clear()
        model.zero_grad()
        loss(wrapped, comm.rank).backward()
        for p, expected in shared:
            torch.testing.assert_close(seen[p], [expected, expected])
            torch.testing.assert_close(p.grad, 10 * expected)
    del wrapped[0], each
    model.zero_grad()
    loss([model[0], *wrapped], comm.rank).backward()
    buckets = {flat.untyped_storage().data_ptr() for flat in wrapped[0].held_tensors()["gradients"]}
    assert all((p.grad.untyped_storage().data_ptr() in buckets) == as_views for p, _ in shared)


def test_freezing_on_one_rank_is_an_error_on_all(comm) -> None:
    if comm.size == 1:
        return
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    if comm.rank == 0:
        model.layers[1].weight.requires_grad_(False)
    loss = whole(wrapped, comm.rank)
    with pytest.raises(mpidl.ModelMismatch, match=r"layers\.1\.weight.*frozen"):
        loss.backward()


@pytest.mark.ranks(2, 3, 4)
def test_freezing_for_the_forward_pass_on_one_rank_is_an_error_on_all(comm) -> None:
    """The models are equal again when the ranks compare them."""
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    whole(wrapped, comm.rank).backward()
    for change in (
        lambda m, frozen: m.layers[1].requires_grad_(not frozen),
        lambda m, on: m.double() if on else m.float(),
    ):
        if comm.rank == 0:
            change(model, True)
        x = data(comm.rank).to(model.layers[0].weight.dtype)
        loss = wrapped(x, (0, 1, 2)).sum()
        change(model, False)
        with pytest.raises(mpidl.ModelMismatch, match="last forward passes found different parameters that train"):
            loss.backward()
    model.zero_grad()
    whole(wrapped, comm.rank).backward()
    check(model, mean_gradients(Several, whole, comm.size))


def test_freezing_and_unfreezing_around_no_sync(comm) -> None:
    """A gradient under no_sync is averaged, though the next pass does not reach it, or it trains no longer."""
    model = made(Several)
    model.layers[2].requires_grad_(False)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    with wrapped.no_sync():
        whole(wrapped, comm.rank).backward()
        model.layers[2].requires_grad_(True)
        whole(wrapped, comm.rank).backward()
    model.layers[0].requires_grad_(False)
    wrapped(data(comm.rank), (1,)).sum().backward()
    expected: dict[str, torch.Tensor] = {}
    for rank in range(comm.size):
        plain = made(Several)
        plain.layers[2].requires_grad_(False)
        whole(plain, rank).backward()
        plain.layers[2].requires_grad_(True)
        whole(plain, rank).backward()
        plain.layers[0].requires_grad_(False)
        plain(data(rank), (1,)).sum().backward()
        for name, p in plain.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad / comm.size
    check(model, expected)


def test_outputs_that_are_parameters_gather_no_hooks(comm) -> None:
    class Gives(Several):
        def forward(self, x, order):  # type: ignore[override]
            return super().forward(x, order), self.layers[0].weight

    model = made(Gives)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for _ in range(3):
        model.zero_grad()
        out, weight = wrapped(data(comm.rank), (0, 1, 2))
        (out.sum() + weight.sum()).backward()
    assert not model.layers[0].weight._backward_hooks


class Keeps(Several):
    """Its loss does not come from its output."""

    def forward(self, x, order=(0, 1, 2)):  # type: ignore[override]
        self.kept = super().forward(x, order)
        return x.sum()


def kept(m: Any, rank: int) -> torch.Tensor:
    m(data(rank))
    return getattr(m, "module", m).kept.sum()


@pytest.mark.parametrize("of", ["wrapper", "deepcopy"])
def test_a_pass_that_begins_with_a_parameter(comm, of: str) -> None:
    """Also of a copy, which begins anew, and with parameters that have come to train since the last one."""

    def make() -> nn.Module:
        model = Keeps()
        model.layers[1:].requires_grad_(False)
        return model

    model = made(make)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    if of == "deepcopy":
        wrapped = copy.deepcopy(wrapped)
    kept(wrapped, comm.rank).backward()
    check(wrapped.module, mean_gradients(make, kept, comm.size))
    wrapped.zero_grad()
    wrapped.module.requires_grad_(True)
    kept(wrapped, comm.rank).backward()
    check(wrapped.module, mean_gradients(Keeps, kept, comm.size))


def test_what_trains_is_that_of_the_forward_pass(comm) -> None:
    """A discriminator may be frozen for the generator's forward pass alone."""
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    x = data(comm.rank).requires_grad_()
    for _ in range(2):
        model.zero_grad()
        whole(wrapped, comm.rank).backward()
        check(model, mean_gradients(Several, whole, comm.size))
        model.zero_grad()
        model.requires_grad_(False)
        out = wrapped(x, (0, 1, 2)).sum()
        model.requires_grad_(True)
        out.backward()
        assert all(p.grad is None for p in model.parameters())


def test_copies_that_differ_over_the_ranks_are_refused(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm)
    twin = copy.deepcopy(wrapped)
    with torch.no_grad():
        twin.module.layers[1].bias.add_(comm.rank)
    loss = whole(twin, comm.rank)
    if comm.size == 1:
        loss.backward()
        return
    with pytest.raises(mpidl.ModelMismatch, match=r"copies .* different parameters: layers\.1\.bias on rank"):
        loss.backward()
    gc.collect()  # what the error referred to: the refused pass counts as interrupted from here on
    anew = mpidl.DistributedDataParallel(twin.module, process_group=comm)
    for change in (comm.rank, -comm.rank):
        with torch.no_grad():
            anew.module.layers[1].bias.add_(change)
        anew.zero_grad()
        whole(anew, comm.rank).backward()  # of which the refused copy, that would compare the ranks, hears nothing
    anew.zero_grad()
    whole(anew, comm.rank).backward()
    check(anew.module, mean_gradients(Several, whole, comm.size))


@pytest.mark.parametrize("by", ["pass", "join", "steps"])
def test_a_copy_averages_what_passes_under_no_sync_gave_before_its_first_other_one(comm, by: str) -> None:
    """Though that pass reaches other parameters, on all ranks."""

    def loss(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (0, 1)).sum()

    def later(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (1,)).sum()

    def both(m: Any, rank: int) -> torch.Tensor:
        return loss(m, rank) + later(m, rank)

    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm, find_unused_parameters=True)
    twin = copy.deepcopy(wrapped)
    assert not twin.accumulated_under_no_sync
    with twin.no_sync():
        loss(twin, comm.rank).backward()
    layers = twin.module.layers
    assert twin.accumulated_under_no_sync == {*layers[0].parameters(), *layers[1].parameters()}
    if by == "join":
        with twin.join():
            later(twin, comm.rank).backward()
    elif by == "steps":
        twin.step_in_backward(torch.optim.SGD(layers[2].parameters(), lr=0.1))
        later(twin, comm.rank).backward()
    else:
        later(twin, comm.rank).backward()
    check(twin.module, mean_gradients(Several, both, comm.size))
    assert not twin.accumulated_under_no_sync
