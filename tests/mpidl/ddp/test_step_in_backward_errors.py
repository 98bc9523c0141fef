"""DDP's step within the backward pass: what is refused, and how training goes on after an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.stepping import several
from tests.mpidl.step_in_backward import CallsBlocksTwice, Counts, Decays, ReadsLastWeight, check_equal
from tests.mpidl.zero.reference import Several, data, made

pytestmark = pytest.mark.mpi


def test_a_pass_before_step_is_refused(comm) -> None:
    """Also the second one of a forward pass, and on every rank where one has not stepped."""
    model, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    ddp(data(comm.rank)).sum().backward()
    optimizer.zero_grad()
    if comm.rank < comm.size - 1:
        optimizer.step()
    loss = ddp(data(comm.rank)).sum()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mpidl.TrainingError, match=r"step\(\) was not called after it.*no_sync"):
        loss.backward()
    check_equal(before, model.state_dict())
    optimizer.step()
    first, second = (lambda x: (x[:, 0], x[:, 1]))(ddp(data(comm.rank)))
    first.sum().backward(retain_graph=True)
    with pytest.raises(mpidl.TrainingError, match=r"step\(\) was not called after it.*no_sync"):
        second.sum().backward()
    loss = ddp(data(comm.rank)).sum()
    with pytest.raises(mpidl.TrainingError, match="was not called after it"), ddp.no_sync():
        loss.backward()
    optimizer.step()
    ddp(data(comm.rank)).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_needs_all_gradients_is_refused(comm) -> None:
    model, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    scalers = [mpidl.GradScaler(process_group=comm), torch.amp.GradScaler("cpu")]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    ddp(data(comm.rank)).sum().backward()
    calls: dict[str, Callable[[], Any]] = {
        "torch's clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "torch's clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "clip_grad_norm_": lambda: mpidl.clip_grad_norm_(model, 1.0),
        "clip_grad_value_": lambda: mpidl.clip_grad_value_(model, 1.0),
        "find": lambda: mpidl.find_nonfinite_gradients(ddp, comm),
        "scaler": lambda: scalers[0].step(optimizer),
        "torch's scaler": lambda: scalers[1].step(optimizer),
        "reading": lambda: model.head.bias.grad + 1,
        "changing": lambda: model.head.bias.grad.mul_(2),
        "a copy": lambda: copy.deepcopy(model.head.bias.grad),
        "memory": lambda: np.from_dlpack(model.head.bias.grad),
        "torch's memory": lambda: torch.from_dlpack(model.head.bias.grad),
        "other values": lambda: setattr(model.head.bias.grad, "data", torch.zeros(2)),
    }
    for call in calls.values():
        with pytest.raises(mpidl.TrainingError, match="backward pass has made the step"):
            call()
    assert model.head.bias.grad.shape == (2,)
    assert "head.bias" in repr(model.head.bias.grad)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(mpidl.ConfigurationError, match="on_nan: got 'skip', but with step_in_backward"):
        mpidl.NonfiniteGuard(ddp, on_nan="skip")
    guard = mpidl.NonfiniteGuard(ddp, on_nan="stop")
    assert guard.allows(1.0)
    with pytest.raises(mpidl.TrainingError, match="the loss is nan"):
        guard.allows(float("nan"))
    with pytest.raises(mpidl.ConfigurationError, match=r"join: .*step_in_backward"), ddp.join():
        pass
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(mpidl.TrainingError, match="create_graph=True"):
        ddp(data(comm.rank)).sum().backward(create_graph=True)


class TakesAll(torch.optim.SGD):
    """Its step on a parameter depends on the other parameters."""

    def step(self, closure: Any = None) -> Any:
        given = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.nn.utils.get_total_norm(given)
        for gradient in given:
            gradient.div_(total)
        return super().step(closure)


def test_what_cannot_step_on_a_bucket_is_refused(comm) -> None:
    model, ddp, _ = several(comm)
    own, stranger = list(model.parameters()), nn.Linear(2, 2)
    averager = mpidl.optim.PeriodicAverager(own, comm)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.optim.LBFGS(own), "LBFGS cannot step on a bucket"),
        (lambda: mpidl.optim.PostLocalSGDOptimizer(torch.optim.SGD(own), averager), "averages weights in some; give"),
        (lambda: Counts(own), "Counts changes count of its groups"),
        (lambda: Decays(own), "Decays steps differently on one parameter at a time"),
        (lambda: TakesAll(own), "a step of TakesAll on a parameter depends on the other parameters"),
        (lambda: torch.optim.SGD([*own, *stranger.parameters()]), r"shape \(2, 2\) that is none of the module's"),
        (lambda: torch.optim.SGD(own, differentiable=True), "differentiable=True"),
        (lambda: "SGD", "got str; needs optimizers"),
    ]
    for make, match in cases:
        with pytest.raises(mpidl.ConfigurationError, match=match):
            ddp.step_in_backward(make())
    with pytest.raises(mpidl.ConfigurationError, match=r"blocks\.0\.inner\.weight in two optimizers"):
        ddp.step_in_backward(torch.optim.SGD(own), torch.optim.SGD(own[:1]))
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match=r"SGD of 8 parameters.*SGD of 7 parameters"):
            ddp.step_in_backward(torch.optim.SGD(own[int(comm.rank > 0) :]))
        with pytest.raises(mpidl.ConfigurationError, match="got str"):
            ddp.step_in_backward(torch.optim.SGD(own) if comm.rank else "SGD")  # type: ignore[arg-type]
    assert not ddp.steps_in_backward


def test_errors_are_those_of_the_pass_without_it(comm) -> None:
    model, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    with pytest.raises(mpidl.TrainingError, match=r"gave no gradient to blocks\.2\.inner"):
        ddp(data(comm.rank), (0, 1)).sum().backward()
    optimizer.step()

    def hook(p: torch.Tensor) -> None:
        if comm.rank == comm.size - 1:
            p.grad = None

    model, ddp, optimizer = several(comm)
    ddp = mpidl.DistributedDataParallel(model, process_group=comm)
    ddp.step_in_backward(optimizer)
    model.blocks[0].inner.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(mpidl.TrainingError, match=rf"gradient was taken away.*rank {comm.size - 1}"):
        ddp(data(comm.rank)).sum().backward()


def test_training_goes_on_after_an_error_of_the_optimizer(comm) -> None:
    model, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    rate = optimizer.param_groups[0]["lr"]
    for step in range(3):
        optimizer.param_groups[0]["lr"] = "fast" if step == 1 else rate
        loss = ddp(data(comm.rank, step)).square().sum()
        if step == 1:
            with pytest.raises(TypeError):
                loss.backward()
            optimizer.zero_grad()
        else:
            loss.backward()
        optimizer.step()
    everyone = mpidl.all_gather_object(comm, model.state_dict())
    assert all(p.grad is None for p in model.parameters())
    for other in everyone:
        check_equal(other, everyone[0])


def own_gradients(ddp: mpidl.DistributedDataParallel, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Computes this rank's gradients, without an average."""
    plain = copy.deepcopy(ddp.module)
    plain.zero_grad()
    plain(x).square().sum().backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def check_training(comm, ddp: mpidl.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Training from here on has the bits of training without steps within the pass."""
    other, plain, after = several(comm)
    other.load_state_dict(ddp.module.state_dict())
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(10, 13):
        for called, o in ((ddp, optimizer), (plain, after)):
            called(data(comm.rank, step)).square().sum().backward()
            o.step()
            o.zero_grad()
        check_equal(ddp.module.state_dict(), other.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [0, 4])
def test_training_goes_on_after_an_error_of_a_communication_hook(comm, number: int) -> None:
    """The gradients of the bucket are not lost, nor is its buffer. number: of the bucket."""
    failing: list[nn.Parameter] = []
    raises = False

    def hook(_: Any, bucket: mpidl.comm_hooks.GradBucket) -> Any:
        if raises and bucket.index() == number:
            failing[:] = bucket.parameters()
            raise ArithmeticError
        return mpidl.comm_hooks.allreduce(comm, bucket)

    model, ddp, optimizer = several(comm)
    ddp.register_comm_hook(None, hook)
    ddp.step_in_backward(optimizer)
    for step, raises in enumerate((False, True, True, True, False)):
        own = own_gradients(ddp, data(comm.rank, step))
        loss = ddp(data(comm.rank, step)).square().sum()
        if raises:
            with pytest.raises(ArithmeticError):
                loss.backward()
            assert failing
            for name, p in model.named_parameters():
                if any(p is other for other in failing):
                    assert torch.equal(p.grad, own[name])
            optimizer.zero_grad()
        else:
            loss.backward()
        optimizer.step()
    check_training(comm, ddp, optimizer)


class Interrupted:
    """A handle of which the first waits are interrupted. times: how many; shared."""

    def __init__(self, handle: Any, times: list[int], under_way: set[Any]) -> None:
        self.handle, self.times, self.under_way = handle, times, under_way
        under_way.add(self)

    def wait(self) -> Any:
        if self.times[0]:
            self.times[0] -= 1
            raise KeyboardInterrupt
        result = self.handle.wait()
        self.under_way.discard(self)
        return result


@pytest.mark.ranks(2)
def test_an_operation_is_waited_for_after_interrupts(comm) -> None:
    """One in the pass, and one as the pass is given up: no buffer is filled before its operation has ended."""
    times: list[int] = [0]
    under_way: set[Any] = set()

    def hook(_: Any, bucket: mpidl.comm_hooks.GradBucket) -> Interrupted:
        where = bucket.buffer().data_ptr()
        assert all(each.where != where for each in under_way)
        made = Interrupted(mpidl.comm_hooks.allreduce(comm, bucket), times, under_way)
        made.where = where
        return made

    _, ddp, optimizer = several(comm)
    ddp.register_comm_hook(None, hook)
    ddp.step_in_backward(optimizer)
    for _ in range(2):
        times[0] = 2
        loss = ddp(data(comm.rank)).square().sum()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        assert len(under_way) == 2
        with pytest.raises(KeyboardInterrupt):
            ddp(data(comm.rank))
        assert len(under_way) == 2
        ddp(data(comm.rank)).square().sum().backward()
        assert not under_way
        optimizer.step()
        optimizer.zero_grad()
    check_training(comm, ddp, optimizer)


class Fails:
    """A handle whose operation ends, and then its wait raises."""

    def __init__(self, handle: Any, waits: list[Any]) -> None:
        self.handle, self.waits = handle, waits

    def wait(self) -> None:
        self.handle.wait()
        self.waits.append(self)
        raise ArithmeticError


@pytest.mark.ranks(2)
def test_errors_of_several_handles(comm) -> None:
    """Those in flight are all waited for, of two dtypes; the first error of these is raised as the pass is given up."""
    waits: list[Any] = []
    begun: list[Any] = []
    raises = False

    def hook(_: Any, bucket: mpidl.comm_hooks.GradBucket) -> Any:
        handle = mpidl.comm_hooks.allreduce(comm, bucket)
        if not raises:
            return handle
        begun.append(Fails(handle, waits))
        return begun[-1]

    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(3, 3, dtype=d) for d in 2 * [torch.float32, torch.float64]])

    model = made(make)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x

    ddp = mpidl.DistributedDataParallel(Sums(), process_group=comm, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp.step_in_backward(optimizer)
    for raises in (False, True, False):
        loss = ddp(data(comm.rank)).square().sum()
        if raises:
            with pytest.raises(ArithmeticError):
                loss.backward()
            assert len(begun) > 3
            with pytest.raises(ArithmeticError):
                ddp(data(comm.rank))
            assert set(begun) == set(waits)
            optimizer.zero_grad()
        else:
            loss.backward()
        optimizer.step()
    everyone = mpidl.all_gather_object(comm, model.state_dict())
    check_equal(everyone[0], everyone[-1])


def test_an_error_of_one_optimizer_leaves_no_gradient_in_a_buffer(comm) -> None:
    model = made(Several)
    ddp = mpidl.DistributedDataParallel(model, process_group=comm)
    parts = model.blocks.parameters(), model.head.parameters()
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    ddp.step_in_backward(*optimizers)
    for o in optimizers:
        o.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        ddp(data(comm.rank)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_late_gradients_are_refused(comm) -> None:
    model = made(CallsBlocksTwice)
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6)
    ddp.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mpidl.TrainingError, match="a gradient arrived twice"):
        ddp(data(comm.rank).requires_grad_()).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_weights_read_after_their_gradient_are_an_error_of_torch(comm, fused: bool) -> None:
    model = made(lambda: ReadsLastWeight(6))
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6)
    ddp.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        ddp(data(comm.rank).requires_grad_()).sum().backward()
