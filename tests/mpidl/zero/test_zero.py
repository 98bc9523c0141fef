"""ZeroOptimizer beyond following single-process training: what ranks hold, states, use and wrong use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpidl
from mpidl.absent_state import absent_state
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.zero.ways import ADAM, STAGES, zero

pytestmark = pytest.mark.mpi
every_stage = pytest.mark.parametrize("way", STAGES)


def one_step(model: nn.Module, optimizer: mpidl.ZeroOptimizer, step: int = 0) -> None:
    x, y = sequences(step, 0)
    model(x, y).backward()
    optimizer.step()


@every_stage
def test_whole_states_load_into_the_plain_model_and_optimizer(comm, way: str) -> None:
    recipe = Recipe(steps=3)
    trained = train(fresh(MODELS["mixture"]), recipe, way, comm)
    plain = fresh(MODELS["mixture"])
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    if comm.rank:
        assert trained.weights == trained.state == absent_state(comm.rank)
        return
    plain.load_state_dict(trained.weights)
    assert trained.weights["head.weight"] is trained.weights["embed.weight"]
    optimizer.load_state_dict(trained.state)


@every_stage
def test_training_goes_on_from_loaded_states_as_if_it_had_not_stopped(comm, way: str) -> None:
    model = fresh(MODELS["gpt2"])
    optimizer = zero(model, comm, way)
    for step in range(3):
        one_step(model, optimizer, step)
        optimizer.zero_grad()
    weights, state = optimizer.model_state_dict(), copy.deepcopy(optimizer.state_dict())
    other = fresh(MODELS["gpt2"], rank=1)
    resumed = zero(other, comm, way)
    resumed.load_model_state_dict(weights)
    resumed.load_state_dict(state)
    for step in range(3, 5):
        for m, o in ((model, optimizer), (other, resumed)):
            one_step(m, o, step)
            o.zero_grad()
    expected, found = optimizer.model_state_dict(), resumed.model_state_dict()
    assert comm.rank or all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@every_stage
def test_parameter_groups_have_their_own_settings(comm, way: str) -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-4, "weight_decay": 0.0},
        ]

    plain, model = fresh(MODELS["gpt2"]), fresh(MODELS["gpt2"], comm.rank)
    reference = torch.optim.AdamW(groups(plain), **ADAM)
    optimizer = zero(model, comm, way, params=groups(model))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (reference, optimizer)]
    x, y = sequences(0, 0)
    for _ in range(5):
        for m, o in ((plain, reference), (model, optimizer)):
            m(x, y).backward()
            o.step()
            o.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert largest_difference(dict(plain.state_dict()), weights) < 1e-5


@every_stage
def test_a_parameter_that_no_rank_reached_is_left_alone(comm, way: str) -> None:
    """Weight decay would shrink it; torch leaves a parameter without gradient as it is."""
    model = fresh(MODELS["mixture"])
    optimizer = zero(model, comm, way, weight_decay=0.5)
    one_step(model, optimizer)
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert torch.equal(weights["unused"], torch.ones(5))
        assert not torch.equal(weights["scale"], torch.ones(1))


def test_on_one_node_stage_3_keeps_one_copy_of_the_parameters(comm) -> None:
    model = fresh(MODELS["mixture"], comm.rank)
    optimizer = zero(model, comm, "stage 3")
    one_step(model, optimizer)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            comm.barrier()
            if comm.rank == number % comm.size:
                p.fill_(number)
            comm.barrier()
            assert (p == number).all()
    assert list(model.state_dict()) == list(fresh(MODELS["mixture"]).state_dict())
    with optimizer.gathered():
        for number, p in enumerate(model.parameters()):
            assert (p == number).all()
            p.add_(1)  # by every rank, on its own copy
    for number, p in enumerate(model.parameters()):
        assert (p == number + 1).all()


@pytest.mark.parametrize("way", ["stage 3", "stage 3 gathered"])
def test_evaluation_and_sampling_leave_training_as_it_was(comm, way: str) -> None:
    runs = []
    for disturbed in (False, True):
        model = fresh(MODELS["gpt2"])
        optimizer = zero(model, comm, way)
        for step in range(3):
            if disturbed:
                with torch.no_grad():
                    model(*sequences(9, 9))
                model(*sequences(9, 9))  # with gradients, and no backward
                with optimizer.gathered(writable=disturbed == (way == "stage 3")):
                    if comm.rank == 0:
                        model.generate(torch.zeros(1, 1, dtype=torch.int64), 12)
            one_step(model, optimizer, step)
            optimizer.zero_grad()
        runs.append(optimizer.model_state_dict())
    assert comm.rank or all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@every_stage
def test_sixteen_bit_parameters_have_fp32_masters(comm, way: str) -> None:
    """Steps far below bf16's resolution add up in the master, and show in time."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = zero(model, comm, way, torch.optim.SGD, lr=1e-4)
    for _ in range(20):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = optimizer.model_state_dict()
    rounded = optimizer.model_state_dict(masters=False)
    if comm.rank == 0:
        torch.testing.assert_close(weights["weight"], torch.full((4, 4), 0.998))
        assert torch.equal(rounded["weight"], weights["weight"].bfloat16())
        assert (rounded["weight"] < 1).all()


def test_own_units_train_as_one_process(comm) -> None:
    expected = train(fresh(MODELS["gpt2"]), Recipe(steps=3)).losses
    for rule in (lambda module: isinstance(module, nn.LayerNorm), lambda module: False):
        recipe = Recipe(steps=3, engine={"units": rule})
        found = train(fresh(MODELS["gpt2"], comm.rank), recipe, "stage 3", comm).losses
        assert found == pytest.approx(expected, rel=1e-5)


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.only * x).sum()


@every_stage
def test_a_model_smaller_than_the_world(comm, way: str) -> None:
    model = Tiny()
    optimizer = zero(model, comm, way, torch.optim.SGD, lr=1.0)
    model(torch.tensor(float(comm.rank))).backward()
    optimizer.step()
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert weights["only"].item() == pytest.approx(1 - (comm.size - 1) / 2)


def test_parameters_unfrozen_and_not_added_are_named(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[0].requires_grad_(True)
    optimizer = zero(model, comm, "stage 3")
    model[1].bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(mpidl.TrainingError, match=r"1\.bias: unfrozen .*add_param_group"):
        optimizer.step()
