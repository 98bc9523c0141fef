"""Optimizers that need whole parameters, or their norms, on models that are cut over tp: right, or refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, TrainingError
from mpidl.mesh import place, placement
from mpidl.optimizer_trial import StepNeeds
from mpidl.tensor import FeedForwardParallel, step_checks
from mpidl.tensor.tensor_parallel import ATTRIBUTE
from tests.mpidl.tensor.engines import MESHES, Recipe, Trained, assert_same, batch, train_alone, train_cut
from tests.mpidl.tensor.reference import all_in_float64, build, loss_of
from tests.mpidl.zero.ways import WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh"), pytest.mark.filterwarnings("ignore:units")]


class Normalised(torch.optim.Optimizer):
    """One's own: divides gradients by their norms, and keeps their sum."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    change = p.grad / p.grad.norm()
                    state = self.state[p]
                    state["sum"] = state["sum"] + change if "sum" in state else change
                    p.sub_(state["sum"], alpha=group["lr"])


class Counting(Normalised):
    """Another package's, elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class DeclaresWholes(Counting):
    """Declares a need that no trial shows."""

    step_needs = StepNeeds(wholes=True)


class DeclaresSlices(Normalised):
    """Declares that it needs no whole parameters, as if it added up its norms over tp."""

    step_needs = StepNeeds(wholes=False)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LARS": (mpidl.optim.LARS, {"lr": 0.5, "weight_decay": 0.01}),
    "LAMB": (mpidl.optim.LAMB, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    "one's own": (Normalised, {"lr": 0.001}),
}
GPT2, LLAMA = "gpt2", "llama, two key heads"  # tied and fused; key heads that ranks share


def recipe(method: str, **more: Any) -> Recipe:
    optimizer, settings = METHODS[method]
    # The gradient of a key's bias is nothing but rounding, which Adafactor makes as large as any other.
    frozen = ("c_attn.bias",) if method == "Adafactor" else ()
    return Recipe(steps=5, optimizer=optimizer, settings=settings, frozen=frozen, **more)


@pytest.mark.at_most(4)
@pytest.mark.each("method")
@pytest.mark.parametrize("name", [GPT2, LLAMA])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_zero_steps_on_a_cut_model_as_one_process(comm: Communicator, method: str, way: str, name: str) -> None:
    with all_in_float64():
        expected = train_alone(build(name), recipe(method))
        for dp, tp in MESHES[comm.size]:
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build(name), mesh)
                assert_same(train_cut(way, model, mesh, recipe(method)), expected, 1e-9)


@pytest.mark.at_most(4)
@pytest.mark.parametrize("name", [GPT2, LLAMA])
@pytest.mark.parametrize("engine", ["torch", "ddp"])
@pytest.mark.parametrize("method", ["LARS", "LAMB"])
def test_lars_and_lamb_add_up_their_norms_over_tp(comm: Communicator, method: str, engine: str, name: str) -> None:
    with all_in_float64():
        expected = train_alone(build(name), recipe(method))
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
                model = mpidl.parallelize(build(name), mesh, sequence_parallel=True)
                plain = recipe(method)
                meshed = Recipe(steps=5, optimizer=plain.optimizer, settings={**plain.settings, "mesh": mesh})
                assert_same(train_cut(engine, model, mesh, meshed), expected, 1e-9)


def several_steps(optimizers: list[torch.optim.SGD]) -> None:
    for _ in range(10):  # gradients are compared in one of them
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("engine", ["torch", "ddp"])
@pytest.mark.parametrize("separately", [False, True])
def test_gradients_that_torch_has_clipped_separately_are_refused(
    comm: Communicator, engine: str, separately: bool
) -> None:
    """Also where replicated parameters have an optimizer of their own; the error is one of all ranks of tp."""
    if comm.size == 1:
        pytest.skip("needs ranks of tp")
    with Mesh(tp=comm.size, comm=comm) as mesh, all_in_float64():
        model = mpidl.parallelize(build(GPT2), mesh)
        call = mpidl.DistributedDataParallel(model, mesh=mesh) if engine == "ddp" else model
        cut = [p for p in model.parameters() if "tp" in placement(p).axes]
        same = [p for p in model.parameters() if "tp" not in placement(p).axes]
        optimizers = [torch.optim.SGD(some, lr=0.1) for some in ([cut, same] if separately else [[*cut, *same]])]
        for step in range(12):
            loss_of(call, batch(step, 0)).backward()
            mpidl.clip_grad_norm_(model.parameters(), 0.05, mesh=mesh)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        loss_of(call, batch(12, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with pytest.raises(mpidl.TrainingError, match=rf"SGD.step: gradients .* differ over its {comm.size} ranks, as"):
            several_steps(optimizers)


class Matrices(nn.Module):
    """Nothing but matrices, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 11, bias=False), nn.Tanh(), nn.Linear(11, 6, bias=False)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def matrices() -> Matrices:
    torch.manual_seed(0)
    return Matrices().double()


