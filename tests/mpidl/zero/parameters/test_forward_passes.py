"""Forward passes that run, or that an interrupt has ended; and what stage 3 lets the program read meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from mpidl.zero.parameters.forward_passes import ForwardPasses
from tests.mpidl.zero.reference import Several, after_failure, data, engine, plainly


class Calls(nn.Module):
    """Calls a function, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.call: Callable[[], Any] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.call()
        return self.last(y)


def followed(*modules: nn.Module) -> ForwardPasses:
    passes = ForwardPasses()
    for module in modules:
        module.register_forward_pre_hook(lambda module, _: passes.begin(module))
        module.register_forward_hook(lambda module, *_: passes.end(module), always_call=True)
    return passes


def raises(error: type[BaseException]) -> Any:
    raise error


X = torch.ones(1, 3)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_pass_that_an_exception_has_ended_runs_no_more(error: type[BaseException]) -> None:
    model = Calls()
    passes = followed(model, model.first)
    seen: list[bool] = []
    model.call = lambda: [seen.append(passes.any_runs()), raises(error)]
    with pytest.raises(error) as kept:  # with its traceback, which keeps the frames
        model(X)
    assert seen == [True]
    assert not passes.any_runs()
    model.call = lambda: seen.append(passes.any_runs())
    model(X)
    assert seen == [True, True]
    assert not passes.any_runs()
    del kept


def test_a_pass_inside_a_pass_ends_alone() -> None:
    """Both are passes of one module, after an interrupted one. Some of the inner passes are interrupted too."""
    model = Calls()
    passes = followed(model)
    seen: list[tuple[str, bool]] = []

    def note(where: str) -> None:
        seen.append((where, passes.any_runs()))

    def inner(call: Callable[[], Any]) -> None:
        outer, model.call = model.call, call
        with suppress(KeyboardInterrupt):
            model(X)
        model.call = outer

    def outer() -> None:
        for call in (lambda: note("inside"), lambda: raises(KeyboardInterrupt)):
            inner(call)
            note("after")

    inner(lambda: raises(KeyboardInterrupt))
    inner(outer)
    assert seen == [("inside", True), ("after", True), ("after", True)]
    assert not passes.any_runs()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_backward_computes_again_runs(reentrant: bool) -> None:
    model = Calls()
    passes = followed(model)
    seen: list[bool] = []
    model.call = lambda: seen.append(passes.any_runs())
    y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert not passes.any_runs()
    y.sum().backward()
    assert seen == [True, True]
    assert not passes.any_runs()


def test_a_pass_of_another_thread_runs_until_that_ends_it() -> None:
    model = Calls()
    passes = followed(model)
    inside, go_on = threading.Event(), threading.Event()
    model.call = lambda: [inside.set(), go_on.wait()]
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    inside.wait()
    runs = passes.any_runs()
    go_on.set()
    thread.join()
    assert runs
    assert not passes.any_runs()


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("goes_on", ["reads", "steps", "evaluates", "evaluates a part"])
@pytest.mark.parametrize("training", [False, True])
def test_after_an_interrupt_a_weight_is_refused_outside_of_passes(comm, training: bool, goes_on: str) -> None:
    model, optimizer = engine(comm, Several, "stage 3 gathered")
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(training):
        model(data(comm.rank))
    handle.remove()
    if goes_on == "steps":
        plainly(model, comm.rank, 0).backward()
        optimizer.step()
        optimizer.load_model_state_dict(Several().state_dict())
    with torch.no_grad():
        if goes_on == "evaluates":
            model(data(comm.rank))
        elif goes_on == "evaluates a part":
            model.head(torch.ones(1, 3))
            assert not optimizer.stats()["whole_units"]
        if comm.size > 1:
            with pytest.raises(mpidl.TrainingError, match="norm of a parameter that is sharded"):
                model.blocks[2].inner.weight.norm()
    if goes_on != "steps":
        after_failure(comm, model, optimizer, Several)


class Twice(Several):
    """Calls itself, and reads a weight after that."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2), again: bool = True) -> torch.Tensor:
        if again:
            x = x + self(x, order, False).sum()
        return super().forward(x, order) * self.blocks[0].inner.weight.norm()


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_model_that_calls_itself_reads_weights_after_that(comm, interrupted: bool) -> None:
    model, optimizer = engine(comm, Twice, "stage 3 gathered")
    if interrupted:
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(data(comm.rank))
        handle.remove()
    with optimizer.gathered(writable=False):
        expected = model(data(comm.rank))
    with torch.no_grad():
        torch.testing.assert_close(model(data(comm.rank)), expected)
    after_failure(comm, model, optimizer, Twice)
