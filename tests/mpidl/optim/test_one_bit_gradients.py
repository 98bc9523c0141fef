"""The `.grad` of 1-bit optimizers under ZeRO-1: the whole gradient of a rank, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from tests.mpidl.optim.one_bit_training import CLASSES, ENGINES, Slopes, Training, classes, slopes


@pytest.mark.mpi
@classes
def test_the_grad_attribute_is_the_whole_gradient_of_a_rank(comm: Communicator, name: str) -> None:
    """Read and changed in place as under DDP, before the freeze and after it."""
    seen: list[list[Any]] = []
    for engine in ENGINES:
        training = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        found: list[Any] = []
        for step in range(10):
            training.called([g.float() for g in slopes(step, comm.rank)]).backward()
            parameters = [p for p in training.model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_value_(parameters, 20.0)
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(0.5)
                found += [p.grad.norm(), p.grad.norm(1), p.grad.abs().max(), p.grad.sum(), (p.grad * 2).norm()]
                found.append(p.grad.full_tensor().clone() if engine != "ddp" else p.grad.clone())
            training.optimizer.step()
            training.optimizer.zero_grad()
        seen.append([*found, training.weights()])
    for zero, ddp in zip(*seen, strict=True):
        torch.testing.assert_close(zero, ddp, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.mpi
@classes
def test_a_gradient_that_is_given_up_is_given_up_whole(comm: Communicator, name: str) -> None:
    """A rest of it would count in the norm, on each rank another part."""
    seen = []
    for engine in ENGINES:
        training = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        for step in range(3):
            training.called([g.float() for g in slopes(step, comm.rank)]).backward()
            next(training.model.parameters()).grad = None
            if engine == "ddp":
                mpidl.clip_grad_norm_(training.model, 50.0)
            else:
                training.optimizer.clip_grad_norm_(50.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.check_equal_on_all_ranks()
        seen.append(training.weights())
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)
