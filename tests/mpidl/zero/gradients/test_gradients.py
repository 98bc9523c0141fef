"""Gradients that are with the optimizer: read whole, and forgotten by the model's own zero_grad."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.absent_state import absent_state
from tests.mpidl.zero.reference import Plain, Several, check, data, engine, plainly
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi


class Tied(Several):
    """A weight under two names, a frozen one, and one of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.blocks[1].inner.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        return super().forward(x, order) * self.scale


def means(make: Any, comm, passes: Any) -> dict[str, torch.Tensor]:
    """Means of the gradients of every rank's passes through a plain model."""
    plain = Plain(make, comm.size).model
    for rank in range(comm.size):
        passes(plain, rank)
    return {name: p.grad / comm.size for name, p in plain.named_parameters() if p.grad is not None}


@every_way
@pytest.mark.parametrize("settings", [{}, {"offload": "disk"}], ids=["", "offloaded"])
def test_whole_gradients_are_those_of_a_plain_model(comm, way: str, settings: dict[str, Any]) -> None:
    def passes(m: nn.Module, rank: int) -> None:
        for micro in range(2):
            m(data(rank, micro), (0, 2) if rank else (2,)).square().sum().backward()  # no rank reaches block 1

    model, optimizer = engine(comm, Tied, way, **settings)
    none = {} if comm.rank == 0 else absent_state(comm.rank)
    assert optimizer.gradients() == none
    passes(model, comm.rank)
    expected, found = means(Tied, comm, passes), optimizer.gradients()
    assert comm.rank == 0 or found == none
    for name, gradient in found.items() if comm.rank == 0 else ():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    norm = optimizer.clip_grad_norm_(0.5)
    clipped = optimizer.gradients()
    if comm.rank == 0:
        torch.testing.assert_close(clipped["head.weight"], expected["head.weight"] * (0.5 / norm), rtol=1e-4, atol=1e-6)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.gradients() == none


@every_way
def test_the_zero_grad_of_the_model_forgets_them(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    for step in range(3):
        plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
        model.zero_grad()
        plainly(model, comm.rank, step).backward()
        optimizer.step()
        check(model, optimizer, plain.model)


@every_part
def test_without_its_optimizer_a_model_has_a_zero_grad_of_its_own(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    del optimizer
    gc.collect()
    model.head.bias.grad = torch.ones(2)
    model.zero_grad(set_to_none=False)
    assert torch.equal(model.head.bias.grad, torch.zeros(2))
    model.zero_grad()
    assert model.head.bias.grad is None


@pytest.mark.parametrize("widened", [False, True])
def test_gradients_of_sixteen_bits(comm, widened: bool) -> None:
    model, optimizer = engine(comm, Several, "stage 2", precision=mpidl.Precision(torch.bfloat16))
    plainly(model, comm.rank, 0).float().backward()
    if widened:
        optimizer.unscale_(1.0)
    found = optimizer.gradients()
    for gradient in found.values() if comm.rank == 0 else ():
        assert gradient.dtype == (torch.float32 if widened else torch.bfloat16)


@every_way
def test_gradients_that_are_looked_at_after_an_exception_add_up_with_the_next(comm, way: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_: torch.Tensor) -> None:
        raise Interrupted

    def gradients(look: bool) -> dict[str, torch.Tensor]:
        model, optimizer = engine(comm, Several, way)
        handle = model.blocks[0].inner.bias.register_hook(interrupt)
        with pytest.raises(Interrupted):
            plainly(model, comm.rank, 0).backward()
        if look:
            optimizer.gradients()
        handle.remove()
        plainly(model, comm.rank, 1).backward()
        return optimizer.gradients()

    expected, found = gradients(look=False), gradients(look=True)
    assert found.keys() == expected.keys()
    for name, gradient in found.items() if comm.rank == 0 else ():
        assert torch.equal(gradient, expected[name]), name


def test_the_memory_of_gradients_stays_unless_state_is_offloaded(comm) -> None:
    """Between steps, as `buckets`; stage 1 has its buckets, and sums of 16-bit gradients are in others."""
    kept: dict[str, int] = {}
    for name, way, settings in (
        ("stage 1", "stage 1", {}),
        ("stage 2", "stage 2", {}),
        ("stage 3", "stage 3", {}),
        ("16 bits", "stage 2", {"precision": mpidl.Precision(torch.bfloat16)}),
        ("offloaded", "stage 2", {"offload": "disk"}),
    ):
        model, optimizer = engine(comm, Several, way, **settings)
        before = sum(t.nbytes for t in optimizer.held_tensors()["buckets"])
        for step in range(2):
            plainly(model, comm.rank, step).backward()
            during = {t.data_ptr() for t in optimizer.held_tensors()["gradients"]}
            optimizer.step()
            optimizer.zero_grad()
            held = optimizer.held_tensors()["buckets"]
            kept[name] = sum(t.nbytes for t in held) - before
            if name in ("stage 2", "stage 3"):
                assert during <= {t.data_ptr() for t in held}
    shard = sum(-(-p.numel() * 4 // comm.size) for p in Several().parameters())
    padding = 64 * len(list(Several().parameters()))  # each shard is of whole cache lines
    assert shard <= kept["stage 2"] <= shard + padding
    assert shard <= kept["stage 3"] <= shard + padding
    assert kept["stage 1"] == kept["16 bits"] == kept["offloaded"] == 0
