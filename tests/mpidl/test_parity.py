"""Every engine follows single-process training on the same global batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpidl.absent_state import absent_state
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, train
from tests.mpidl.zero.ways import ENGINES

pytestmark = pytest.mark.mpi

RECIPES = {
    "plain": Recipe(steps=10, clip=0.5),
    "sgd": Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, steps=6),
    "accumulated": Recipe(steps=6, micro=2, clip=1.0),
    "accumulated-quietly": Recipe(steps=6, micro=2, sync_each=False, clip=1.0),
    "small-buckets": Recipe(steps=5, engine={"bucket_cap_mb": 0.002}),
}
CASES = [*(("gpt2", recipe) for recipe in RECIPES), ("mixture", "plain"), ("mixture", "accumulated-quietly")]


def engine_recipe(recipe: Recipe, engine: str, model: str) -> Recipe:
    """DDP must be told of the parameter that the mixture never uses."""
    if engine == "ddp" and model == "mixture":
        return Recipe(**{**vars(recipe), "engine": {**recipe.engine, "find_unused_parameters": True}})
    return recipe


@pytest.mark.each("recipe")
@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_losses_weights_and_state_equal_single_process_training(comm, model: str, recipe: str) -> None:
    expected = train(fresh(MODELS[model]), RECIPES[recipe])
    assert expected.losses[-1] < expected.losses[0]
    for engine in ENGINES:
        chosen = engine_recipe(RECIPES[recipe], engine, model)
        trained = train(fresh(MODELS[model], comm.rank), chosen, engine, comm)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-5, err_msg=engine)
        if comm.rank == 0:
            assert largest_difference(expected.weights, trained.weights) < 1e-5, engine
            check_state(expected.state, trained.state)
        else:
            assert engine == "ddp" or trained.weights == trained.state == absent_state(comm.rank)


def check_state(expected: dict, found: dict) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            other = found["state"][number][key]
            if torch.is_tensor(value):
                torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-6)
            else:
                assert other == value
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax],
    ids=lambda c: c.__name__,
)
def test_other_torch_optimizers_are_sharded_too(comm, optimizer: type[torch.optim.Optimizer]) -> None:
    recipe = Recipe(optimizer, {"lr": 1e-3, "eps": 1e-6}, steps=3)
    expected = train(fresh(MODELS["gpt2"]), recipe)
    trained = train(fresh(MODELS["gpt2"], comm.rank), recipe, "stage 3", comm)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-5)
    if comm.rank == 0:
        assert largest_difference(expected.weights, trained.weights) < 1e-5
