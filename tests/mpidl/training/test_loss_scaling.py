"""Loss scaling: all ranks decide the same, and as a single process on the whole batch would."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.zero.ways import ENGINES, STAGES, zero

pytestmark = pytest.mark.mpi

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def wrap(model: nn.Module, engine: str, comm: Communicator, **settings: Any) -> tuple[nn.Module, Any]:
    """Returns the callable and the optimizer."""
    if engine == "ddp":
        return mpidl.DistributedDataParallel(model, process_group=comm), torch.optim.SGD(model.parameters(), **settings)
    return model, zero(model, comm, engine, torch.optim.SGD, **settings)


def weights_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Whole, on every rank."""
    if not isinstance(optimizer, mpidl.ZeroOptimizer):
        return copy.deepcopy(model.state_dict())
    with optimizer.gathered():
        return copy.deepcopy(model.state_dict())


def vectors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=random), torch.randint(0, 3, (12,), generator=random)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, spoil: float) -> torch.Tensor:
    return F.cross_entropy(model(x), y) * spoil


# ---- as a single process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("engine", ENGINES)
def test_scales_and_weights_follow_a_single_process(comm, engine: str, clip: float | None) -> None:
    """In step 4 the loss of the last rank's samples overflows; the scale grows after every two good steps."""
    settings: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
    plain, ours = small_model(), small_model()
    reference, theirs = torch.optim.SGD(plain.parameters(), **SGD), torch.amp.GradScaler("cpu", **settings)
    call, optimizer = wrap(ours, engine, comm, **SGD)
    scaler = mpidl.GradScaler(process_group=comm, **settings)
    scales = []
    for step in range(8):
        x, y = vectors(step)
        bad = math.inf if step == 4 else 1.0
        theirs.scale(loss_of(plain, x, y, bad)).backward()
        theirs.unscale_(reference)
        if clip is not None:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        theirs.step(reference)
        theirs.update()
        reference.zero_grad()

        x, y = (part.chunk(comm.size)[comm.rank] for part in (x, y))
        scaler.scale(loss_of(call, x, y, bad if comm.rank == comm.size - 1 else 1.0)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            sharded = engine != "ddp"
            norm = optimizer.clip_grad_norm_(clip) if sharded else mpidl.clip_grad_norm_(ours.parameters(), clip)
            assert norm == pytest.approx(float(expected), rel=1e-5, nan_ok=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == theirs.get_scale()
        scales.append(scaler.get_scale())
    assert scales == [64, 128, 128, 256, 128, 128, 256, 256]
    assert scaler.skipped_steps == 1
    found = weights_of(ours, optimizer)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


@pytest.mark.parametrize("engine", ["ddp", "stage 1", "stage 3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_training_follows_a_single_process(comm, dtype: torch.dtype, engine: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    ours = mpidl.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    start = copy.deepcopy(plain.state_dict())
    # A rank's mean loss gives each sample more weight than the whole batch's, so it overflows at smaller scales.
    scale = 1024.0
    reference, theirs = torch.optim.SGD(plain.parameters(), **SGD), torch.amp.GradScaler("cpu", scale)
    call, optimizer = wrap(ours, engine, comm, **SGD)
    scaler = mpidl.GradScaler("cpu", scale, process_group=comm)
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        y = torch.randint(0, 3, (12,), generator=random)
        x = torch.randn(12, 1, 6, 6, generator=random) + y.view(-1, 1, 1, 1)
        for model, chosen, scaling, part in ((plain, reference, theirs, 0), (call, optimizer, scaler, comm.rank)):
            parts = 1 if chosen is reference else comm.size
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x.chunk(parts)[part]), y.chunk(parts)[part])
            scaling.scale(loss).backward()
            scaling.step(chosen)
            scaling.update()
            chosen.zero_grad()
    assert scaler.get_scale() == theirs.get_scale() == scale
    tolerance = 4 * torch.finfo(dtype).eps
    found = weights_of(ours, optimizer)
    moved = 0.0
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
        moved = max(moved, float((value - start[name]).abs().max()))
    assert moved > 0.1


# ---- one rank's overflow ----------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=1.0),
    "unscales by itself": lambda p: torch.optim.AdamW(p, lr=1.0, fused=True),
}


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_on_one_rank_stops_the_step_on_all(comm, bad: float, kind: str, unscale_first: bool) -> None:
    """Without DDP, so that the others' gradients are finite."""
    p = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[kind]([p])
    scaler = mpidl.GradScaler(init_scale=8.0, process_group=comm)
    for spoiled in (True, False):
        p.grad = None
        scaler.scale(p.sum()).backward()
        if spoiled and comm.rank == comm.size - 1:
            p.grad[1] = bad
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert scaler.skipped_steps == 1
        assert torch.equal(p.detach(), torch.ones(3)) == spoiled


@pytest.mark.parametrize("way", STAGES)
def test_an_overflow_in_one_ranks_shard_stops_the_step_on_all(comm, way: str) -> None:
    model = nn.Linear(8 * comm.size, 1, bias=False)
    call, optimizer = wrap(model, way, comm, lr=1.0)
    before = weights_of(model, optimizer)["weight"]
    scaler = mpidl.GradScaler(init_scale=8.0, process_group=comm)
    x = torch.ones(1, 8 * comm.size)
    for spoiled in (True, False):
        x[0, 1] = math.inf if spoiled else 1.0
        scaler.scale(call(x).sum()).backward()
        finite = bool(model.weight.grad.part().isfinite().all())
        assert finite == (comm.rank > 0 or not spoiled)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
        expected = before if spoiled else before - 1.0
        torch.testing.assert_close(weights_of(model, optimizer)["weight"], expected)
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("way", STAGES)
def test_fp16_parameters_get_gradients_below_fp16(comm, way: str) -> None:
    """A gradient of 1e-9 is zero in fp16; scaled it is not, and the fp32 masters step on it unscaled in fp32."""
    model = nn.Linear(5, 1, bias=False).half()
    call, optimizer = wrap(model, way, comm, lr=1e8)
    before = weights_of(model, optimizer)["weight"].float()
    scaler = mpidl.GradScaler(init_scale=2.0**20, process_group=comm)
    scaler.scale(call(torch.ones(1, 5, dtype=torch.float16)).float().sum() * 1e-9).backward()
    scaler.unscale_(optimizer)
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(1e-9 * math.sqrt(5), rel=2e-3)
    optimizer.clip_grad_value_(0.5e-9)
    scaler.step(optimizer)
    after = weights_of(model, optimizer)["weight"].float()
    torch.testing.assert_close(before - after, torch.full((1, 5), 0.05), rtol=0, atol=1e-3)


# ---- called rightly and wrongly ---------------------------------------------------------------------------------


def scaled(comm: Communicator, **settings: Any) -> tuple[nn.Parameter, torch.optim.Optimizer, mpidl.GradScaler]:
    """A parameter with a scaled gradient of ones."""
    p = nn.Parameter(torch.zeros(2))
    scaler = mpidl.GradScaler(process_group=comm, **settings)
    scaler.scale(p.sum()).backward()
    return p, torch.optim.SGD([p], lr=1.0), scaler


def test_calls_in_the_wrong_order_are_refused_as_by_torch(comm) -> None:
    _, optimizer, scaler = scaled(comm)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    fresh = mpidl.GradScaler(process_group=comm)
    with pytest.raises(AssertionError, match="scale is None"):
        fresh.step(optimizer)


def test_a_rank_without_gradients_goes_along_and_none_at_all_is_refused(comm) -> None:
    p, optimizer, scaler = scaled(comm)
    if comm.rank > 0:
        p.grad = None
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == ([-1.0, -1.0] if comm.rank == 0 else [0.0, 0.0])
    p.grad = None
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def test_fp16_gradients_of_a_plain_optimizer_are_refused_as_by_torch(comm) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = mpidl.GradScaler(process_group=comm)
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([p], lr=1.0))