def rows(step: int) -> torch.Tensor:
    return torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


PLAN = {"layers.*": FeedForwardParallel(inputs=("0",), output="2", input="input")}


def muon_alone(steps: int) -> Trained:
    model = matrices()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        loss = model(rows(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [], model.state_dict())


@pytest.mark.at_most(4)
@pytest.mark.parametrize("way", WAYS)
def test_muon_makes_whole_matrices_orthogonal(comm: Communicator, way: str) -> None:
    """Also where its state goes through the whole one of a checkpoint half way."""
    expected = muon_alone(6)
    for dp, tp in MESHES[comm.size]:
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            model, losses = matrices(), []
            mpidl.parallelize(model, mesh, PLAN)
            optimizer = mpidl.ZeroOptimizer(model, torch.optim.Muon, mesh=mesh, lr=0.02, **WAYS[way])
            for step in range(6):
                loss = model(rows(step).chunk(dp)[mesh.rank("dp")]).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total = loss.detach().clone()
                mesh["dp"].all_reduce(total, "avg")
                losses.append(total.item())
                if step == 2:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.unwrap()
            # Muon iterates in bfloat16, so that other sums show in the third digit
            assert losses == pytest.approx(expected.losses, rel=1e-3)
            for name, value in mpidl.tensor.model_state_dict(model).items():
                torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=2e-3)


@pytest.mark.ranks(2, 3, exactly=True)
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Muon, r"Muon: a step needs whole parameters, .* needs mpidl.ZeroOptimizer\(model, Muon"),
        (torch.optim.Adafactor, "Adafactor: a step needs whole parameters"),
        (Normalised, "Normalised: a step needs whole parameters"),
        (DeclaresWholes, r"DeclaresWholes: a step needs whole parameters, .*ZeroOptimizer\(model, DeclaresWholes"),
        (torch.optim.LBFGS, "LBFGS: a step on a parameter depends on others"),
        (mpidl.optim.LAMB, "LAMB: got parameters that are cut over tp, .* needs mesh="),
    ],
)
def test_a_plain_step_that_would_go_wrong_is_refused(comm: Communicator, optimizer: Any, message: str) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(matrices(), mesh, PLAN)
        before = [p.detach().clone() for p in model.parameters()]
        model(rows(0)).sum().backward()
        with pytest.raises(ConfigurationError, match=message) as caught:
            optimizer(model.parameters(), lr=0.1).step(lambda: 0.0)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.ranks(2, exactly=True)
def test_steps_that_are_right_on_parts_are_taken(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(matrices(), mesh, PLAN)
        model(rows(0)).sum().backward()
        for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, Counting, DeclaresSlices):
            optimizer(model.parameters(), lr=0.1).step()
        mpidl.optim.Dion([{"params": model.parameters(), "rule": "adamw"}]).step()
        whole = matrices()
        whole(rows(0)).sum().backward()
        assert all(placement(p).cut is None for p in whole.parameters())
        torch.optim.Muon(whole.parameters()).step()  # of a model that is whole


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("optimizer_class", "needed"),
    [(mpidl.optim.Dion, "mpidl.ZeroOptimizer"), (mpidl.optim.OneBitAdam, "a mesh without")],
)
def test_what_mpidls_own_declare_is_refused(comm: Communicator, optimizer_class: Any, needed: str) -> None:
    """Also where the parameters were cut after the optimizer had looked at them."""
    model = matrices().float()
    optimizer = optimizer_class(model.parameters())
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, PLAN)
        model(rows(0).float()).sum().backward()
        message = rf"{optimizer_class.__name__}: a step needs whole parameters, .* needs {needed}"
        with pytest.raises(ConfigurationError, match=message):
            optimizer.step()


