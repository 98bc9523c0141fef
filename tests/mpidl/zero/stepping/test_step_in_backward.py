"""The step within the backward pass: the bits of the step after it, a few buckets' gradients, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.memory.counted import storage_bytes
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.step_in_backward import CallsBlocksTwice, Counts, Decays, Deep, ReadsLastWeight, check_equal, decayed
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import every_way

pytestmark = pytest.mark.mpi
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAMW),
    "AdamW, foreach": (torch.optim.AdamW, {**ADAMW, "foreach": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}
HALF = mpidl.Precision(param_dtype=torch.bfloat16)
Groups = Callable[[nn.Module], Any]


def train(
    comm,
    way: str,
    in_backward: bool,
    model: str = "gpt2",
    optimizer: str = "AdamW",
    micro: int = 1,
    params: Groups = decayed,
    steps: int = 3,
    **settings: Any,
) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, weights and the optimizer's state, whole on rank 0."""
    made = fresh(MODELS[model], comm.rank)
    kind, given = OPTIMIZERS[optimizer]
    settings = {**zero.SETTINGS[way], **settings}
    if settings.get("bucket_cap_mb"):
        settings["bucket_cap_mb"] = 0.002
    zeros = mpidl.ZeroOptimizer(
        made, kind, params=params(made), process_group=comm, step_in_backward=in_backward, **settings, **given
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(zeros, lambda step: 1 / (1 + step))
    losses = []
    for step in range(steps):
        for number in range(micro):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, number))
            with zeros.no_sync() if number < micro - 1 else contextlib.nullcontext():
                loss = made(x, y) / micro
                loss.backward()
            losses.append(loss.item())
        zeros.step()
        zeros.zero_grad()
        schedule.step()
    return losses, zeros.model_state_dict(), zeros.state_dict()


@every_way
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"model": "mixture", "optimizer": "AdamW, foreach"},
        {"model": "mixture", "optimizer": "SGD"},
        {"optimizer": "SGD", "micro": 2},
        {"optimizer": "Adagrad"},
        {"precision": HALF},
        {"precision": mpidl.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "micro": 2},
    ],
    ids=str,
)
def test_the_bits_of_the_step_after_the_pass(comm, way: str, case: dict[str, Any]) -> None:
    check_equal(train(comm, way, True, **case), train(comm, way, False, **case))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["stage 2", "stage 3 gathered"])
def test_shards_in_groups(comm, way: str) -> None:
    groups = {"shard_group": comm.split(comm.rank // 2)} if comm.size % 2 == 0 else {}
    check_equal(train(comm, way, True, **groups), train(comm, way, False, **groups))


def peak(comm, way: str, in_backward: bool) -> tuple[float, float]:
    """Bytes of gradients, of all kinds, at their most within a pass and after it, by those of the parameters."""
    model = zero.made(Deep, comm.rank)
    settings = {**zero.SETTINGS[way], **({"bucket_cap_mb": 1e-6} if way in ("stage 1", "stage 2") else {})}
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.AdamW, process_group=comm, step_in_backward=in_backward, **settings, **ADAMW
    )
    seen = []

    def look(*_: Any) -> None:
        held = optimizer.held_tensors()
        seen.append(storage_bytes([*held["gradients"], *held["buckets"]]))

    x = torch.randn(4, 32).requires_grad_()
    for block in model.blocks:
        block.register_full_backward_hook(look)
    for step in range(2):
        model(x).sum().backward()
        look()
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    every = sum(p.numel() for p in model.parameters()) * 4
    return max(seen) / every, storage_bytes(optimizer.held_tensors()["gradients"]) / every


@every_way
def test_gradients_take_a_few_units_worth(comm, way: str) -> None:
    before = peak(comm, way, False)
    within, after = peak(comm, way, True)
    assert after == 0
    assert within < 4 / 12
    assert before[0] >= (1 if way == "stage 1" else 1 / comm.size)


@every_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(comm, way: str, reentrant: bool) -> None:
    found = []
    for in_backward in (False, True):
        model = zero.made(lambda: Deep(8, reentrant), comm.rank)
        optimizer = mpidl.ZeroOptimizer(
            model, torch.optim.AdamW, process_group=comm, step_in_backward=in_backward, **zero.SETTINGS[way], **ADAMW
        )
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank)).requires_grad_()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.model_state_dict())
    check_equal(*found)


