"""ZeRO over passes and steps: accumulation, evaluation between, failures in the middle, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from tests.mpidl.zero.reference import (
    SETTINGS,
    SGD,
    Plain,
    Several,
    after_failure,
    check,
    data,
    engine,
    follow,
    made,
    plainly,
)
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi


@every_way
@pytest.mark.parametrize("quiet", [False, True], ids=["reduced-each-time", "no_sync"])
def test_gradient_accumulation_over_different_graphs(comm, way: str, quiet: bool) -> None:
    """Three passes a step, each of which reaches other units."""
    orders = [(0, 1), (2,), (1, 0, 1)]

    def loss(m: Any, rank: int, step: int, micro: int) -> torch.Tensor:
        return m(data(rank, 10 * step + micro), orders[micro]).square().sum()

    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    for step in range(3):
        for micro in range(3):
            if quiet and micro < 2:
                with optimizer.no_sync():
                    loss(model, comm.rank, step, micro).backward()
            else:
                loss(model, comm.rank, step, micro).backward()
        plain.step(lambda m, rank, step=step: [loss(m, rank, step, micro).backward() for micro in range(3)])
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)


@every_way
def test_backward_through_a_graph_older_than_a_step_is_an_error_of_torchs(comm, way: str) -> None:
    """With a plain model, too, the graph holds the weights before."""
    model, optimizer = engine(comm, Several, way)
    loss = plainly(model, comm.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    plainly(model, comm.rank, 1).backward()
    optimizer.step()


@every_part
def test_a_step_on_gradients_that_were_never_reduced_is_refused(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    with optimizer.no_sync():
        plainly(model, comm.rank, 0).backward()
    with pytest.raises(mpidl.TrainingError, match="no_sync"):
        optimizer.step()
    with pytest.raises(mpidl.TrainingError, match="no_sync"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several)


@every_part
def test_two_backward_passes_through_one_graph(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)

    def twice(m: Any, rank: int) -> None:
        loss = plainly(m, rank, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(2):
        plain.step(twice)
        twice(model, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)


@every_part
def test_evaluation_between_forward_and_backward(comm, way: str) -> None:
    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        out = m(data(rank, step))
        with torch.no_grad():
            m(data(9), (2, 1))
        return out.square().sum()

    follow(comm, way, Several, loss)


@every_part
@pytest.mark.parametrize("where", ["forward", "backward", "head", "output"])
def test_an_exception_in_the_middle_of_a_pass(comm, way: str, where: str) -> None:
    """All ranks see it; what was launched is awaited, and the next step is right."""
    model, optimizer = engine(comm, Several, way)

    def fail(*_: Any) -> None:
        raise RuntimeError("deliberate")

    if where == "forward":
        handle = model.blocks[1].inner.register_forward_hook(fail)
    elif where == "backward":
        handle = model.blocks[0].inner.bias.register_hook(fail)
    elif where == "head":
        handle = model.head.register_full_backward_hook(fail)
    else:
        handle = model.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="deliberate"):
        plainly(model, comm.rank, 0).backward()
    handle.remove()
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several)


@every_part
def test_an_exception_after_a_pass_that_was_reduced(comm, way: str) -> None:
    """zero_grad, and not the next forward pass, comes first after the failure; the state that it finds is old."""
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    handle = model.blocks[0].inner.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plainly(model, comm.rank, 1).backward()
    handle.remove()
    optimizer.zero_grad()
    with optimizer.gathered(), torch.no_grad():
        for p in model.parameters():
            p.add_(0.0)
    after_failure(comm, model, optimizer, Several)


@every_part
def test_gradients_of_gradients_are_refused(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    with pytest.raises(mpidl.TrainingError, match="create_graph=True"):
        plainly(model, comm.rank, 0).backward(create_graph=True)
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several)


@every_part
def test_gradients_by_transforms_are_no_pass(comm, way: str) -> None:
    """torch.func's gradients of functions of other tensors, as of each sample by itself."""
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)

    def each(m: nn.Module) -> dict[str, torch.Tensor]:
        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(m, weights, (x[None],)).square().sum()

        weights = {name: p.detach() for name, p in m.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, data(comm.rank))

    for step in range(2):
        with optimizer.gathered(writable=False):
            found = each(model)
        expected = each(plain.model)
        for name, gradients in expected.items():
            torch.testing.assert_close(found[name], gradients, rtol=1e-5, atol=1e-6)
        plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
        plainly(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)


@every_part
def test_sparse_gradients_are_refused_by_name(comm, way: str) -> None:
    class Words(Several):
        def __init__(self, sparse: bool = True) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=sparse)

        def forward(self, x):
            return super().forward(F.embedding((x * 5).long() % 5, self.table.weight, sparse=True).sum(1))

    model = made(Words)
    with pytest.raises(mpidl.ConfigurationError, match=r"table\.weight.*sparse=True"):
        mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)
    model, optimizer = engine(comm, lambda: Words(False), way)
    with pytest.raises(mpidl.TrainingError, match=r"table\.weight.*sparse"):
        plainly(model, comm.rank, 0).backward()
    optimizer.zero_grad()


@every_part
def test_parameters_read_and_changed_in_gathered(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    for step in range(2):
        with torch.no_grad():
            for m in (model, plain.model):
                with optimizer.gathered(m.blocks[1]) if m is model else torch.no_grad():
                    m.blocks[1].inner.weight.mul_(0.5)
        plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
        plainly(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain.model)


@every_part
def test_copies_are_refused_with_the_reason(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: copy.copy(optimizer),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(optimizer),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=r"state_dict.*mpidl\.optim\.EMA"):
            attempt()
    after_failure(comm, model, optimizer, Several)


@every_part
def test_a_part_of_a_model_is_not_pickled_either(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    with pytest.raises(mpidl.errors.MpidlError, match=r"nor pickled|sharded over the ranks"):
        pickle.dumps(model.blocks[0].inner)
    after_failure(comm, model, optimizer, Several)


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails while `now` says so."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Fails.now:
            raise ValueError("no gradient")
        return gradient


@every_part
def test_training_of_parts_goes_on_after_an_exception_in_backward(comm, way: str, monkeypatch) -> None:
    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        x = _Fails.apply(m.blocks[0](data(rank, step).requires_grad_()))
        return m.head(m.blocks[2](m.blocks[1](x))).square().sum()

    model, optimizer = engine(comm, Several, way)
    for _ in range(2):
        monkeypatch.setattr(_Fails, "now", True)
        with pytest.raises(ValueError, match="no gradient"):
            loss(model, comm.rank, 7).backward()
        monkeypatch.setattr(_Fails, "now", False)
        optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several, loss, steps=3)


@every_part
def test_backward_after_loading_is_torchs_error_on_every_rank(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    state = optimizer.model_state_dict()
    older = plainly(model, comm.rank, 0)
    optimizer.load_model_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several)
