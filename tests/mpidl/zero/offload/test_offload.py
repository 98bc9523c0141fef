"""Offloaded optimizer state: the bits of training without it, states, what is in memory, and wrong use."""

from __future__ import annotations

import copy
import errno
import gc
import os
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl import Offload
from mpidl.absent_state import refusal
from mpidl.memory import measure
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.zero.offload import offloaded_slice
from mpidl.zero.offload.storage import Extent, arrange, merged
from mpidl.zero.offload.swap_file import SwapFile
from mpidl.zero.offload.triple_buffering import TripleBuffering
from tests.mpidl.small_models import MODELS, Branching, fresh, sequences
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
SETTINGS = {**WAYS, "stage 2": {**WAYS["stage 2"], "bucket_cap_mb": 0.003}}  # one with several buckets
PRECISIONS = {
    "fp32": None,
    "bf16": mpidl.Precision(torch.bfloat16, torch.float32, [nn.LayerNorm]),
    "bf16 reduced": mpidl.Precision(torch.bfloat16),
}
SMALL = Offload("disk", buffer_mb=0.02)  # a third is 576 elements of Adam's state and master: gpt2 has 11000
STEPS = 6
OVERFLOW = 3  # the step whose gradient is infinite, on the last rank


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in trained if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0},
    ]


def zero(comm, model: nn.Module, way: str = "stage 1", optimizer: Any = torch.optim.AdamW, **settings: Any) -> Any:
    settings = {**({"lr": 1e-2} if "lr" not in settings else {}), **settings}
    params = settings.pop("params", groups_of(model))
    return mpidl.ZeroOptimizer(model, optimizer, params=params, process_group=comm, **SETTINGS[way], **settings)


def whole(optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return optimizer.model_state_dict(), copy.deepcopy(optimizer.state_dict())


def differences(expected: tuple[Any, Any], found: tuple[Any, Any]) -> list[str]:
    """Lists the weights and optimizer states that differ in any bit; on rank 0."""
    weights = expected[0] if refusal(expected[0]) is None else {}
    differ = [name for name, tensor in weights.items() if not torch.equal(found[0][name], tensor)]
    entries, others = (state.get("state", {}) for _, state in (expected, found))
    assert entries.keys() == others.keys()
    for number, entry in entries.items():
        assert list(entry) == list(others[number])
        for key, value in entry.items():
            other = others[number][key]
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            differ += [] if same else [f"{key} of {number}"]
    assert expected[1].get("param_groups") == found[1].get("param_groups")
    return differ


def everything(comm, way: str, **settings: Any) -> tuple[list[float], tuple[Any, Any], Any]:
    """Groups, a schedule, two passes a step, clipping, a skipped step, zeros for gradients, and a late parameter."""
    model = fresh(Branching, comm.rank)
    model.branches[2].requires_grad_(False)  # its own shard: no other module shares its unit
    optimizer = zero(comm, model, way, units=lambda module: isinstance(module, nn.Linear), **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = mpidl.GradScaler(init_scale=1024.0, process_group=comm)
    losses = []
    for step in range(STEPS):
        if step == 4:
            model.branches[2].requires_grad_()
            optimizer.add_param_group({"params": [*model.branches[2].parameters()], "lr": 1e-3})
        for micro in range(2):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, micro))
            loss = model(x, y) / 2
            losses.append(loss.item())
            bad = step == OVERFLOW and micro and comm.rank == comm.size - 1
            scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
    assert scaler.skipped_steps == 1
    return losses, whole(optimizer), optimizer


@pytest.mark.parametrize(
    ("way", "precision"), [*((way, dtype) for way in WAYS for dtype in ("fp32", "bf16")), ("stage 3", "bf16 reduced")]
)
def test_training_gives_the_same_bits(comm, way: str, precision: str) -> None:
    settings = {"precision": PRECISIONS[precision]}
    losses, expected, _ = everything(comm, way, **settings)
    for offload in ("cpu", SMALL):
        found_losses, found, _ = everything(comm, way, offload=offload, **settings)
        assert found_losses == losses
        assert differences(expected, found) == []


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach, amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "LAMB": (mpidl.optim.LAMB, {}),
    "LARS": (mpidl.optim.LARS, {}),
}


def trained(comm, way: str, steps: int = 3, model: str = "gpt2", **settings: Any) -> Any:
    made = fresh(MODELS[model], comm.rank)
    optimizer = zero(comm, made, way, **settings)
    go_on(comm, made, optimizer, range(steps))
    return made, optimizer


