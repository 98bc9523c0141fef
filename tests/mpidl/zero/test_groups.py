"""Hybrid sharding: state cut over groups of ranks, replicated over the groups, follows single-process training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import mpidl
from mpidl.absent_state import absent_state
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.test_parity import check_state

pytestmark = pytest.mark.mpi


def group_of(comm):
    """Pairs of neighbours, where the ranks are even; each alone, where not."""
    return comm.split(comm.rank // 2 if comm.size % 2 == 0 else comm.rank)


# Each stage once, and one of them in bf16, as test_parity has all else.
@pytest.mark.parametrize(("way", "half"), [("stage 1", False), ("stage 2", True), ("stage 3", False)])
def test_losses_weights_and_state_equal_single_process_training(comm, way: str, half: bool) -> None:
    settings = {"precision": mpidl.Precision(torch.bfloat16, torch.float32)} if half else {}
    recipe = Recipe(clip=0.5, steps=6, engine=settings)
    alone = Recipe(clip=0.5, steps=6)
    trained = train(
        fresh(MODELS["gpt2"], comm.rank),
        Recipe(**{**vars(recipe), "engine": {**settings, "shard_group": group_of(comm)}}),
        way,
        comm,
    )
    # In bf16 the same training with all state on every rank.
    expected = (
        train(fresh(MODELS["gpt2"], comm.rank), recipe, way, comm) if half else train(fresh(MODELS["gpt2"]), alone)
    )
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=2e-3 if half else 1e-5)
    if comm.rank:
        assert trained.weights == trained.state == absent_state(comm.rank)
        return
    assert largest_difference(expected.weights, trained.weights) < (5e-3 if half else 1e-5)
    if not half:
        check_state(expected.state, trained.state)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_go_to_every_group(comm, stage: int) -> None:
    """Training goes on to the bit from what rank 0 has loaded, masters and optimizer state included."""

    def made(model: torch.nn.Module) -> mpidl.ZeroOptimizer:
        precision = mpidl.Precision(torch.bfloat16)
        group = group_of(comm)
        return mpidl.ZeroOptimizer(
            model, torch.optim.AdamW, stage, process_group=comm, shard_group=group, precision=precision
        )

    def step(model: torch.nn.Module, optimizer: mpidl.ZeroOptimizer, number: int) -> None:
        x, y = sequences(number, 0)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = fresh(MODELS["gpt2"])
    optimizer = made(model)
    for number in range(2):
        step(model, optimizer, number)
    weights, state = optimizer.model_state_dict(), copy.deepcopy(optimizer.state_dict())
    other = fresh(MODELS["gpt2"], rank=1)
    resumed = made(other)
    resumed.load_model_state_dict(weights)
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (other, resumed)):
        step(m, o, 2)
    expected, found = optimizer.model_state_dict(), resumed.model_state_dict()
    assert comm.rank or all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # All ranks have the same, whichever group they are in.
    with optimizer.gathered(writable=False):
        own = torch.stack([p.double().sum() for p in model.parameters()])
        low, high = own.clone(), own.clone()
        comm.all_reduce(low, "min")
        comm.all_reduce(high, "max")
        assert torch.equal(low, high)


def test_groups_by_node_are_all_ranks_on_one_node(comm) -> None:
    optimizer = mpidl.ZeroOptimizer(
        fresh(MODELS["gpt2"]), torch.optim.SGD, 3, process_group=comm, lr=0.1, shard_group="node"
    )
    stats = optimizer.stats()
    assert (stats["shard_ranks"], stats["replicas"]) == (comm.local_size, comm.nodes)


def test_groups_that_do_not_fit_are_refused_on_every_rank(comm) -> None:
    def attempt(group) -> None:
        mpidl.ZeroOptimizer(fresh(MODELS["gpt2"]), torch.optim.SGD, 3, process_group=comm, lr=0.1, shard_group=group)

    with pytest.raises(mpidl.ConfigurationError, match=r"shard_group: got 'nodes'; needs 'node'"):
        attempt("nodes")
    if comm.size == 3:
        with pytest.raises(mpidl.ConfigurationError, match=r"unlike sizes"):
            attempt(comm.split(comm.rank // 2))
    if comm.size > 1:
        with pytest.raises(mpidl.ConfigurationError, match=r"rank 0 of its group"):
            attempt(comm.split(0, comm.size - comm.rank))
        with pytest.raises(mpidl.ModelMismatch, match="shard_group"):
            attempt("node" if comm.rank else None)
