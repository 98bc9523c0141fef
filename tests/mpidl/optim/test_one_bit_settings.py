"""Betas and eps of 1-bit optimizers: read from the groups in each step, as schedules and loaded states set them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from tests.mpidl.optim import one_bit_reference as reference
from tests.mpidl.optim.one_bit_training import (
    CLASSES,
    SHAPES,
    Slopes,
    Training,
    classes,
    engines,
    of_nodes,
    slopes,
    with_reference,
)

pytestmark = pytest.mark.mpi

STEPS = 22


def follow(training: Training, expected: Any, before: Callable[[int], None], after: Callable[[], None]) -> None:
    """Steps of both, by the settings that the groups have in each. before, after: change these."""
    comm = training.comm
    for step in range(STEPS):
        before(step)
        (group,) = training.optimizer.param_groups
        expected.lr, expected.eps, (expected.b1, expected.b2) = group["lr"], group["eps"], group["betas"]
        training.run(step, 1)
        expected.step(of_nodes(step, comm.size, comm.size))
        own = isinstance(expected, reference.ZeroOne)
        for p, w in zip(training.model.parameters(), expected.of_nodes[comm.rank] if own else expected.w, strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=1e-3, atol=1e-3)
        after()


@engines
@classes
def test_a_schedule_of_betas_and_eps_is_followed(comm: Communicator, engine: str, name: str) -> None:
    """A v that stays is corrected by the beta2 by which it was made, all else by the betas of the step."""
    training, expected, _ = with_reference(comm, engine, name)

    def set_all(step: int) -> None:
        for group in training.optimizer.param_groups:
            group["betas"], group["eps"] = (0.8 + 0.005 * step, 0.98 + 0.0008 * step), 0.01 * (step + 1)

    follow(training, expected, set_all, lambda: None)


@engines
def test_torchs_one_cycle_cycles_the_momentum(comm: Communicator, engine: str) -> None:
    training, expected, _ = with_reference(comm, engine, "adam")
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.01, total_steps=STEPS + 1)
    seen: set[float] = set()
    follow(training, expected, lambda step: seen.add(expected.b1), schedule.step)
    assert max(seen) - min(seen) > 0.09


def test_a_warm_up_by_one_cycle_is_adam_s(comm: Communicator) -> None:
    ours = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), lr=0.01, weight_decay=0.1, freeze_step=100)
    plain = Slopes()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=12)
        for optimizer in (ours.optimizer, adam)
    ]
    for step in range(10):
        ours.run(step, 1)
        for n, p in enumerate(plain.parameters()):
            p.grad = torch.stack([slopes(step, rank)[n].float() for rank in range(comm.size)]).mean(0)
        adam.step()
        for schedule in schedules:
            schedule.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(ours.weights(), expected, rtol=1e-5, atol=1e-5)


def test_v_is_found_steady_over_the_steps_that_the_beta2_of_the_step_needs(comm: Communicator) -> None:
    """1 / (1 - beta2) grows from 5 to 10 steps after the 8th. Gradients shrink by 0.9 a step until step 4."""
    training = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), betas=(0.9, 0.8), lr_warmup_steps=7)
    norms: list[float] = []
    found, v = None, 0.0
    for step, size in enumerate([0.9 ** min(step, 4) for step in range(40)], 1):
        beta2 = 0.8 if step <= 8 else 0.9
        if found is None:
            v = beta2 * v + (1 - beta2) * size**2
            norms.append(v / (1 - beta2**step))
            span = round(1 / (1 - beta2))
            if step > 7 and step > span and norms[-1] >= 0.96 * norms[-1 - span]:
                found = step
        training.inner.param_groups[0]["betas"] = (0.9, beta2)
        training.step([torch.full(shape, size) for shape in SHAPES])
        assert training.inner.progress["frozen_at"] == found, step
    assert found is not None
    assert found > 11


@engines
@classes
def test_betas_of_a_loaded_state_are_used(comm: Communicator, engine: str, name: str) -> None:
    """Training goes on as where they were given at construction, before the freeze and after it."""
    given = {"betas": (0.7, 0.95), "eps": 0.1}
    for steps in (2, 9):
        first = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **given, **CLASSES[name][1])
        first.run(0, steps)
        state, found = first.state(), []
        for settings in (given, {}):
            second = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **settings, **CLASSES[name][1])
            second.load(first, state)
            second.run(steps, 5)
            found.append(second.weights())
        assert torch.equal(*found)


@classes
def test_a_state_of_before_has_other_counters(comm: Communicator, name: str) -> None:
    first = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
    first.run(0, 9)
    state, found = first.state(), []
    for old in (False, True):
        second = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        if old:
            progress = dict(state["param_groups"][0]["progress"])
            del progress["beta2_of_v"]
            state["param_groups"][0]["progress"] = {**progress, "rates": []}
        second.optimizer.load_state_dict(state)
        second.run(9, 4)
        found.append(second.weights())
    assert torch.equal(*found)


@engines
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"betas": (0.8, 0.999)}, r"betas: got \(0\.8, 0\.999\); needs \(0\.9, 0\.999\), those of group 0, as all"),
        ({"eps": 0.1}, r"eps: got 0\.1; needs 1e-08, those of group 0, as all groups are sent together"),
    ],
)
def test_groups_that_differ_are_one_error_on_every_rank(
    comm: Communicator, engine: str, changed: dict[str, Any], message: str
) -> None:
    """At the first step, and at one after the freeze; once they agree, training goes on."""
    for steps in (0, 4):
        model = Slopes()
        groups: Any = [{"params": list(model.weights[:2])}, {"params": list(model.weights[2:]), "weight_decay": 0.1}]
        if engine == "ddp":
            called: Any = mpidl.DistributedDataParallel(model, process_group=comm)
            optimizer: Any = mpidl.optim.OneBitAdam(groups, freeze_step=2, process_group=comm)
            called.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
        else:
            called, settings = model, {"stage": 1, "params": groups, "process_group": comm, "freeze_step": 2}
            optimizer = mpidl.ZeroOptimizer(model, mpidl.optim.OneBitAdam, **settings)
        for step in range(steps + 2):
            called([g.float() for g in slopes(step, comm.rank)]).backward()
            if step == steps:
                former = dict(optimizer.param_groups[1])
                optimizer.param_groups[1].update(changed)
                with pytest.raises(mpidl.ConfigurationError, match=f"OneBitAdam, group 1, {message}"):
                    optimizer.step()
                optimizer.param_groups[1].update({key: former[key] for key in changed})
            optimizer.step()
            optimizer.zero_grad()


def test_ranks_with_other_betas_in_their_groups_are_refused(comm: Communicator) -> None:
    if comm.size == 1:
        return
    training = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes())
    training.inner.param_groups[0]["betas"] = (0.9 - 0.1 * comm.rank, 0.999)
    message = r"OneBitAdam: rank 0 has betas=\(0\.9, 0\.999\), rank 1 has betas=\(0\.8, 0\.999\)"
    with pytest.raises(mpidl.errors.ModelMismatch, match=message):
        training.run(0, 1)
