"""Every engine trains a model on a GPU as in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.mpidl.cuda.models import placed
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, train
from tests.mpidl.test_parity import check_state, engine_recipe
from tests.mpidl.zero.ways import ENGINES

pytestmark = pytest.mark.mpi

RECIPES = {
    "plain": Recipe(steps=5, clip=0.5),
    "accumulated-quietly": Recipe(steps=3, micro=2, sync_each=False, clip=1.0),
    "small-buckets": Recipe(steps=3, engine={"bucket_cap_mb": 0.002}),
}
CASES = [*(("gpt2", recipe) for recipe in RECIPES), ("mixture", "plain"), ("mixture", "accumulated-quietly")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_training_equals_single_process_training(comm: Any, place: Any, model: str, recipe: str, engine: str) -> None:
    chosen = engine_recipe(RECIPES[recipe], engine, model)
    expected = train(fresh(MODELS[model]), RECIPES[recipe])
    trained = train(placed(fresh(MODELS[model], comm.rank), place), chosen, engine, comm)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-4)
    if comm.rank == 0:
        weights = {name: t.cpu() for name, t in trained.weights.items()}
        assert largest_difference(expected.weights, weights) < 1e-4
        if engine != "ddp":
            check_state(expected.state, trained.state)