def go_on(comm, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_any_optimizer_is_offloaded(comm, case: str) -> None:
    optimizer, settings = OPTIMIZERS[case]
    for precision in ("bf16", "fp32") if optimizer is torch.optim.SGD else ("bf16",):
        settings = {**settings, "optimizer": optimizer, "precision": PRECISIONS[precision]}
        expected = whole(trained(comm, "stage 3", **settings)[1])
        _, small = trained(comm, "stage 3", **settings, offload=SMALL)
        assert differences(expected, whole(small)) == []


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_parameters_on_another_device_give_the_same_bits(comm, monkeypatch, to: str, delayed: bool) -> None:
    """The copies to and from it are made, though here to the CPU; fp32 parameters have masters then."""
    offload = Offload(to, buffer_mb=0.02, delayed_update=delayed, delay_from=2)
    _, expected, _ = everything(comm, "stage 2", offload=offload if delayed else None)
    monkeypatch.setattr(offloaded_slice, "is_on_accelerator", lambda _: True)
    _, found, optimizer = everything(comm, "stage 2", offload=offload)
    assert differences(expected, found) == []
    elements = sum(values.numel() for values in optimizer.owned_weights().values().values())
    held = measure(optimizer.model, optimizer)
    assert held.offloaded == pytest.approx(12 * elements, rel=0.5)
    assert held.optimizer <= (0.02 * 2**20 * 1.05 if to == "disk" else 0)


class Descends(torch.optim.Optimizer):
    """Writes new values into the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p - group["lr"] * p.grad)

    def update(self, p: torch.Tensor, new: torch.Tensor) -> None:
        p.copy_(new)


class Replaces(Descends):
    """Puts new values in their place."""

    def update(self, p: torch.Tensor, new: torch.Tensor) -> None:
        p.data = new


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_an_optimizer_may_put_new_values_in_place_of_the_old_ones(
    comm, monkeypatch, to: str, delayed: bool, on_accelerator: bool, precision: str
) -> None:
    if on_accelerator:
        monkeypatch.setattr(offloaded_slice, "is_on_accelerator", lambda _: True)
    offload = Offload(to, buffer_mb=0.02, delayed_update=delayed, delay_from=1)
    settings = {"offload": offload, "precision": PRECISIONS[precision], "lr": 0.1}
    expected, found = (whole(trained(comm, "stage 2", optimizer=each, **settings)[1]) for each in (Descends, Replaces))
    assert differences(expected, found) == []


class Lazy(torch.optim.SGD):
    """Has state from its second step on, of which one part is in another dtype."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 1:
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                state["signs"] = p.grad.sign().to(torch.int8)
                p.data.sub_(state["sum"] * 0.01)
        return super().step(closure)


@pytest.mark.parametrize("offload", ["disk", SMALL], ids=["one group", "small groups"])
def test_state_that_was_not_foreseen_is_offloaded_too(comm, offload: Any) -> None:
    settings = {"optimizer": Lazy, "precision": PRECISIONS["bf16"], "steps": 5}
    expected = whole(trained(comm, "stage 3", **settings)[1])
    _, optimizer = trained(comm, "stage 3", **settings, offload=offload)
    found = whole(optimizer)
    assert differences(expected, found) == []
    if comm.rank == 0:
        assert found[1]["state"][0]["signs"].dtype == torch.int8
    elements = sum(values.numel() for values in optimizer.owned_weights().values().values())
    assert optimizer.offloaded_bytes() > 8 * elements  # more than masters and sums: signs too


@pytest.mark.parametrize(
    ("way", "precision"), [("stage 1", "bf16"), ("stage 2", "fp32"), ("stage 3", "bf16"), ("stage 3 gathered", "bf16")]
)
def test_states_pass_between_runs_with_and_without_offload(comm, way: str, precision: str) -> None:
    half = PRECISIONS[precision]
    model, optimizer = trained(comm, way, precision=half)
    weights, state = whole(optimizer)
    go_on(comm, model, optimizer, range(3, 5))
    expected = whole(optimizer)
    for first, second in ((SMALL, None), ("cpu", SMALL)):
        _, before = trained(comm, way, precision=half, offload=first)
        assert differences((weights, state), whole(before)) == []
        resumed = fresh(MODELS["gpt2"], 1)
        after = zero(comm, resumed, way, precision=half, offload=second)
        after.load_model_state_dict(before.model_state_dict())
        after.load_state_dict(before.state_dict())
        go_on(comm, resumed, after, range(3, 5))
        assert differences(expected, whole(after)) == []


@pytest.mark.parametrize("way", ["stage 2", "stage 3", "stage 3 gathered"])
def test_changed_weights_reach_masters_on_the_disk(comm, way: str) -> None:
    runs = []
    for offload in (None, SMALL):
        model, optimizer = trained(comm, way, precision=PRECISIONS["bf16"], offload=offload)
        with optimizer.gathered():
            for p in model.parameters():
                p.data.flatten()[:3].add_(1)
        go_on(comm, model, optimizer, range(3, 4))
        runs.append(whole(optimizer))
    assert differences(*runs) == []


def test_what_is_offloaded_is_not_in_memory(comm) -> None:
    """bf16 AdamW: 12 bytes a parameter of this rank's shards in the file, and three small buffers in memory."""
    settings: dict[str, Any] = {"precision": mpidl.Precision(torch.bfloat16), "bucket_cap_mb": 0.1}
    measured = {}
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for offload in (None, Offload("disk", buffer_mb=0.06)):
        model = GPT2(GPT2Config(vocab_size=64, block_size=16, layers=4, heads=4, embd=64))
        psi = sum(p.numel() for p in model.parameters())
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, 3, process_group=comm, offload=offload, **settings)
        for _ in range(2):
            model(tokens, tokens).backward()
            optimizer.step()
        measured[offload] = measure(model, optimizer)
    plain, disk = measured.values()
    assert plain.optimizer == pytest.approx(12 * psi / comm.size, rel=0.02)
    assert plain.offloaded == 0
    assert disk.offloaded == pytest.approx(12 * psi / comm.size, rel=0.02)
    assert 0 < disk.optimizer <= 0.06 * 2**20 * 1.05
    assert (disk.parameters, disk.gradients) == (plain.parameters, plain.gradients)


