"""Comparison of a model that an automatic plan has cut with the whole one."""

from __future__ import annotations

import copy

import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.mesh import placement
from tests.mpidl.tensor.reference import loss_of, part_of, tokens


def assert_same(model: nn.Module, whole: nn.Module) -> None:
    """Asserts that the loss and all gradients are those of the whole model."""
    x = tokens(0).clamp(min=3)
    expected, loss = loss_of(whole, x), loss_of(model, x)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None or not p.grad.any(), at
        else:
            assert p.grad is not None, at
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)


def assert_cut_as_whole(
    comm: Communicator, whole: nn.Module, *inputs: torch.Tensor, sequence_parallel: bool = False
) -> None:
    """Asserts that a copy, cut by the automatic plan, has the result and the gradients of the whole model."""
    model = copy.deepcopy(whole)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=sequence_parallel)
        assert comm.size == 1 or any(placement(p).cut is not None for p in model.parameters())
        results = []
        for each in (model, whole):
            given = [x.clone().requires_grad_() for x in inputs]
            y = each(*given)
            y.sin().sum().backward()
            results.append([y.detach(), *(x.grad for x in given)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert q.grad is not None, at
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)


def random_input(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
