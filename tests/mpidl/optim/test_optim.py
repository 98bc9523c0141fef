"""LARS and LAMB against the papers' formulas in float64 numpy, plain and sharded; learning-rate schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.errors import ConfigurationError
from mpidl.optim import LAMB, LARS, schedules, trust_ratio
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.zero.ways import STAGES

SHAPES = ((5, 3), (7,), (2, 3, 2), (1,))
Arrays = list[np.ndarray]


class NumpyLARS:
    def __init__(self, lr=0.5, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3, trust=True) -> None:
        self.lr, self.m, self.beta, self.eta, self.trust = lr, momentum, weight_decay, trust_coefficient, trust
        self.velocity: dict[int, np.ndarray] = {}

    def step(self, index: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        rate = 1.0
        w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
        if self.trust and w_norm > 0 and g_norm > 0:
            rate = self.eta * w_norm / (g_norm + self.beta * w_norm)
        v = self.m * self.velocity.get(index, 0.0) + self.lr * rate * (g + self.beta * w)
        self.velocity[index] = v
        return w - v


class NumpyLAMB:
    def __init__(self, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bounds=None, trust=True) -> None:
        self.lr, self.betas, self.eps, self.decay, self.bounds, self.trust = lr, betas, eps, weight_decay, bounds, trust
        self.state: dict[int, tuple[int, Any, Any]] = {}

    def step(self, index: int, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        t, m, v = self.state.get(index, (0, 0.0, 0.0))
        b1, b2 = self.betas
        t, m, v = t + 1, b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        self.state[index] = (t, m, v)
        update = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.eps) + self.decay * w
        w_norm, u_norm = np.sqrt((w**2).sum()), np.sqrt((update**2).sum())
        if self.bounds is not None:
            w_norm = np.clip(w_norm, *self.bounds)
        ratio = w_norm / u_norm if self.trust and w_norm > 0 and u_norm > 0 else 1.0
        return w - self.lr * ratio * update


PAIRS = {"lars": (LARS, NumpyLARS), "lamb": (LAMB, NumpyLAMB)}
SETTINGS = {
    "lars": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1, "lr": 3.0},
        {"trust": False, "lr": 0.01},
    ],
    "lamb": [
        {},
        {"weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"bounds": (0.5, 2.0), "weight_decay": 0.1},
        {"trust": False, "eps": 1e-3},
    ],
}
CASES = [(method, settings) for method, several in SETTINGS.items() for settings in several]


def start(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters, one of them zero."""
    random = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=random, dtype=dtype) for shape in SHAPES]
    made[1].zero_()
    return [nn.Parameter(tensor) for tensor in made]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor | None]:
    """Gradients of a step: at times zero, at times none."""
    random = torch.Generator().manual_seed(100 + step)
    made: list[torch.Tensor | None] = [torch.randn(shape, generator=random, dtype=dtype) for shape in SHAPES]
    if step == 0:
        made[2] = torch.zeros(SHAPES[2], dtype=dtype)
    if step % 3 == 1:
        made[0] = None
    return made


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        for p, g in zip(parameters, gradients(step, parameters[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


def reference(method: Any, last: int, first: Arrays | None = None, sign: float = 1.0) -> Arrays:
    weights = first or [p.detach().numpy().astype(np.float64) for p in start()]
    for step in range(last):
        for index, g in enumerate(gradients(step)):
            if g is not None:
                weights[index] = method.step(index, weights[index], sign * g.numpy())
    return weights


@pytest.mark.parametrize(("method", "settings"), CASES)
@pytest.mark.parametrize("maximize", [False, True])
def test_weights_follow_the_formulas(method: str, settings: dict, maximize: bool) -> None:
    ours, numpys = PAIRS[method]
    defaults = {"lr": {"lars": 0.5, "lamb": 0.01}[method], **settings}
    parameters = start()
    run(ours(parameters, maximize=maximize, **defaults), parameters, 0, 30)
    expected = reference(numpys(**defaults), 30, sign=-1.0 if maximize else 1.0)
    for p, weights in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("method", PAIRS)
def test_single_precision_stays_near_the_formulas(method: str) -> None:
    ours, numpys = PAIRS[method]
    parameters = start(torch.float32)
    first = [p.detach().numpy().astype(np.float64) for p in parameters]
    run(ours(parameters, lr=0.1), parameters, 0, 20)
    random = [gradients(step, torch.float32) for step in range(20)]
    method_ = numpys(lr=0.1)
    for made in random:
        for index, g in enumerate(made):
            if g is not None:
                first[index] = method_.step(index, first[index], g.numpy().astype(np.float64))
    for p, weights in zip(parameters, first, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", PAIRS)
def test_groups_have_their_own_settings(method: str) -> None:
    ours, numpys = PAIRS[method]
    parameters = start()
    groups = [{"params": parameters[:2], "weight_decay": 0.2}, {"params": parameters[2:], "trust": False, "lr": 0.02}]
    run(ours(groups, lr=0.1), parameters, 0, 10)
    first = reference(numpys(lr=0.1, weight_decay=0.2), 10)[:2]
    second = reference(numpys(lr=0.02, trust=False), 10)[2:]
    for p, weights in zip(parameters, first + second, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("method", PAIRS)
def test_a_loaded_state_goes_on_the_same(method: str) -> None:
    ours, _ = PAIRS[method]
    whole, parts = start(), start()
    run(ours(whole, lr=0.1), whole, 0, 8)
    before = ours(parts, lr=0.1)
    run(before, parts, 0, 4)
    after = ours(parts, lr=0.7)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(after, parts, 4, 8)
    for p, q in zip(whole, parts, strict=True):
        assert torch.equal(p, q)


def test_a_closure_is_called_with_gradients_on() -> None:
    for optimizer_class in (LARS, LAMB):
        p = nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = optimizer_class([p], lr=0.1)

        def closure(p: nn.Parameter = p, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p**2).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 25.0
        assert float((p.detach() ** 2).sum()) < 25.0
    assert optimizer.step() is None


def test_without_gradients_nothing_moves_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = start()
    for optimizer in (LARS(parameters, lr=0.1), LAMB(parameters)):
        monkeypatch.setattr(optimizer, "squared_norms", pytest.fail)
        optimizer.step()
        assert not optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(parameters, start(), strict=True))


def test_norms_are_measured_once_a_step() -> None:
    for optimizer_class in (LARS, LAMB):
        parameters = start()
        optimizer = optimizer_class([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
        calls = []

        def measure(tensors: list[torch.Tensor], of: list[torch.Tensor], calls: list[int] = calls) -> torch.Tensor:
            assert len(of) == len(tensors)
            calls.append(len(tensors))
            return trust_ratio.squared_norms(tensors)

        optimizer.squared_norms = measure
        run(optimizer, parameters, 0, 2)
        assert calls == [8, 6]  # weights and updates; in the second step one parameter has no gradient


def test_squared_norms_of_any_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.zeros(0), torch.full((4096,), 2.0, dtype=torch.bfloat16)]
    found = trust_ratio.squared_norms(tensors)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([25.0, 0.0, 4096 * 4.0])
    assert trust_ratio.squared_norms([]).shape == (0,)


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (LARS, {"lr": -1.0}, "lr: got -1.0; needs a number of at least 0"),
        (LARS, {"lr": "fast"}, "lr: got 'fast'; needs a number of at least 0"),
        (LARS, {"lr": 1.0, "momentum": 1.0}, "momentum: got 1.0; needs at least 0 and below 1"),
        (LARS, {"lr": 1.0, "trust_coefficient": 0.0}, "trust_coefficient: got 0.0; needs above 0"),
        (LARS, {"lr": 1.0, "weight_decay": -0.1}, "weight_decay: got -0.1"),
        (LARS, {"lr": 1.0, "trust": None}, "trust: got None; needs True or False"),
        (LAMB, {"betas": (0.9, 1.0)}, "betas: got"),
        (LAMB, {"eps": 0.0}, "eps: got 0.0; needs above 0"),
        (LAMB, {"bounds": (2.0, 1.0)}, "bounds: got"),
    ],
)
def test_settings_that_cannot_work_are_refused(optimizer: Any, settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        optimizer(start(), **settings)
    with pytest.raises(ConfigurationError, match=message):
        optimizer([{"params": start(), **settings}], lr=1.0)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="LAMB: got a sparse gradient"):
        LAMB(table.parameters()).step()


# ---- sharded ---------------------------------------------------------------------------------------------

SHARDED = {
    "lars": Recipe(LARS, {"lr": 5.0, "weight_decay": 0.01}, steps=6),
    "lamb": Recipe(LAMB, {"lr": 0.01}, steps=6, clip=1.0),
}


@pytest.mark.mpi
@pytest.mark.parametrize(("model", "method"), [("gpt2", "lamb"), ("mixture", "lamb"), ("mixture", "lars")])
def test_zero_follows_single_process_training(comm, model: str, method: str) -> None:
    recipe = SHARDED[method]
    expected = train(fresh(MODELS[model]), recipe)
    assert largest_difference(expected.weights, dict(fresh(MODELS[model]).state_dict())) > 1e-2
    for engine in STAGES:
        trained = train(fresh(MODELS[model], comm.rank), recipe, engine, comm)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-5, err_msg=engine)
        if comm.rank == 0:
            assert largest_difference(expected.weights, trained.weights) < 1e-5, engine
            assert trained.state["state"].keys() == expected.state["state"].keys()


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_with_groups_and_slices_that_are_empty(comm, stage: int) -> None:
    """A parameter of one element lies on one rank alone; its norm is needed on all."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        small = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        return [
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
            {"params": [p for p in small if p.numel() > 1], "trust": False, "weight_decay": 0.0},
            {"params": [p for p in small if p.numel() == 1], "lr": 0.05},
        ]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            model(*sequences(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    alone, sharded = fresh(MODELS["mixture"]), fresh(MODELS["mixture"], comm.rank)
    steps(alone, LAMB(groups(alone), lr=0.01))
    optimizer = mpidl.ZeroOptimizer(sharded, LAMB, stage, groups(sharded), comm, lr=0.01)
    steps(sharded, optimizer)
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert largest_difference(dict(alone.state_dict()), weights) < 1e-5


# ---- schedules -------------------------------------------------------------------------------------------


def rates(make: Any, steps: int, *args: Any, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer, *args, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_follow_their_formulas() -> None:
    up = [0.0, 0.5, 1.0, 1.5]
    assert rates(schedules.warmup_constant, 7, 4) == pytest.approx([*up, 2.0, 2.0, 2.0])
    assert rates(schedules.warmup_linear, 10, 4, 8) == pytest.approx([*up, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    assert rates(schedules.warmup_linear, 7, 4, 6, end=0.5) == pytest.approx([*up, 2.0, 1.5, 1.0])
    cosine = [0.2 + 0.9 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert rates(schedules.warmup_cosine, 9, 4, 8, end=0.1) == pytest.approx([*up, *cosine])
    cubes = [2.0 * (1 - k / 4) ** 3 for k in range(5)]
    assert rates(schedules.warmup_polynomial, 9, 4, 8, 3.0) == pytest.approx([*up, *cubes])
    assert rates(schedules.warmup_linear, 3, 0, 2) == pytest.approx([2.0, 1.0, 0.0])


def test_gradual_warm_up_goes_from_the_base_rate_to_the_scaled_one() -> None:
    lr = schedules.scale_learning_rate(0.25, batch=2048)
    assert lr == 2.0
    assert rates(schedules.warmup_constant, 5, 4, start=0.25 / lr) == pytest.approx([0.25, 0.6875, 1.125, 1.5625, 2.0])
    assert schedules.scale_learning_rate(0.25, batch=1024, rule="sqrt") == 0.5
    assert schedules.scale_learning_rate(0.5, batch=32, base_batch=64) == 0.25


def test_a_schedule_goes_on_from_its_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    first = schedules.warmup_cosine(optimizer, 2, 9)
    for _ in range(4):
        optimizer.step()
        first.step()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    second = schedules.warmup_cosine(other, 2, 9)
    second.load_state_dict(first.state_dict())
    for scheduler in (first, second):
        scheduler.optimizer.step()
        scheduler.step()
    assert first.get_last_lr() == second.get_last_lr() == pytest.approx([1 + math.cos(math.pi * 3 / 7)])


@pytest.mark.parametrize(
    ("make", "arguments", "settings", "message"),
    [
        (schedules.warmup_constant, (-1,), {}, "warmup_steps: got -1"),
        (schedules.warmup_linear, (5, 4), {}, "total_steps: got 4; needs at least warmup_steps, 5"),
        (schedules.warmup_cosine, (1, 4), {"end": -1.0}, "end: got -1.0"),
        (schedules.warmup_polynomial, (1, 4, 0.0), {}, "power: got 0.0"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make: Any, arguments: tuple, settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rates(make, 1, *arguments, **settings)


def test_scaling_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch: got 0; needs samples of all ranks"):
        schedules.scale_learning_rate(0.1, 0)
    with pytest.raises(ConfigurationError, match="rule: got 'cubic'; needs 'linear' or 'sqrt'"):
        schedules.scale_learning_rate(0.1, 1, rule="cubic")