def test_the_file_has_no_name_and_is_gone_with_the_optimizer(comm, tmp_path: Path) -> None:
    def files() -> list[str]:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [str(link.readlink()) for link in links if link.is_symlink()]

    model, optimizer = trained(comm, "stage 3", offload=Offload("disk", path=tmp_path), precision=PRECISIONS["bf16"])
    assert os.listdir(tmp_path) == []
    assert any(str(tmp_path) in name for name in files())
    optimizer.model_state_dict()
    alive = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert alive() is None
    assert not any(str(tmp_path) in name for name in files())


WRONG: dict[str, tuple[Any, str]] = {
    "no place": ("gpu", r"offload: got 'gpu'; needs None, 'cpu', 'disk' or an Offload"),
    "a truth": (True, "offload: got True"),
    "a file": (lambda path: Offload("disk", path=Path(__file__)), "is not a directory"),
    "nothing": (lambda path: Offload("disk", path=path / "x"), "x does not exist; needs a directory"),
    "no space": (lambda path: Offload("disk", path="/proc/self"), "/proc/self has 0.000 GB free"),
    "another place": (lambda path: Offload("tape"), "to='tape'; needs one of cpu, disk"),
    "a path for memory": (lambda path: Offload("cpu", path=path), "needs to='disk' with it"),
    "no buffer": (lambda path: Offload("disk", buffer_mb=0), "buffer_mb=0; needs a size above 0"),
    "half a step": (lambda path: Offload(delay_from=0.5), "delay_from=0.5; needs a number of steps"),
    "no truth": (lambda path: Offload(delayed_update=1), "delayed_update=1; needs True or False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_and_leave_the_model_alone(comm, tmp_path: Path, case: str) -> None:
    given, message = WRONG[case]
    model = fresh(MODELS["gpt2"], comm.rank)
    storages = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(mpidl.ConfigurationError, match=message):
        zero(comm, model, "stage 3", offload=given(tmp_path) if callable(given) else given)
    assert [p.data_ptr() for p in model.parameters()] == storages
    if case == "no space":
        go_on(comm, model, zero(comm, model, "stage 3"), range(1))


@pytest.mark.parametrize("what", ["full", "forbidden"])
def test_a_file_that_one_rank_cannot_make_is_refused_on_every_rank(comm, monkeypatch, what: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device") if what == "full" else PermissionError(13, "denied")

    if comm.rank == comm.size - 1:
        where = (os, "posix_fallocate") if what == "full" else ("tempfile.TemporaryFile",)
        monkeypatch.setattr(*where, fail)
    with pytest.raises(mpidl.ConfigurationError, match="No space left" if what == "full" else "denied"):
        zero(comm, fresh(MODELS["gpt2"]), "stage 2", offload="disk")


@pytest.mark.one_node
def test_ranks_of_a_node_need_room_together(comm, monkeypatch, tmp_path: Path) -> None:
    model = fresh(MODELS["gpt2"])
    need = 8 * sum(p.numel() for p in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 100))
    with pytest.raises(mpidl.ConfigurationError, match=r"this node need 0\.000 GB"):
        zero(comm, model, "stage 2", offload="disk")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need + 2**20))
    zero(comm, model, "stage 2", offload="disk")