@every_way
def test_ranks_that_reach_other_parameters(comm, way: str) -> None:
    """Those that no rank reaches stay as they are, weight decay or not."""

    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        return m(zero.data(rank, step), (rank % 2, 0)).square().sum()

    zero.follow(comm, way, zero.Several, loss, step_in_backward=True)


@every_way
def test_a_closure_and_gradients_that_count_as_zero(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    plain = zero.Plain(zero.Several, comm.size)

    def closure() -> torch.Tensor:
        loss = zero.plainly(model, comm.rank, 0)
        loss.backward()
        return loss

    plain.step(lambda m, rank: zero.plainly(m, rank, 0).backward())
    assert torch.equal(optimizer.step(closure), zero.plainly(zero.made(zero.Several), comm.rank, 0))
    optimizer.zero_grad(set_to_none=False)
    zero.check(model, optimizer, plain.model)
    optimizer.step()  # without a pass


@every_way
def test_a_second_pass_before_step_is_refused(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    zero.plainly(model, comm.rank, 0).backward()
    optimizer.zero_grad()
    loss = zero.plainly(model, comm.rank, 1)
    with pytest.raises(mpidl.TrainingError, match=r"step\(\) was not called after it.*no_sync"):
        loss.backward()
    optimizer.step()
    zero.plainly(model, comm.rank, 1).backward()


@every_way
def test_a_rank_that_leaves_out_step_ends_the_next_pass_of_all(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    zero.plainly(model, comm.rank, 0).backward()
    last = comm.size - 1
    if comm.rank < last:
        optimizer.step()
    optimizer.zero_grad()
    loss = zero.plainly(model, comm.rank, 1)
    where = rf".* \(on rank {last}\)" if comm.rank < last else ""
    with pytest.raises(mpidl.TrainingError, match=rf"step\(\) was not called after it{where}"):
        loss.backward()


@every_way
def test_a_pass_through_a_frozen_model_makes_no_step(comm, way: str) -> None:
    """The loop of a GAN: the second model, frozen, passes on the gradients of the first one's pass."""
    models, optimizers = zip(
        *(zero.engine(comm, make, way, step_in_backward=True) for make in (zero.Block, zero.Several)), strict=True
    )
    plain = [zero.Plain(make, comm.size) for make in (zero.Block, zero.Several)]

    def loss(first: nn.Module, second: nn.Module, rank: int, step: int, trains_second: bool) -> torch.Tensor:
        for p in second.parameters():
            p.requires_grad_(trains_second)
        between = first(zero.data(rank, step))
        return second(between.detach() if trains_second else between).square().sum()

    for step in range(3):
        for number in (1, 0):
            plain[number].step(
                lambda _, rank, s=step, n=number: loss(*(each.model for each in plain), rank, s, n == 1).backward()  # type: ignore[misc]
            )
            loss(*models, comm.rank, step, number == 1).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
    for each, optimizer, expected in zip(models, optimizers, plain, strict=True):
        zero.check(each, optimizer, expected.model)


@every_way
def test_a_gradient_that_no_pass_has_given_is_refused_by_the_next_pass(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    zero.plainly(model, comm.rank, 0).backward()
    if comm.rank == comm.size - 1:
        model.head.bias.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.model_state_dict()
    loss = zero.plainly(model, comm.rank, 1)
    with pytest.raises(mpidl.TrainingError, match=r"head\.bias: its \.grad was set"):
        loss.backward()
    check_equal(before, optimizer.model_state_dict())
    zero.plainly(model, comm.rank, 1).backward()
    optimizer.step()


@every_way
def test_passes_under_no_sync_alone_make_no_step(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    with optimizer.no_sync():
        zero.plainly(model, comm.rank, 0).backward()
    with pytest.raises(mpidl.TrainingError, match="have not been reduced"):
        optimizer.step()


@every_way
def test_what_needs_all_gradients_is_refused(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    zero.plainly(model, comm.rank, 0).backward()
    calls: dict[str, Callable[[], Any]] = {
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "clip_grad_value_": lambda: optimizer.clip_grad_value_(1.0),
        "gradients": optimizer.gradients,
    }
    for name, call in calls.items():
        with pytest.raises(mpidl.TrainingError, match=f"{name}: with step_in_backward"):
            call()
    with pytest.raises(mpidl.TrainingError, match="backward pass has made the step"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert model.head.weight.grad is not None
    with pytest.raises(mpidl.ConfigurationError, match="on_nan: got 'skip', but with step_in_backward"):
        mpidl.NonfiniteGuard(model, optimizer, "skip")
    guard = mpidl.NonfiniteGuard(model, optimizer, "stop")
    assert guard.allows(1.0)
    with pytest.raises(mpidl.TrainingError, match="the loss is nan"):
        guard.allows(float("nan"))


@every_way
@pytest.mark.parametrize("of", ["mpidl", "torch"])
def test_loss_scaling_is_refused(comm, way: str, of: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    scaler = mpidl.GradScaler(process_group=comm) if of == "mpidl" else torch.amp.GradScaler("cpu")
    scaler.scale(zero.plainly(model, comm.rank, 0)).backward()
    with pytest.raises(mpidl.TrainingError, match="step_in_backward"):
        scaler.step(optimizer)


@every_way
def test_buffers_of_rank_0_come_with_the_step(comm, way: str) -> None:
    model = zero.made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), comm.rank)
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.SGD, process_group=comm, step_in_backward=True, **zero.SETTINGS[way], **zero.SGD
    )
    model(zero.data(comm.rank)).sum().backward()
    optimizer.step()
    everyone = mpidl.all_gather_object(comm, model[1].running_mean.tolist())
    assert any(everyone[0])
    assert all(each == everyone[0] for each in everyone)


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (torch.optim.Muon, {"params": None}, "a step of Muon needs whole parameters"),
        (torch.optim.Adafactor, {}, "a step of Adafactor needs whole parameters"),
        (mpidl.optim.LAMB, {}, "LAMB needs norms over all ranks' slices"),
        (Counts, {}, "Counts changes count of its groups"),
        (Decays, {}, "Decays steps differently on one parameter at a time"),
        (torch.optim.SGD, {"offload": "disk"}, "what is offloaded"),
        (torch.optim.SGD, {"step_in_backward": "yes"}, "step_in_backward: got .yes"),
    ],
)
def test_what_cannot_be_stepped_part_by_part_is_refused(comm, kind: Any, settings: dict[str, Any], match: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    given = {"step_in_backward": True, "lr": 0.1, **settings}
    with pytest.raises(mpidl.ConfigurationError, match=match):
        mpidl.ZeroOptimizer(model, kind, 2, process_group=comm, **given)


@every_way
def test_late_gradients_are_refused(comm, way: str) -> None:
    model, _ = zero.engine(comm, CallsBlocksTwice, way, step_in_backward=True)
    with pytest.raises(mpidl.TrainingError, match=r"gradient of blocks\.\d.* after the step"):
        model(zero.data(comm.rank).requires_grad_()).sum().backward()


@every_way
def test_weights_read_after_their_gradient_are_an_error_of_torch(comm, way: str) -> None:
    model, _ = zero.engine(comm, ReadsLastWeight, way, step_in_backward=True)
    x = model(zero.data(comm.rank).requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        x.sum().backward()


@every_way
def test_damage_is_refused_before_a_step(comm, way: str) -> None:
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    before = optimizer.model_state_dict()
    if comm.rank == comm.size - 1:
        optimizer.param_groups[0]["lr"] = 0.7
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match="lr"):
            zero.plainly(model, comm.rank, 0).backward()
        check_equal(before, optimizer.model_state_dict())
    optimizer.param_groups[0]["lr"] = 0.1
    loss = zero.plainly(model, comm.rank, 0)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(mpidl.TrainingError, match=r"extra\.weight: it came into the model"):
        loss.backward()
    check_equal(before, optimizer.model_state_dict())


@pytest.mark.parametrize("way", ["stage 2", "stage 3"])
def test_checkpoints_do_not_know(comm, way: str, tmp_path: Any) -> None:
    where = mpidl.broadcast_object(comm, str(tmp_path))
    model, optimizer = zero.engine(comm, zero.Several, way, step_in_backward=True)
    zero.plainly(model, comm.rank, 0).backward()
    optimizer.step()
    mpidl.checkpoint.save(where, model, optimizer, step=1)
    other, plain = zero.engine(comm, zero.Several, "stage 1")
    mpidl.checkpoint.load(where, other, plain)
    for m, o in ((model, optimizer), (other, plain)):
        zero.plainly(m, comm.rank, 1).backward()
        o.step()
    check_equal(optimizer.model_state_dict(), plain.model_state_dict())
    mpidl.checkpoint.load(where, model, optimizer)
