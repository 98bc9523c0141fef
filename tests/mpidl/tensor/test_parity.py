"""Training cut over tp equals one process: the gradients, the losses, every weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.mesh import placement
from tests.mpidl.tensor.reference import (
    MODELS,
    all_in_float64,
    build,
    largest_difference,
    loss_of,
    part_of,
    tokens,
    train,
)

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


@pytest.mark.at_most(4)
@pytest.mark.each("name")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_trains_as_one_process(
    comm: Communicator, name: str, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    whole, model = build(name), build(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        loss_of(whole, tokens(0)).backward()
        loss_of(model, tokens(0)).backward()
        for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert q.grad is not None
            assert p.grad is not None
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-10, atol=1e-12, msg=at)
        whole.zero_grad()
        model.zero_grad()
        steps = fewer(20)
        assert train(model, steps) == pytest.approx(train(whole, steps), abs=1e-10)
        assert largest_difference(model, whole) < 1e-10
        assert comm.size == 1 or sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())


@pytest.mark.each("name")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama, two key heads", "bert", "t5"])
def test_in_fp32_the_losses_and_weights_of_one_process_are_kept(
    comm: Communicator, name: str, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    """By SGD with momentum: Adam divides by gradients that may be rounding errors alone, and lets them grow."""
    whole, model, steps = build(name, torch.float32), build(name, torch.float32), fewer(20)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        losses = [
            train(each, steps, torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9)) for each in (model, whole)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[1][-1] != pytest.approx(losses[1][0], rel=1e-4)
        assert largest_difference(model, whole) < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_made_whole_again_is_the_plain_one(comm: Communicator, sequence_parallel: bool) -> None:
    whole, model = build("hf gpt2"), build("hf gpt2")
    with all_in_float64():
        with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
            mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            train(model, 2)
            train(whole, 2)
            mpidl.unparallelize(model)
        assert [type(module) for module in model.modules()] == [type(module) for module in whole.modules()]
        assert {name: p.shape for name, p in model.named_parameters()} == {
            name: p.shape for name, p in whole.named_parameters()
        }
        assert not any(placement(p).axes for p in model.parameters())
        assert train(model, 2) == pytest.approx(train(whole, 2), abs=1e-10)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_are_the_same_bits_on_every_rank(
    comm: Communicator, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    model = build("gpt2", torch.float32)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        train(model, fewer(100))
        replicated = {name: p for name, p in model.named_parameters() if placement(p).cut is None}
        assert comm.size == 1 or 0 < len(replicated) < len(list(model.parameters()))
        mpidl.check_replicas(replicated, process_group=mesh["tp"])
