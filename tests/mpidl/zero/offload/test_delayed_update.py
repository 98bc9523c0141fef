"""Delayed parameter updates: the weights that a single process computes with the same delay, and when they are seen."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl import Offload
from mpidl.memory import measure
from mpidl.zero.offload.swap_file import SwapFile
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.offload.test_offload import PRECISIONS, differences, everything, go_on, whole, zero
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-6}


def late(to: str, delay_from: int = 0, **settings: Any) -> Offload:
    return Offload(to, delayed_update=True, delay_from=delay_from, **settings)


def by_hand(steps: int, delay_from: int, micro: int = 1) -> list[dict[str, torch.Tensor]]:
    """One process: the weights that are seen after each step, and then the newest."""
    model = fresh(MODELS["gpt2"])
    newest = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(newest, **ADAM)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    for step in range(steps):
        model(*sequences(step, 0)).backward()
        for p, q in zip(model.parameters(), newest, strict=True):
            q.grad, p.grad = p.grad, None
        before = [q.detach().clone() for q in newest]
        optimizer.step()
        schedule.step()
        shown = before if step >= delay_from else newest
        with torch.no_grad():
            for p, q in zip(model.parameters(), shown, strict=True):
                p.copy_(q)
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return [*seen, {name: q.detach() for (name, _), q in zip(model.named_parameters(), newest, strict=True)}]


@pytest.mark.parametrize(("way", "delay_from"), [*((way, 0) for way in WAYS), ("stage 3", 2), ("stage 1", 9)])
def test_weights_are_those_of_a_process_with_the_same_delay(comm, way: str, delay_from: int) -> None:
    expected = by_hand(5, delay_from)
    states = []
    for to in ("cpu", "disk"):
        model = fresh(MODELS["gpt2"], comm.rank)
        small = {"buffer_mb": 0.02} if to == "disk" else {}
        optimizer = zero(comm, model, way, params=None, offload=late(to, delay_from, **small), **ADAM)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
            model(x, y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            # Where stage 3 gathers, only the modules that compute see weights.
            if way != "stage 3 gathered" and (not way.startswith("stage 3") or comm.nodes == 1):
                for name, p in model.named_parameters():
                    torch.testing.assert_close(p.detach(), expected[step][name], rtol=0, atol=2e-5)
        optimizer.flush()
        assert not optimizer.stats()["pending_update"]
        with optimizer.gathered(writable=False):
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), expected[-1][name], rtol=0, atol=2e-5)
        states.append(whole(optimizer))
    assert differences(*states) == []


@pytest.mark.parametrize(
    ("way", "precision"), [("stage 1", "fp32"), ("stage 2", "bf16"), ("stage 3", "bf16 reduced"), ("stage 3", "fp32")]
)
def test_memory_and_disk_delay_the_same_whatever_happens(comm, way: str, precision: str) -> None:
    """With skipped steps, clipping, groups, schedules and late parameters, as in undelayed training."""
    settings = {"precision": PRECISIONS[precision]}
    losses, expected, _ = everything(comm, way, offload=late("cpu", 1), **settings)
    found_losses, found, _ = everything(comm, way, offload=late("disk", 1, buffer_mb=0.005), **settings)
    assert found_losses == losses != everything(comm, way, **settings)[0]
    assert differences(expected, found) == []


@pytest.mark.one_node
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_an_update_runs_during_the_next_passes_and_writes_no_weight(comm, monkeypatch, to: str, precision: str) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    optimizer = zero(comm, model, "stage 3", offload=late(to), precision=PRECISIONS[precision])
    go_on(comm, model, optimizer, range(2))
    optimizer.flush()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    may, threads = threading.Event(), []
    inner_step = optimizer.inner_class.step

    def step(self: torch.optim.Optimizer) -> None:
        threads.append(threading.current_thread())
        assert may.wait(60)
        inner_step(self)

    monkeypatch.setattr(optimizer.inner_class, "step", step)
    x, y = sequences(0, 0)
    model(x, y).backward()
    optimizer.step()
    model(x, y).backward()
    comm.barrier()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    may.set()
    optimizer.flush()
    assert threads[0] is not threading.main_thread()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("use", ["state_dict", "model_state_dict", "gathered", "load"])
def test_whole_states_bring_a_pending_update_in(comm, use: str) -> None:
    weights = []
    for flush in (True, False):
        model = fresh(MODELS["gpt2"], comm.rank)
        optimizer = zero(comm, model, "stage 2", offload=late("disk"), precision=PRECISIONS["bf16"])
        go_on(comm, model, optimizer, range(3))
        if flush:
            optimizer.flush()
        if use == "gathered":
            with optimizer.gathered():
                weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        elif use == "load":
            optimizer.load_model_state_dict(fresh(MODELS["gpt2"]).state_dict())
            go_on(comm, model, optimizer, range(2))
            weights.append(optimizer.model_state_dict())
        else:
            optimizer.load_state_dict(optimizer.state_dict()) if use == "state_dict" else None
            weights.append(optimizer.model_state_dict())
    everywhere = use == "gathered" or comm.rank == 0
    assert not everywhere or all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


def test_an_update_that_is_shown_after_its_state_was_saved_waits_for_ranks_that_still_compute(comm) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    optimizer = zero(comm, model, "stage 3", offload=late("cpu"))
    go_on(comm, model, optimizer, range(3))
    x, y = sequences(0, 0)
    with torch.no_grad():
        expected = model(x, y)
    optimizer.owned_state()  # from here on the update is there, and not seen
    if comm.rank == comm.size - 1:
        last = model.get_submodule("transformer.h.1")
        handle = last.register_forward_pre_hook(lambda *_: time.sleep(0.3))
        with torch.no_grad():
            found = model(x, y)
        handle.remove()
        assert torch.equal(found, expected)
    optimizer.flush()
    with torch.no_grad():
        assert not torch.equal(model(x, y), expected)


def test_a_delayed_update_that_fails_ends_the_next_step_on_every_rank(comm, monkeypatch) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    optimizer = zero(comm, model, "stage 3", offload=late("disk"))
    go_on(comm, model, optimizer, range(2))
    optimizer.flush()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "deliberate")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(SwapFile, "write", fail)
    go_on(comm, model, optimizer, range(1))
    for act in (lambda: go_on(comm, model, optimizer, range(1)), optimizer.flush, optimizer.model_state_dict):
        with pytest.raises(mpidl.TrainingError, match=f"failed on rank {comm.size - 1}: OSError"):
            act()


def test_memory_of_a_delayed_update_is_counted(comm) -> None:
    """fp32: a second copy of the weights, which are masters, and of the gradients while an update is under way."""
    model = fresh(MODELS["gpt2"], comm.rank)
    optimizer = zero(comm, model, "stage 2", offload=late("cpu"))
    go_on(comm, model, optimizer, range(2))
    whole = 4 * sum(p.numel() for p in model.parameters())
    pending = measure(model, optimizer)
    optimizer.flush()
    after = measure(model, optimizer)
    assert after.optimizer == pending.optimizer
    found = np.array([pending.optimizer, pending.gradients - after.gradients])
    comm.all_reduce(found)
    assert found.tolist() == pytest.approx([3 * whole, whole], rel=0.02)


@pytest.mark.parametrize("optimizer", [mpidl.optim.LARS, mpidl.optim.LAMB])
def test_norms_over_the_ranks_cannot_be_delayed(comm, optimizer: Any) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="must not communicate"):
        zero(comm, fresh(MODELS["gpt2"]), "stage 2", optimizer=optimizer, offload=late("cpu"))
