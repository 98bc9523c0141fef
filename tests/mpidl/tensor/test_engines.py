"""Every engine trains a model that is cut over tp, on a mesh with dp, as one process trains it on the global batch."""

from __future__ import annotations

import pytest

import mpidl
from collectives import Communicator
from mpidl import Mesh
from tests.mpidl.tensor.engines import ENGINES, MESHES, Recipe, Trained, assert_same, train_alone, train_cut
from tests.mpidl.tensor.reference import all_in_float64, build

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh"), pytest.mark.filterwarnings("ignore:units")]

RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(steps=5, clip=0.05),
    "accumulated": Recipe(steps=4, micro=3, clip=0.05),
    "frozen": Recipe(steps=4, frozen=("wte", "embed", "ln_1", "input_layernorm", "c_attn.bias", "k_proj"), clip=0.05),
}


def trained_alone(name: str, recipe: Recipe) -> Trained:
    return train_alone(build(name), recipe)


@pytest.mark.each("engine")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama, two key heads"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_train_a_cut_model_as_one_process(
    comm: Communicator, engine: str, name: str, sequence_parallel: bool, recipe: str
) -> None:
    with all_in_float64():
        expected = trained_alone(name, RECIPES[recipe])
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build(name), mesh, sequence_parallel=sequence_parallel)
                assert_same(train_cut(engine, model, mesh, RECIPES[recipe]), expected)
