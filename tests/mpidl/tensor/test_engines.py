"""Every engine trains a model that is cut over tp, on a mesh with dp, as one process trains it on the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.mesh import placement
from mpidl.tensor import FeedForwardParallel
from tests.mpidl.tensor.engines import (
    ADAM,
    ENGINES,
    MESHES,
    Recipe,
    Trained,
    assert_same,
    batch,
    clip,
    engine_of,
    train_alone,
    train_cut,
)
from tests.mpidl.tensor.reference import all_in_float64, build, loss_of
from tests.mpidl.tensor.test_lora import adapted
from tests.mpidl.zero.ways import WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh"), pytest.mark.filterwarnings("ignore:units")]

RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(clip=0.05),
    "accumulated": Recipe(micro=3, clip=0.05),
    "reduced each": Recipe(micro=3, reduces_each=True, clip=0.05),
    "frozen": Recipe(frozen=("wte", "embed", "ln_1", "input_layernorm", "c_attn.bias", "k_proj"), clip=0.05),
}


def trained_alone(name: str, recipe: Recipe) -> Trained:
    return train_alone(build(name), recipe)


@pytest.mark.at_most(4)
@pytest.mark.each("engine")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama, two key heads"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_train_a_cut_model_as_one_process(
    comm: Communicator, engine: str, name: str, sequence_parallel: bool, recipe: str, fewer: Callable[[int], int]
) -> None:
    chosen = replace(RECIPES[recipe], steps=fewer(20))
    with all_in_float64():
        expected = trained_alone(name, chosen)
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build(name), mesh, sequence_parallel=sequence_parallel)
                assert_same(train_cut(engine, model, mesh, chosen), expected)


# Adam divides by the size of a gradient: where adapters have next to none, it makes rounding as large as the others.
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def of_family(name: str) -> nn.Module:
    return adapted("gpt2", ("c_attn", "c_fc", "c_proj")) if name == "gpt2 with adapters" else build(name)


@pytest.mark.at_most(4)
@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("bert", True), ("t5", True), ("t5", False), ("gpt2 with adapters", True)]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_train_the_other_families(
    comm: Communicator, engine: str, name: str, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    recipe = Recipe(steps=fewer(20), micro=2, clip=0.05)
    if name == "gpt2 with adapters":
        recipe = replace(recipe, optimizer=torch.optim.SGD, settings=MOMENTUM)
    with all_in_float64():
        expected = train_alone(of_family(name), recipe)
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(of_family(name), mesh, sequence_parallel=sequence_parallel)
                assert_same(train_cut(engine, model, mesh, recipe), expected)


@pytest.mark.at_most(4)
@pytest.mark.each("engine")
@pytest.mark.parametrize("norm_type", [2.0, 3.0, inf])
@pytest.mark.parametrize("name", ["gpt2", "llama, two key heads"])
@pytest.mark.parametrize(
    ("engine", "clipper"),
    [
        ("torch", "mpidl"),
        ("ddp", "mpidl"),
        *((way, whose) for way in WAYS for whose in ("optimizer", "mpidl", "torch")),
    ],
)
def test_a_norm_counts_every_element_once(
    comm: Communicator, engine: str, name: str, clipper: str, norm_type: float
) -> None:
    """By torch's own function too where ZeRO has the gradients, which answer for all ranks."""
    recipe = Recipe(steps=3, clip=0.01, norm_type=norm_type, clipper=clipper)
    with all_in_float64():
        expected = trained_alone(name, recipe)
        assert min(expected.norms) > 0.01
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build(name), mesh, sequence_parallel=norm_type != 3.0)
                assert_same(train_cut(engine, model, mesh, recipe), expected)


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", WAYS)
def test_the_state_of_the_model_is_the_whole_ones(comm: Communicator, engine: str) -> None:
    """Also loading it sets every rank's part, and its mark on another rank of dp is refused by all."""
    expected = build("llama, two key heads").state_dict()
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(build("llama, two key heads"), mesh)
        with engine_of(engine, model, mesh, Recipe()) as (_, optimizer):
            states = optimizer.model_state_dict()
            if mesh.rank("dp") == 0:
                assert states.keys() == expected.keys()
                assert all(torch.equal(states[name], value) for name, value in expected.items())
            given = {name: -value for name, value in expected.items()}
            optimizer.load_model_state_dict(given)
            wrong = {**given, "lm_head.weight": torch.zeros(2, 2)} if mesh.rank("tp") == 1 else given
            with pytest.raises(mpidl.ConfigurationError, match="lm_head"):
                optimizer.load_model_state_dict(wrong)
        states = mpidl.tensor.model_state_dict(model)
        assert all(torch.equal(states[name], -value) for name, value in expected.items())


