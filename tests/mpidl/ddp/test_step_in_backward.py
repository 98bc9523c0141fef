"""DDP's step within the backward pass: the bits of the step after it, a few buckets' gradients, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.memory.counted import storage_bytes
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.step_in_backward import CallsBlocksTwice, Counts, Decays, Deep, ReadsLastWeight, check_equal, decayed
from tests.mpidl.zero.reference import Several, data, made

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


def several(comm, **settings: Any) -> tuple[nn.Module, mpidl.DistributedDataParallel, torch.optim.SGD]:
    model = made(Several)
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)
    return model, ddp, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


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
        with pytest.raises(mpidl.TrainingError, match="with step_in_backward the backward pass has made the step"):
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
        (lambda: mpidl.optim.PostLocalSGDOptimizer(torch.optim.SGD(own), averager), "averages weights in them"),
        (lambda: Counts(own), "Counts changes count of its groups"),
        (lambda: Decays(own), "Decays makes other steps on one parameter after another"),
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
    with pytest.raises(mpidl.TrainingError, match=rf"gradient was taken away.*on rank {comm.size - 1}"):
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
    with pytest.raises(mpidl.TrainingError, match="a gradient arrived twice in one backward pass"):
        ddp(data(comm.rank).requires_grad_()).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_weights_read_after_their_gradient_are_an_error_of_torch(comm, fused: bool) -> None:
    model = made(lambda: ReadsLastWeight(6))
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6)
    ddp.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        ddp(data(comm.rank).requires_grad_()).sum().backward()


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
