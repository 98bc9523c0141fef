"""`.grad` under ZeRO: what is read from it and done to it, as with a plain model."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

import mpidl
from collectives import Communicator, MismatchError
from mpidl.memory import measure
from tests.mpidl.zero.methods.test_clipping import MAX
from tests.mpidl.zero.reference import Plain, Several, check, data, engine, made, plainly
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi


READINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm-1": lambda g: g.norm(1),
    "norm-inf": lambda g: torch.linalg.vector_norm(g, math.inf),
    "norm-data": lambda g: g.data.norm(2),
    "norm-detach": lambda g: torch.norm(g.detach()),
    "norm-double": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "norm-of-result": lambda g: (g * 2).norm(3),
    "largest-of-result": lambda g: torch.linalg.vector_norm(g.clone(), math.inf),
    "largest": lambda g: g.abs().max(),
    "least": lambda g: g.min(),
    "amax": lambda g: g.amax(),
    "sum": lambda g: g.sum(),
    "mean-of-squares": lambda g: (g**2).mean(),
    "squares": lambda g: g.pow(2).sum().sqrt(),
    "finite": lambda g: g.isfinite().all(),
    "nan": lambda g: torch.isnan(g).any(),
    "infinite": lambda g: torch.isinf(g).sum(),
    "nonzero": lambda g: torch.count_nonzero(g),
    "positive": lambda g: (g > 0).sum(),
    "product": lambda g: (g * g).sum(),
    "zeros": lambda g: torch.zeros_like(g).any(),
    "double": lambda g: g.double().sum(),
    "whole": lambda g: getattr(g, "full_tensor", g.clone)(),
    "whole-result": lambda g: getattr(g.abs(), "full_tensor", g.abs)(),
    "shape": lambda g: (g.shape, g.dtype, g.device, g.numel(), g.requires_grad, g.is_sparse),
}


@every_part
def test_what_is_read_is_that_of_one_process(comm, way: str) -> None:
    model, _ = engine(comm, Several, way)
    plain = made(Several)
    for rank in range(comm.size):
        (plainly(plain, rank, 0) / comm.size).backward()
    plainly(model, comm.rank, 0).backward()
    for name, read in READINGS.items():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            found, expected = read(p.grad), read(q.grad)
            if torch.is_tensor(expected):
                assert type(found) is torch.Tensor, name
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert found == expected, name


@every_part
def test_what_is_not_finite_is_seen_by_every_rank(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    for bad in (math.nan, math.inf):
        loss = plainly(model, comm.rank, 0)
        (loss * (bad if comm.rank == comm.size - 1 else 1.0)).backward()
        gradient = model.head.weight.grad
        assert not gradient.isfinite().all()
        for norm in (gradient.norm(), gradient.norm(math.inf), gradient.abs().max(), gradient.clone().norm(math.inf)):
            assert not math.isfinite(norm)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.zero_grad()


@every_part
def test_one_operation_for_all_norms_in_any_order(comm, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    calls: list[str] = []
    reduce = Communicator.all_reduce
    monkeypatch.setattr(Communicator, "all_reduce", lambda *a, **k: (calls.append("all_reduce"), reduce(*a, **k))[1])
    parameters = [*model.parameters()]
    norms = {p: p.grad.norm() for p in (parameters if comm.rank else parameters[::-1])}
    assert calls.count("all_reduce") == 1
    total = torch.stack([norms[p] for p in parameters]).norm()
    torch.testing.assert_close(clip_grad_norm_(parameters, 1e9), total)
    assert calls.count("all_reduce") == 1
    optimizer.clip_grad_norm_(float(total) / 2)
    torch.testing.assert_close(get_total_norm([p.grad for p in parameters]), total / 2)
    optimizer.step()


def test_it_needs_no_memory(comm) -> None:
    def gradients(read: bool) -> int:
        model, optimizer = engine(comm, Several, "stage 3")
        plainly(model, comm.rank, 0).backward()
        if read:
            clip_grad_norm_(model.parameters(), 1.0)
        assert all(isinstance(p.grad, mpidl.zero.ShardedGradient) for p in model.parameters())
        return measure(model, optimizer).gradients

    assert gradients(read=True) == gradients(read=False)


# ---- what is done to .grad ------------------------------------------------------------------------------------------


@every_way
def test_none_gives_a_gradient_up(comm, way: str) -> None:
    """Many loops set it for all parameters, in place of zero_grad."""
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)

    def both(step: int) -> None:
        for rank in range(comm.size):
            (plainly(plain.model, rank, step) / comm.size).backward()
        plainly(model, comm.rank, step).backward()

    for step in range(2):
        both(step)
        for each in (model, plain.model):
            each.blocks[0].zero_grad()
            each.head.bias.grad = None
        for each in (optimizer, plain.optimizer):
            each.step()
        check(model, optimizer, plain.model)
        both(step + 5)  # adds to those that are left
        clip_grad_norm_(model.parameters(), MAX)
        clip_grad_norm_(plain.model.parameters(), MAX)
        for each in (optimizer, plain.optimizer):
            each.step()
        check(model, optimizer, plain.model)
        for p in (*model.parameters(), *plain.model.parameters()):
            p.grad = None


@every_part
def test_none_under_no_sync(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    with optimizer.no_sync():
        plainly(model, comm.rank, 7).backward()
        assert model.head.weight.grad.shape == (2, 3)
        for p in model.parameters():
            p.grad = None
        plainly(model, comm.rank, 0).backward()
    with pytest.raises(mpidl.TrainingError, match="no_sync"):
        clip_grad_norm_(model.parameters(), 1.0)
    plainly(model, comm.rank, 1).backward()
    plain.step(lambda m, rank: [plainly(m, rank, step).backward() for step in (0, 1)])
    optimizer.step()
    check(model, optimizer, plain.model)


@every_part
def test_what_is_computed_of_it_may_become_it(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    for step in range(2):
        for rank in range(comm.size):
            (plainly(plain.model, rank, step) / comm.size).backward()
        plainly(model, comm.rank, step).backward()
        for p in (*model.parameters(), *plain.model.parameters()):
            kept = p.grad.clone()
            p.grad = torch.clamp(p.grad * 3, -0.1, 0.1)
            p.grad += kept
            p.grad.data.add_(1e-3).div_(2)
        optimizer.step()
        plain.optimizer.step()
        check(model, optimizer, plain.model)
        model.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters())
        plain.model.zero_grad(set_to_none=False)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", ["scaled", "none"])
def test_changes_that_differ_over_the_ranks_are_refused_at_the_step(comm, change: str) -> None:
    model, optimizer = engine(comm, Several, "stage 2")
    plainly(model, comm.rank, 0).backward()
    if change == "scaled":
        model.head.weight.grad.mul_(1.0 + comm.rank)
    elif comm.rank == 1:
        model.head.weight.grad = None
    with pytest.raises(mpidl.ModelMismatch, match=r"step: rank 0 .*rank 1 .*head\.weight"):
        optimizer.step()


@pytest.mark.ranks(2, 3)
def test_different_questions_are_an_error_on_every_rank(comm) -> None:
    model, _ = engine(comm, Several, "stage 3")
    plainly(model, comm.rank, 0).backward()
    for ask in (
        lambda p: p[comm.rank].grad.abs().max(),
        lambda p: p[0].grad.sum() if comm.rank else p[0].grad.max(),
        lambda p: p[0].grad.norm(1.0 + comm.rank),
        lambda p: p[comm.rank].grad.full_tensor(),
    ):
        with pytest.raises(mpidl.TrainingError, match="every rank must make the same calls"):
            ask(list(model.parameters()))
    assert model.head.weight.grad.norm() > 0


@pytest.mark.ranks(2)
def test_a_norm_on_one_rank_is_named_with_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    comm = Communicator()
    model, optimizer = engine(comm, Several, "stage 2")
    plainly(model, comm.rank, 0).backward()
    gradient = model.head.weight.grad
    if comm.rank == 0:  # what needs no other rank
        assert tuple(gradient.shape) == (2, 3)
        print(gradient)
    with pytest.raises(MismatchError, match="all_reduce"):
        gradient.norm() if comm.rank == 0 else optimizer.step()
    comm.close()


@every_part
def test_a_parameter_that_one_rank_reaches_has_a_gradient_on_all(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    order = (0, 1) if comm.rank == comm.size - 1 else (0,)
    model(data(comm.rank), order).sum().backward()
    assert model.blocks[1].inner.weight.grad is not None
    assert model.blocks[2].inner.weight.grad is None
    assert model.blocks[1].inner.weight.grad.norm() > 0
    optimizer.step()


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda g: g.view(-1),
    "std": lambda g: g.std(),
    r"add\.Tensor": lambda g: g + torch.ones(g.shape),
    r"mul_\.Tensor": lambda g: g.mul_(torch.ones(g.shape)),
    "linalg_vector_norm": lambda g: g.norm(dim=0),
    "a norm of order -1": lambda g: g.norm(-1),
    "sum": lambda g: g.sum(0),
    "max": lambda g: g.max(0),
    "normal_": lambda g: g.normal_(),
    "cat": lambda g: torch.cat([g, g]),
    "lerp_": lambda g: torch._foreach_lerp_([g], [torch.ones(3)], 0.5),
    "a copy": copy.deepcopy,
    "pickling": pickle.dumps,
}


def test_other_operators_are_refused_by_name(comm) -> None:
    model, optimizer = engine(comm, Several, "stage 3")
    plainly(model, comm.rank, 0).backward()
    gradient = model.head.weight.grad
    for name, operator in REFUSED.items():
        with pytest.raises(mpidl.TrainingError, match=rf"head\.weight: {name}.*optimizer\.gradients\(\)"):
            operator(gradient)
    assert "head.weight, shape=(2, 3)" in repr(gradient)
    model.to("cpu").float()
    optimizer.zero_grad()
    with pytest.raises(mpidl.TrainingError, match=r"head\.weight: .* forgotten"):
        gradient.norm()
    plainly(model, comm.rank, 0).backward()
    optimizer.step()


@every_part
def test_inside_a_pass_nothing_is_read_or_changed(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    acts: list[Callable[[torch.Tensor], Any]] = [lambda g: g.norm(), lambda g: g.mul_(2)]
    acts.append(lambda g: g.add_(torch.ones(g.shape)))
    for act in acts:

        def hook(p: torch.Tensor, act: Callable[[torch.Tensor], Any] = act) -> None:
            act(p.grad)  # type: ignore[arg-type]

        handle = model.head.weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(mpidl.TrainingError, match=r"head\.weight: .* inside a backward pass"):
            plainly(model, comm.rank, 1).backward()
        handle.remove()
        optimizer.zero_grad()
        plainly(model, comm.rank, 1).backward()
    optimizer.step()


@every_part
def test_a_pass_that_was_cut_short_is_not_stepped_on(comm, way: str) -> None:
    """Clipping would see none of its gradients."""

    def interrupt(_: torch.Tensor) -> None:
        raise KeyError("deliberate")

    model, optimizer = engine(comm, Several, way)
    handle = model.blocks[0].inner.bias.register_hook(interrupt)
    with pytest.raises(KeyError, match="deliberate"):
        plainly(model, comm.rank, 0).backward()
    handle.remove()
    clip_grad_norm_(model.parameters(), MAX)
    with pytest.raises(mpidl.TrainingError, match="cut short by an exception"):
        optimizer.step()
    optimizer.zero_grad()
    plain = Plain(Several, comm.size)
    plain.step(lambda m, rank: plainly(m, rank, 0).backward())
    plainly(model, comm.rank, 0).backward()
    optimizer.step()
    check(model, optimizer, plain.model)


# ---- with torch's own scaler and compiler, and checkpoints ----------------------------------------------------------


@every_part
def test_the_scaler_of_torch_decides_the_same_on_all_ranks(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2))
    for step in range(5):
        bad = math.inf if step in (1, 2) else 1.0
        for rank in range(comm.size):
            loss = plainly(plain.model, rank, step) * (bad if rank == comm.size - 1 else 1.0)
            plain_scaler.scale(loss / comm.size).backward()
        scaler.scale(plainly(model, comm.rank, step) * (bad if comm.rank == comm.size - 1 else 1.0)).backward()
        for each, used, of in ((scaler, optimizer, model), (plain_scaler, plain.optimizer, plain.model)):
            each.unscale_(used)
            clip_grad_norm_(of.parameters(), MAX)
            each.step(used)
            each.update()
            used.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale()
        check(model, optimizer, plain.model)


@pytest.mark.ranks(2)
def test_compiling_while_there_are_gradients(comm) -> None:
    torch._dynamo.reset()
    model, optimizer = engine(comm, Several, "stage 3")
    plain = Plain(Several, comm.size)
    plain.step(lambda m, rank: [plainly(m, rank, step).backward() for step in (0, 1)])
    plainly(model, comm.rank, 0).backward()
    plainly(torch.compile(model, backend="aot_eager"), comm.rank, 1).backward()
    optimizer.step()
    check(model, optimizer, plain.model)


@every_part
def test_gradients_that_a_checkpoint_brings_are_clipped(comm, way: str, tmp_path) -> None:
    path = mpidl.broadcast_object(comm, str(tmp_path))
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    mpidl.checkpoint.save(path, model, optimizer, step=1, micro_step=1)
    other, again = engine(comm, Several, way)
    plainly(other, comm.rank, 3).backward()
    mpidl.checkpoint.load(path, other, again)
    assert {name: float(p.grad.norm()) for name, p in other.named_parameters()} == pytest.approx(expected)
    norm = clip_grad_norm_(other.parameters(), MAX)
    assert float(norm) == pytest.approx(np.linalg.norm(list(expected.values())), rel=1e-5)


@every_way
@pytest.mark.limit(60)
def test_powers_that_overflow_are_no_error_where_numpy_raises(comm, way: str) -> None:
    """On one rank such an error would keep the others waiting."""
    model, optimizer = engine(comm, Several, way)
    for scale, order in [(1e30, 12.0), (1e-30, 12.0)]:
        (plainly(model, comm.rank, 0) * scale).backward()
        with np.errstate(all="raise"):
            assert optimizer.clip_grad_norm_(1.0, order) == (math.inf if scale > 1 else 0.0)
            for norm in (  # clipping by the first has made zeros of what was too large
                mpidl.clip_grad_norm_(model.parameters(), 1.0, order),
                float(clip_grad_norm_(model.parameters(), 1.0, order)),
            ):
                assert norm == 0.0
        optimizer.zero_grad()