class Narrow(nn.Module):
    """A network of two features, of which the third rank has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(5, 2), nn.Linear(2, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_clipping_may_round_differently_over_tp(comm: Communicator, stage: int) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        narrow = Narrow()
        model = nn.Sequential(narrow)
        mpidl.parallelize(model, mesh, {"0": FeedForwardParallel(inputs=("inner",), output="outer", input="x")})
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage, mesh=mesh, lr=0.01)
        rounded = 1 + 2e-5 * mesh.rank("tp")  # as by sums that a GPU makes in another order
        assert narrow.outer.bias is not None
        narrow.outer.bias.register_hook(lambda gradient: gradient * rounded)
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_may_hold_an_empty_part(comm: Communicator, engine: str) -> None:
    def loss(call: Any, step: int) -> torch.Tensor:
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        return call(x).square().mean()  # type: ignore[no-any-return]

    whole = Narrow()
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    norms = []
    for step in range(4):
        loss(whole, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item())
        plain.step()
        plain.zero_grad()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        narrow = Narrow()
        model = nn.Sequential(narrow)
        mpidl.parallelize(model, mesh, {"0": FeedForwardParallel(inputs=("inner",), output="outer", input="x")})
        assert comm.rank < 2 or (narrow.inner.weight.numel() == 0 and placement(narrow.inner.weight).cut is not None)
        recipe = Recipe(settings={"lr": 0.01}, clip=0.1)
        found = []
        with engine_of(engine, model, mesh, recipe) as (call, optimizer):
            for step in range(4):
                loss(call, step).backward()
                found.append(clip(model, optimizer, mesh, recipe))
                optimizer.step()
                optimizer.zero_grad()
        assert found == pytest.approx(norms, rel=1e-10)
        for name, value in mpidl.tensor.model_state_dict(model).items():
            torch.testing.assert_close(value, whole.state_dict()[name.removeprefix("0.")], rtol=1e-10, atol=1e-12)


@pytest.mark.at_most(4)
@pytest.mark.limit(300)
@pytest.mark.each("engine")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_what_ranks_of_tp_share_has_the_same_bits(
    comm: Communicator, engine: str, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    """After 100 steps in single precision: replicated parameters, and key heads that some of the ranks share."""
    dp, tp = MESHES[comm.size][0]
    with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
        model = build("llama, two key heads", torch.float32)
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        train_cut(engine, model, mesh, Recipe(steps=fewer(100), clip=0.05))
        own = {name: (placement(p).cut, p.detach()) for name, p in model.named_parameters()}
        shared = 0
        for theirs in mpidl.all_gather_object(mesh["tp"], own):
            for name, (cut, values) in theirs.items():
                if cut == own[name][0]:
                    assert torch.equal(values, own[name][1]), name
                    shared += 1
        assert shared >= len(own) + 5 * (tp - 1)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, small buckets": ("ddp", {"bucket_cap_mb": 0.002}),
    **{f"{way}, steps in backward": (way, {"step_in_backward": True}) for way in WAYS},
    "stage 2, small buckets": ("stage 2", {"bucket_cap_mb": 0.002}),
    "stage 3 gathered, small units": ("stage 3 gathered", {"units": nn.LayerNorm}),
    "stage 3 gathered, kept": ("stage 3 gathered", {"reshard_after_forward": False}),
}


@pytest.mark.at_most(4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_engines(comm: Communicator, setting: str) -> None:
    """Under sequence parallelism, where gradients of norms are summed in between."""
    engine, given = SETTINGS[setting]
    recipe = Recipe(steps=5, engine=given)
    with all_in_float64():
        expected = trained_alone("gpt2", recipe)
        for dp, tp in MESHES[comm.size]:
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build("gpt2"), mesh, sequence_parallel=True)
                assert_same(train_cut(engine, model, mesh, recipe), expected)


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.each("way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, mpidl.optim.LAMB, torch.optim.Adafactor])
def test_hybrid_sharding(comm: Communicator, way: str, optimizer: Any) -> None:
    """Every rank of dp has whole shards, and is one of the replicas."""
    frozen = ("c_attn.bias",) if optimizer is torch.optim.Adafactor else ()  # see test_optimizers
    clip_at = None if optimizer is torch.optim.Adafactor else 0.05
    recipe = Recipe(steps=4, optimizer=optimizer, settings={"lr": 0.01}, clip=clip_at, frozen=frozen)
    with all_in_float64():
        expected = trained_alone("gpt2", recipe)
        with Mesh(tp=1 if comm.size == 2 else 2, comm=comm) as mesh:
            data = mesh["dp"]
            shards = data.split(data.rank)
            model = mpidl.parallelize(build("gpt2"), mesh, sequence_parallel=True)
            assert_same(train_cut(way, model, mesh, replace(recipe, engine={"shard_group": shards})), expected, 1e-9)


@pytest.mark.at_most(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ddp_steps_in_backward(comm: Communicator, sequence_parallel: bool) -> None:
    recipe = Recipe(steps=5)
    with all_in_float64():
        expected = trained_alone("gpt2", recipe)
        for dp, tp in MESHES[comm.size]:
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build("gpt2"), mesh, sequence_parallel=sequence_parallel)
                ddp = mpidl.DistributedDataParallel(model, mesh=mesh, bucket_cap_mb=0.002)
                optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
                ddp.step_in_backward(optimizer)
                for step in range(recipe.steps):
                    loss_of(ddp, batch(step, 0).chunk(dp)[mesh.rank("dp")]).backward()
                    optimizer.step()
                for name, value in mpidl.tensor.model_state_dict(model).items():
                    torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=1e-10)