@pytest.mark.one_node
def test_a_model_on_the_meta_device_needs_no_more_room(comm, monkeypatch, tmp_path: Path) -> None:
    width = 300
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=(8 + 2) * width**2))  # masters take 4 more
    zero(comm, mpidl.deferred_init(lambda: nn.Linear(width, width)), "stage 2", offload="disk")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_disk_that_is_full_when_parameters_are_added_is_told_on_every_rank(comm, monkeypatch, precision: str) -> None:
    model = fresh(Branching, comm.rank)
    model.branches[2].requires_grad_(False)
    optimizer = zero(comm, model, "stage 2", offload="disk", precision=PRECISIONS[precision])

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "deliberate")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(SwapFile, "_lengthen", fail)
    model.branches[2].requires_grad_()
    with pytest.raises(mpidl.ConfigurationError, match=r"no room .*these parameters: .*deliberate"):
        optimizer.add_param_group({"params": [*model.branches[2].parameters()]})


@pytest.mark.parametrize("name", ["read", "write"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, mpidl.optim.LAMB])
def test_a_disk_that_fails_ends_the_step_on_every_rank(comm, monkeypatch, optimizer: Any, name: str) -> None:
    model, zeroed = trained(comm, "stage 3", 1, optimizer=optimizer, offload=SMALL)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(name)
        if len(calls) == 3:
            raise OSError(errno.EIO, "deliberate")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(SwapFile, name, fail)
    x, y = sequences(0, 0)
    for _ in range(2):
        model(x, y).backward()
        with pytest.raises(mpidl.TrainingError, match=rf"failed on rank {comm.size - 1}: OSError.*deliberate"):
            zeroed.step()
        zeroed.zero_grad()
    with pytest.raises(mpidl.TrainingError, match="deliberate"):
        zeroed.state_dict()


def test_ranks_that_offload_differently_are_told(comm) -> None:
    if comm.size == 1:
        pytest.skip("one rank")
    with pytest.raises(mpidl.ModelMismatch, match="offload"):
        zero(comm, fresh(MODELS["gpt2"]), offload="disk" if comm.rank else None)
    with pytest.raises(mpidl.ModelMismatch, match="to='cpu'"):
        zero(comm, fresh(MODELS["gpt2"]), offload="disk" if comm.rank else "cpu")
    assert np.isfinite(trained(comm, "stage 1", 1, offload="disk")[1].clip_grad_norm_(1.0))


class SumOfSigns(torch.optim.Optimizer):
    """Keeps its state in another dtype."""

    def __init__(self, params: Any, lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                before = state.get("sum", torch.zeros_like(p, dtype=group["dtype"]))
                state["sum"] = before + p.grad.sign().to(group["dtype"])
                p.sub_(state["sum"].to(p.dtype), alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_states_of_parameters_without_gradients_are_not_written_over(comm, dtype: torch.dtype) -> None:
    """A small one's state of 16 or 32 bytes lies between those of its neighbours, which make their first step later."""
    runs = []
    for offload in (None, "disk"):
        model = nn.ParameterList(torch.zeros(4 if number % 3 == 1 else 64) for number in range(20))
        optimizer = zero(comm, model, params=model.parameters(), optimizer=SumOfSigns, dtype=dtype, offload=offload)
        for small in (True, False, True, False, True):
            sum((p * 3).sum() for p in model if (len(p) == 4) == small).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(whole(optimizer))
    assert differences(*runs) == []


def test_neighbours_in_the_file_are_read_as_one_and_nothing_between_them_is_written() -> None:
    near, far, adjacent = ([Extent(0, 12), Extent(start, 8)] for start in (64, 128, 12))
    for extents, read, written in (
        (near, [(0, 0, 72)], [(0, 0, 12), (64, 64, 8)]),
        (far, [(0, 0, 12), (128, 64, 8)], [(0, 0, 12), (128, 64, 8)]),
        (adjacent, [(0, 0, 20)], [(0, 0, 20)]),
    ):
        positions, _ = arrange(extents)
        pairs = [*zip(extents, positions, strict=True)]
        assert merged(pairs, to_write=False) == read
        assert merged(pairs, to_write=True) == written


def test_a_buffer_is_read_into_only_when_it_has_been_written(comm) -> None:
    """Slow writes, and reads that would overtake them."""

    class Slow:
        nbytes = 8

        def __init__(self, number: int) -> None:
            self.number, self.written = number, -1

        def read(self, buffer: torch.Tensor) -> None:
            buffer.fill_(self.number)

        def step(self, buffer: torch.Tensor) -> None:
            assert buffer.tolist() == [self.number] * 8
            buffer.add_(100)

        def write(self, buffer: torch.Tensor) -> None:
            time.sleep(2e-3)
            self.written = int(buffer[0])

    stages = [Slow(number) for number in range(9)]
    TripleBuffering().run(stages)
    assert [stage.written for stage in stages] == [100 + number for number in range(9)]