def test_scales_that_differ_are_told_on_all_ranks(comm) -> None:
    if comm.size == 1:
        return
    _, optimizer, scaler = scaled(comm, init_scale=4.0 if comm.rank == 0 else 16.0)
    with pytest.raises(mpidl.TrainingError, match=r"scales differ: from 4\.0 to 16\.0"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("new", [512, 512.0, torch.tensor(512.0)], ids=["int", "float", "tensor"])
def test_a_new_scale_is_taken(comm, new: Any) -> None:
    _, optimizer, scaler = scaled(comm)
    scaler.step(optimizer)
    scaler.update(new)
    assert scaler.get_scale() == 512.0


def test_states_are_torchs_and_the_count_of_skipped_steps(comm) -> None:
    p, optimizer, scaler = scaled(comm, init_scale=32.0)
    p.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert state == {**theirs.state_dict(), "skipped_steps": 1}
    assert state["scale"] == 16.0
    again = mpidl.GradScaler(process_group=comm)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict(theirs.state_dict())
    assert again.skipped_steps == 0
    loaded = pickle.loads(pickle.dumps(scaler))
    assert loaded.state_dict() == state
    assert loaded.process_group is None


def test_a_copied_scaler_keeps_no_compression_alive(comm) -> None:
    model = small_model()
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, compress="int8")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = pickle.loads(pickle.dumps(mpidl.GradScaler(process_group=comm)))
    scaler.scale(ddp(vectors(0)[0]).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    compressed = weakref.ref(ddp.compressed)
    assert compressed() is not None
    del ddp, model, optimizer
    gc.collect()
    assert compressed() is None


def test_not_enabled_it_only_steps(comm) -> None:
    p, optimizer, scaler = scaled(comm, enabled=False)
    assert not scaler.is_enabled()
    assert p.grad.tolist() == [1.0, 1.0]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [-1.0, -1.0]
    assert (scaler.get_scale(), scaler.state_dict(), scaler.skipped_steps) == (1.0, {}, 0)
