"""Passes that an exception or an interrupt cuts short, after which a program goes on: nothing is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import Compression
from mpidl.errors import TrainingError
from mpidl.gradients.compression.pipeline import PipelinedReduction
from tests.mpidl.zero import reference as zero

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
every_engine = pytest.mark.parametrize("engine", ["ddp", "stage 1", "stage 2", "stage 3", "stage 3 gathered"])


class Training:
    """A model and its engine, DDP or a way of ZeRO, and a plain model that steps on the mean."""

    def __init__(self, comm, engine: str, hook: Any = None) -> None:
        self.rank, self.model = comm.rank, zero.made(zero.Several, comm.rank)
        self.set_to_none = engine != "ddp"  # each where a part of an old pass would be seen
        self.called: Any = self.model
        made: Any
        if engine == "ddp":
            self.called = made = mpidl.DistributedDataParallel(self.model, process_group=comm, bucket_cap_mb=1e-5)
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), **zero.SGD)
        else:
            self.optimizer = made = mpidl.ZeroOptimizer(
                self.model, torch.optim.SGD, process_group=comm, **zero.SETTINGS[engine], **zero.SGD
            )
        if hook is not None:
            made.register_comm_hook(None, hook)
        self.plain = zero.Plain(zero.Several, comm.size)

    def loss(self, step: int) -> torch.Tensor:
        """The loss of this rank's data; the gradients of the first block come later on all ranks but the first."""
        x = zero.data(self.rank, step)
        loss: torch.Tensor = self.called(x).square().sum()
        if self.rank > 0:
            loss.register_hook(lambda _: time.sleep(0.05))
        return loss

    def step(self, step: int, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> None:
        """Makes a step with both models."""
        self.plain.step(lambda m, rank: m(zero.data(rank, step)).square().sum().backward())
        backward(self.loss(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def check(self) -> None:
        """Raises AssertionError where the weights are not those of the plain model, on every rank."""
        check(self.model, self.optimizer, self.plain.model)


def check(model: nn.Module, optimizer: Any, expected: nn.Module) -> None:
    """Compares weights as `zero.check` does, also those that an optimizer of torch's has stepped."""
    if isinstance(optimizer, mpidl.ZeroOptimizer):
        zero.check(model, optimizer, expected)
        return
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-6, msg=name)


class FailsOnce:
    """A communication hook. `error` is raised by the next wait for bucket `of`, and then None."""

    def __init__(self, of: int) -> None:
        self.of, self.error = of, None

    def __call__(self, state: None, bucket: Any) -> Any:
        return _Handle(self, bucket.reduce(), bucket.index() == self.of)


class _Handle:
    def __init__(self, hook: Any, reduction: Any, fails: bool) -> None:
        self._hook, self._reduction, self._fails = hook, reduction, fails

    def wait(self) -> Any:
        error = self._hook.error
        if self._fails and error is not None:
            self._hook.error = None
            raise error
        return self._reduction.wait()


@every_engine
@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the hook")], ids=["interrupt", "error"])
def test_the_next_pass_is_whole_after_one_that_ended_in_a_wait(
    comm, engine: str, bucket: int, error: BaseException
) -> None:
    hook = FailsOnce(bucket)
    training = Training(comm, engine, hook)
    training.step(0)
    hook.error = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        training.loss(1).backward()
    training.optimizer.zero_grad(set_to_none=training.set_to_none)
    for step in (2, 3):
        training.step(step)
    training.check()


@every_engine
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_pass_that_was_refused_as_it_began_may_be_run_again_while_the_error_is_handled(comm, engine: str) -> None:
    training = Training(comm, engine)

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward(create_graph=True)
        except TrainingError:
            loss.backward()
        else:
            pytest.fail("the first pass is refused")

    training.step(0, backward)
    training.step(1)
    training.check()


@every_engine
def test_a_pass_after_a_forgotten_step_may_be_run_again_while_the_error_is_handled(comm, engine: str) -> None:
    model = zero.made(zero.Several)
    called: Any = model
    if engine == "ddp":
        called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
        optimizer: Any = torch.optim.SGD(model.parameters(), **zero.SGD)
        called.step_in_backward(optimizer)
    else:
        optimizer = mpidl.ZeroOptimizer(
            model, torch.optim.SGD, process_group=comm, step_in_backward=True, **zero.SETTINGS[engine], **zero.SGD
        )
    plain = zero.Plain(zero.Several, comm.size)
    for step in range(3):
        plain.step(lambda m, rank, step=step: m(zero.data(rank, step)).sum().backward())  # type: ignore[misc]
        loss = called(zero.data(comm.rank, step)).sum()
        try:
            loss.backward()
        except TrainingError:
            assert step == 1
            optimizer.step()
            loss.backward()
        if step > 0:
            optimizer.step()
    check(model, optimizer, plain.model)


class Product(nn.Module):
    """The gradient of both parameters is x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x + self.b * x).sum()


@pytest.mark.parametrize("settings", [{"error_feedback": False}, {"undo": True}], ids=["no remainders", "undo"])
def test_no_compressed_bucket_of_an_interrupted_pass_comes_in_a_later_one(
    comm, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Nor what the pass has left in the remainders, where they are kept to be undone."""
    interrupts: list[KeyboardInterrupt] = []
    wait = PipelinedReduction.wait

    def interrupted(*args: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return wait(*args)

    monkeypatch.setattr(PipelinedReduction, "wait", interrupted)
    compress = Compression("int8", where="everywhere", **settings)
    model = Product()
    called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.01, compress=compress)
    for step in range(6):
        value = 10.0**step
        model.zero_grad()
        loss = called(torch.full((5000,), value * (1 + comm.rank)))
        if step == 2:
            interrupts.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            continue
        loss.backward()
        for p in model.parameters():
            mean = torch.full_like(p, value * (1 + comm.size) / 2)
            torch.testing.assert_close(p.grad, mean, rtol=1e-2, atol=0)