@pytest.mark.ranks(2, exactly=True)
def test_steps_in_backward_with_norms_over_tp_are_refused(comm: Communicator) -> None:
    """The ranks of tp have other buckets, so that they would add up other norms."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(matrices(), mesh, PLAN)
        ddp = mpidl.DistributedDataParallel(model, mesh=mesh)
        with pytest.raises(ConfigurationError, match="step_in_backward: LAMB needs norms over tp"):
            ddp.step_in_backward(mpidl.optim.LAMB(model.parameters(), mesh=mesh))
        with pytest.raises(ConfigurationError, match="Muon: a step needs whole parameters"):
            ddp.step_in_backward(torch.optim.Muon(model.parameters()))


@pytest.mark.ranks(2, 3)
def test_replicated_gradients_that_differ_a_little_are_an_error_of_the_step(comm: Communicator) -> None:
    """They differ as after torch's clipping of parts whose norms are nearly equal."""
    with Mesh(dp=1, tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(build(GPT2, torch.float32), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (1.0, 1.0003):
            loss_of(model, batch(0, 0)).backward()
            for p in model.parameters():
                if placement(p).cut is None and comm.rank == comm.size - 1:
                    assert p.grad is not None
                    p.grad.mul_(factor)
            if factor == 1.0:
                optimizer.step()
            else:
                with pytest.raises(TrainingError, match="gradients of parameters that are not cut over tp differ"):
                    optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2, 4, exactly=True)
def test_complex_gradients_are_compared(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(build(GPT2, torch.float32), mesh)
        p, part = nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(2))
        place(part, "tp")
        optimizer = torch.optim.SGD([p, part], lr=0.1)
        p.grad = torch.full((3,), 1 + 2j)
        optimizer.step()
        p.grad = torch.full((3,), 1 + (2j if mesh.rank("tp") else 1j))
        with pytest.raises(TrainingError, match="differ over its 2 ranks"):
            optimizer.step()


@pytest.mark.ranks(2, exactly=True)
def test_an_optimizer_over_several_meshes_compares_nothing(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks would compare over the meshes in the order of a set, which is another one on each."""
    with Mesh(tp=2, comm=comm) as first, Mesh(tp=2, comm=comm) as second:
        models = [mpidl.parallelize(build(GPT2, torch.float32), mesh) for mesh in (first, second)]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        for live in itertools.permutations([vars(model)[ATTRIBUTE] for model in models]):
            monkeypatch.setattr(step_checks, "_tensor_parallels_alive", live)
            assert step_checks._comparison_of(optimizer) is None
        for model, mesh in zip(models, (first, second), strict=True):
            compared = step_checks._comparison_of(torch.optim.SGD(model.parameters(), lr=0.1))
            assert compared is not None
            assert compared._mesh is mesh


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("stage", [1, 3])
def test_replicated_gradients_that_differ_are_an_error_of_zeros_step(comm: Communicator, stage: int) -> None:
    """Without clipping, which compares them as well; on 4 ranks each of tp has shards of other ranks of dp."""
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(build(GPT2, torch.float32), mesh)
        factor = 1.0
        replicated = next(p for p in model.parameters() if placement(p).cut is None)
        replicated.register_hook(lambda gradient: gradient * (factor if mesh.rank("tp") else 1.0))
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=stage, mesh=mesh, lr=0.1)
        loss_of(model, batch(mesh.rank("dp"), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        factor = 1.01
        loss_of(model, batch(mesh.rank("dp"), 1)).backward()
        with pytest.raises(TrainingError, match=r"ZeroOptimizer\.step: gradients of parameters"):
            optimizer.step()
