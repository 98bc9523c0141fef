"""Gradients and remainders of a checkpoint take the loss scale of the training that loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from mpidl.checkpoint.engine import engine_of
from tests.mpidl.checkpoint.test_compression import compressed
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import ENGINES

pytestmark = pytest.mark.mpi

SCALE = 2.0**10


def scaler_of(comm: Any, **settings: Any) -> mpidl.GradScaler:
    return mpidl.GradScaler(process_group=comm, **{"init_scale": SCALE, **settings})


def scaled_pass(run: Run, scaler: mpidl.GradScaler, step: int) -> None:
    x, y = (part.chunk(run.comm.size)[run.comm.rank] for part in sequences(step, 0))
    scaler.scale(run.call(x, y)).backward()


def gradients(run: Run) -> dict[str, torch.Tensor]:
    return engine_of(run.call, run.optimizer, run.comm, None).gradients()


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_micro_steps(comm, shared: Path, engine: str) -> None:
    run, scaler = Run(engine, comm), scaler_of(comm)
    scaled_pass(run, scaler, 0)
    run.save(shared, 1, micro_step=1, scaler=scaler)
    expected = {name: g / SCALE for name, g in gradients(run).items()}
    for given in ({}, {"scaler": scaler_of(comm, enabled=False)}):
        again = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
        again.load(shared, **given)
        found = gradients(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], g) for name, g in expected.items())
    same = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
    same.load(shared, scaler=scaler_of(comm, init_scale=2.0))  # takes the saved scale
    assert all(torch.equal(g, expected[name] * SCALE) for name, g in gradients(same).items())


@pytest.mark.filterwarnings("ignore:checkpoint.load")
def test_gradients_of_a_training_without_a_scale_go_to_one_with_it(comm, shared: Path) -> None:
    run = Run("ddp", comm)
    scaled_pass(run, scaler_of(comm, enabled=False), 0)
    run.save(shared, 1, micro_step=1, scaler=scaler_of(comm, enabled=False))
    expected = {name: g * SCALE for name, g in gradients(run).items()}
    again = Run("ddp", comm, fresh(MODELS["gpt2"], rank=1))
    again.load(shared, scaler=scaler_of(comm))
    assert all(torch.equal(g, expected[name]) for name, g in gradients(again).items())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("method", ["int8", "dgc:0.05"])
def test_what_compression_has_not_sent(comm, shared: Path, method: str) -> None:
    def made(rank: int) -> Run:
        model = fresh(MODELS["gpt2"], rank)
        return Run("ddp", comm, model, torch.optim.SGD, {"lr": 0.01}, compress=method)

    run, scaler = made(0), scaler_of(comm)
    for step in range(2):
        scaled_pass(run, scaler, step)
        scaler.step(run.optimizer)
        scaler.update()
        run.finish()
    run.save(shared, 2, scaler=scaler)
    before = compressed(run).state_dict()
    again = made(1)
    again.load(shared)
    found = compressed(again).state_dict()
    if comm.rank == 0:  # which has the means
        assert any(mean.any() for mean in before["remainders"].values())
        for name, mean in before["remainders"].items():
            torch.testing.assert_close(found["remainders"][name], mean / SCALE, rtol=1e-6, atol=0)
