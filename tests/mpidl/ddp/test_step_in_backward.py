"""DDP's step within the backward pass: the bits of the step after it, and memory for a few buckets' gradients."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.memory.counted import storage_bytes
from tests.mpidl.ddp.stepping import several
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.step_in_backward import Deep, check_equal, decayed
from tests.mpidl.zero.reference import data, made

pytestmark = pytest.mark.mpi
SMALL = {"bucket_cap_mb": 0.002}


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adamw(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(decayed(model), lr=1e-2, weight_decay=0.1, **settings)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(decayed(model), lr=0.1, momentum=0.9, weight_decay=0.1)]


def one_each(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p], lr=1e-2) for p in model.parameters() if p.requires_grad]


def wholes(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), mpidl.optim.LAMB(rest, lr=1e-2)]


MAKE: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW, foreach": lambda model: adamw(model, foreach=True),
    "AdamW, fused": lambda model: adamw(model, fused=True),
    "SGD": sgd,
    "one each": one_each,
    "wholes": wholes,
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
}


def train(
    comm, in_backward: bool, model: str = "gpt2", optimizer: str = "AdamW", micro: int = 1, hook: str = "", **settings
) -> tuple[list[Any], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Losses, weights and the optimizers' states."""
    plain = fresh(MODELS[model], comm.rank)
    ddp = mpidl.DistributedDataParallel(plain, process_group=comm, **{**SMALL, **settings})
    if hook:
        ddp.register_comm_hook(comm, getattr(mpidl.comm_hooks, hook))
    optimizers = MAKE[optimizer](plain)
    if in_backward:
        ddp.step_in_backward(*optimizers)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    losses = []
    for step in range(3):
        for number in range(micro):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, number))
            with ddp.no_sync() if number < micro - 1 else contextlib.nullcontext():
                loss = ddp(x, y) / micro
                loss.backward()
            losses.append(loss.item())
        for o in optimizers:
            o.step()
        if in_backward:
            assert all(p.grad is None for p in plain.parameters())
        for o in optimizers:
            o.zero_grad()
        for schedule in schedules:
            schedule.step()
    return losses, plain.state_dict(), [o.state_dict() for o in optimizers]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"optimizer": "AdamW, foreach", "gradient_as_bucket_view": False},
        {"optimizer": "AdamW, fused", "static_graph": True},
        {"optimizer": "SGD", "micro": 2},
        {"optimizer": "one each"},
        {"optimizer": "wholes"},
        {"optimizer": "Adafactor"},
        {"model": "mixture", "find_unused_parameters": True},
        {"model": "mixture", "optimizer": "SGD", "static_graph": True, "micro": 2},
        {"model": "mixture", "find_unused_parameters": True, "bucket_cap_mb": 25},
        {"hook": "bf16_compress"},
    ],
    ids=str,
)
def test_the_bits_of_the_step_after_the_pass(comm, case: dict[str, Any]) -> None:
    check_equal(train(comm, True, **case), train(comm, False, **case))


def follow(
    comm, run: Callable[[mpidl.DistributedDataParallel, int], Any], part: str = "", steps: int = 3, **settings: Any
) -> None:
    """Weights after each step are those of the step after the pass. part: names of what steps within it."""
    models = [several(comm, **settings) for _ in range(2)]
    stepping, ddp, _ = models[0]
    chosen = [p for name, p in stepping.named_parameters() if name.startswith(part)]
    first = torch.optim.SGD(chosen, lr=0.1, momentum=0.9, weight_decay=0.1)
    rest = [p for name, p in stepping.named_parameters() if not name.startswith(part)]
    optimizers = [first, *([torch.optim.SGD(rest, lr=0.1, momentum=0.9, weight_decay=0.1)] if rest else [])]
    ddp.step_in_backward(first)
    for step in range(steps):
        run(ddp, step)
        for o in optimizers:
            o.step()
            o.zero_grad()
        run(models[1][1], step)
        models[1][2].step()
        models[1][2].zero_grad()
        check_equal(stepping.state_dict(), models[1][0].state_dict())


@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ranks_that_reach_other_parameters(comm, settings: dict[str, Any]) -> None:
    """Those that no rank reaches stay as they are, weight decay or not."""
    follow(comm, lambda ddp, step: ddp(data(comm.rank, step), (comm.rank % 2, 0)).square().sum().backward(), **settings)


def test_parameters_of_no_optimizer_keep_their_gradients(comm) -> None:
    def run(ddp: Any, step: int) -> None:
        ddp(data(comm.rank, step)).square().sum().backward()
        if ddp.steps_in_backward:
            norm = torch.nn.utils.clip_grad_norm_(ddp.module.blocks[1].parameters(), 1e9)
            assert norm > 0

    follow(comm, run, part="blocks.0")


def test_what_no_sync_alone_has_reached_is_stepped(comm) -> None:
    def run(ddp: Any, step: int) -> None:
        with ddp.no_sync():
            ddp(data(comm.rank, step), (0, 1)).square().sum().backward()
        ddp(data(comm.rank, step + 10), (2,)).square().sum().backward()

    follow(comm, run, find_unused_parameters=True)


