"""Gradients that are not finite: where they are, who steps, and a loss scale that keeps falling."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Precision
from tests.mpidl.zero.ways import every_way, zero

pytestmark = pytest.mark.mpi


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


class Spoiler:
    """Makes the gradient that arrives at the output of the middle layer infinite, on the last rank."""

    def __init__(self, model: nn.Sequential, comm: Communicator) -> None:
        self.active, self._here = True, comm.rank == comm.size - 1
        model[1].register_forward_hook(self._of_output)

    def _of_output(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad and self.active and self._here:
            output.register_hook(lambda g: g * math.inf)


SPOILT = {"1.weight", "1.bias", "0.weight", "0.bias"}


@every_way
def test_an_overflow_on_one_rank_is_located_and_no_rank_steps(comm, way: str) -> None:
    model = three_layers()
    spoiler = Spoiler(model, comm)
    optimizer = zero(model, comm, way, precision=Precision(torch.float16, torch.float32))
    scaler = mpidl.GradScaler(init_scale=64.0, process_group=comm)
    before = optimizer.model_state_dict()
    assert optimizer.find_nonfinite() is None
    for watched in (False, True, True):
        if watched:
            optimizer.watch_nonfinite()
        scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
        found = optimizer.find_nonfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert found is not None
        assert {name for name, _ in found} == SPOILT
        if watched:
            assert found[0][0] in ("1.weight", "1.bias")
            assert {rank for _, rank in found} == {comm.size - 1}
        else:
            assert {rank for _, rank in found} == ({None} if comm.size > 1 else {0})
    assert scaler.get_scale() == 8.0
    assert scaler.skipped_steps == 3
    after = optimizer.model_state_dict()
    assert comm.rank or all(torch.equal(before[name], after[name]) for name in before)
    spoiler.active = False
    scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
    assert optimizer.find_nonfinite() is None
    scaler.step(optimizer)
    assert scaler.skipped_steps == 3
    after = optimizer.model_state_dict()
    assert comm.rank or not torch.equal(before["0.weight"], after["0.weight"])


@pytest.mark.parametrize("engine", ["ddp", "stage 1", "stage 3"])
def test_a_scale_that_keeps_falling_is_explained(comm, engine: str) -> None:
    model = three_layers()
    spoiler = Spoiler(model, comm)
    call: Any = model
    if engine == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=comm)
        optimizer: Any = torch.optim.SGD(model.named_parameters(), lr=0.1)
    else:
        optimizer = zero(model, comm, engine, precision=Precision(torch.float16))
    scaler = mpidl.GradScaler(init_scale=64.0, process_group=comm)

    def falls(spoilt: bool) -> list[str]:
        spoiler.active = spoilt
        scaler.scale(call(torch.ones(2, 4)).float().sum()).backward()
        scaler.step(optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                scaler.update()
            finally:
                optimizer.zero_grad()
        return [str(w.message) for w in said if "GradScaler" in str(w.message)]

    where = rf"the gradient of 1\.(weight|bias) on rank {comm.size - 1} is not finite, and of 3 after it"
    heard = [len(falls(spoilt)) for spoilt in [True] * 4 + [False]]
    assert heard == [0] * 5  # a good step between begins anew
    assert scaler.get_scale() == 4.0
    scaler.update(64.0)
    for _ in range(4):
        assert not falls(True)
    fifth = falls(True)
    assert len(fifth) == (comm.rank == 0)
    if fifth:
        assert re.search(rf"fallen 5 times in a row, to 2: {where}", fifth[0])
    assert not falls(True)
    with pytest.raises(mpidl.TrainingError, match=rf"fallen 7 times in a row, to 0\.5: {where}"):
        falls(True)


def test_gradients_of_plain_models_and_ddp_are_located(comm) -> None:
    model = three_layers()
    spoiler = Spoiler(model, comm)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    assert mpidl.find_nonfinite_gradients(wrapped, comm) is None
    watch = mpidl.NonfiniteWatch(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    averaged = mpidl.find_nonfinite_gradients(wrapped, comm)
    assert averaged is not None
    assert {rank for _, rank in averaged} == set(range(comm.size))  # the mean is spoilt everywhere
    found = watch.find(comm)
    assert found is not None
    assert {name for name, _ in found} == SPOILT
    assert {rank for _, rank in found} == {comm.size - 1}
    model.zero_grad()
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4)).sum().backward()
    own = mpidl.find_nonfinite_gradients(wrapped, comm)
    assert own == [(name, comm.size - 1) for name in ("1.bias", "1.weight", "0.bias", "0.weight")]
    spoiler.active = False
    watch.clear()
    assert watch.find(comm) is None
    zeroed = three_layers()
    zero(zeroed, comm, "stage 1")
    with pytest.raises(mpidl.ConfigurationError, match="use its find_nonfinite"):
        mpidl.find_nonfinite_gradients(zeroed, comm)


def test_the_group_is_that_of_the_wrapper(comm) -> None:
    with comm.split(comm.rank % 2) as half:
        wrapped = mpidl.DistributedDataParallel(three_layers(), process_group=half)
        wrapped(torch.ones(2, 4)).sum().backward()
        if comm.rank % 2 == 0:  # the others never come
            assert mpidl.find_nonfinite_gradients(wrapped) is None