@pytest.mark.parametrize("settings", [{}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(comm, settings: dict[str, Any], reentrant: bool) -> None:
    found = []
    for in_backward in (False, True):
        model = made(lambda: Deep(8, reentrant))
        ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)
        optimizer = torch.optim.AdamW(model.parameters())
        if in_backward:
            ddp.step_in_backward(optimizer)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank)).requires_grad_()
            ddp(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    check_equal(*found)


class Tables(nn.Module):
    """A sparse table, layers of three dtypes, and a function whose backward gives one of them nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.single, self.wide = nn.Linear(4, 4), nn.Linear(4, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.silent = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.single(self.table(tokens)) * self.scale
        return self.wide(x.double()) + GivesNothing.apply(self.silent)


class GivesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def test_sparse_gradients_dtypes_and_backwards_that_give_none(comm) -> None:
    found = []
    for in_backward in (False, True):
        model = made(Tables)
        ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
        dense = [p for p in model.parameters() if p is not model.table.weight]
        optimizers = [
            torch.optim.SparseAdam([model.table.weight], lr=0.1),
            torch.optim.SGD(dense, lr=0.1, weight_decay=0.1),
        ]
        if in_backward:
            ddp.step_in_backward(*optimizers)
        for step in range(3):
            tokens = torch.tensor([comm.rank, (comm.rank + step) % 9])
            ddp(tokens).square().sum().backward()
            for o in optimizers:
                o.step()
                o.zero_grad()
        assert model.silent.eq(1).all()
        found.append((model.state_dict(), [o.state_dict() for o in optimizers]))
    check_equal(*found)


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_gradients_take_a_few_buckets(comm, settings: dict[str, Any]) -> None:
    found = []
    for in_backward in (False, True):
        model = made(Deep)
        ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6, **settings)
        optimizer = torch.optim.AdamW(model.parameters())
        if in_backward:
            ddp.step_in_backward(optimizer)
        seen: list[int] = []

        def look(*_: Any, model: Any = model, ddp: Any = ddp, seen: list[int] = seen) -> None:
            given = [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]
            seen.append(storage_bytes([*given, *ddp.held_tensors()["gradients"]]))

        for block in model.blocks:
            block.register_full_backward_hook(look)
        for _ in range(2):
            del seen[:]  # in the first pass static_graph does not know yet what comes
            ddp(torch.randn(4, 32).requires_grad_()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert mpidl.memory.measure(ddp, optimizer).gradients == 0
        found.append(max(seen) / (4 * sum(p.numel() for p in model.parameters())))
    assert found[0] >= 1
    assert found[1] < 4 / 12


def test_a_closure(comm) -> None:
    model, ddp, optimizer = several(comm)
    other, plain, after = several(comm)
    ddp.step_in_backward(optimizer)
    for step in range(2):

        def closure(called: Any, step: int = step) -> torch.Tensor:
            loss = called(data(comm.rank, step)).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(lambda: closure(ddp)) == closure(plain)
        after.step()
        after.zero_grad()
        check_equal(model.state_dict(), other.state_dict())
    optimizer.step()  # without a pass


def test_two_passes_of_one_forward_pass_under_no_sync(comm) -> None:
    def run(ddp: Any, step: int) -> None:
        y = ddp(data(comm.rank, step))
        with ddp.no_sync():
            y[:, 0].sum().backward(retain_graph=True)
        y[:, 1].square().sum().backward()

    follow(comm, run)


def test_passes_under_no_sync_alone_make_no_step(comm) -> None:
    _, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    with ddp.no_sync():
        ddp(data(comm.rank)).sum().backward()
    with pytest.raises(mpidl.TrainingError, match="have not been reduced"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_on_and_off_between_passes(comm) -> None:
    """With gradients of an ordinary pass there, and other parameters to train."""
    model, ddp, optimizer = several(comm)
    other, plain, after = several(comm)

    def both(step: int, order: tuple[int, ...] = (0, 1, 2)) -> None:
        for called, o in ((ddp, optimizer), (plain, after)):
            called(data(comm.rank, step), order).square().sum().backward()
            o.step()
            o.zero_grad()
        check_equal(model.state_dict(), other.state_dict())

    both(0)
    ddp.step_in_backward(optimizer)
    both(1)
    for m in (model, other):
        m.blocks[0].requires_grad_(False)
    both(2)
    for m in (model, other):
        m.blocks[0].requires_grad_(True)
    both(3)
    ddp.step_in_backward()
    assert not ddp.steps_in_backward
    both(4)


def test_copies_begin_without_it_and_nothing_is_kept(comm) -> None:
    model, ddp, optimizer = several(comm)
    ddp.step_in_backward(optimizer)
    twin = copy.deepcopy(ddp)
    assert not twin.steps_in_backward
    own = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    twin.step_in_backward(own)
    for called, o in ((twin, own), (ddp, optimizer)):
        called(data(comm.rank)).sum().backward()
        o.step()
    check_equal(twin.module.state_dict(), model.state_dict())
    where = weakref.ref(ddp.held_tensors()["gradients"][0])
    del ddp, called
    gc.collect()
    assert where() is None
    model(data(comm.rank)).sum().backward()
    optimizer.step()  # an ordinary one
    with pytest.raises(AssertionError):
        check_equal(twin.module.state_dict(), model.state_dict())


@pytest.mark.ranks(2)
def test_buffers_of_rank_0_come_with_the_step(comm) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ddp = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp.step_in_backward(optimizer)
    ddp(data(comm.rank)).sum().backward()
    optimizer.step()
    everyone = mpidl.all_gather_object(comm, model[1].running_mean.tolist())
    assert all(each == everyone[0] for each in everyone)
