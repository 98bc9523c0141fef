"""ZeroOptimizer beyond following single-process training: what ranks hold, states, use and wrong use."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import mpidl
from mpidl.absent_state import absent_state
from mpidl.memory import model_state_bytes
from mpidl.models.gpt2 import GPT2, GPT2Config, parameter_count
from mpidl.zero.parameters.units import cut
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, sequences, train

pytestmark = pytest.mark.mpi
STAGES = (1, 2, 3)
COUNTED = GPT2Config(vocab_size=256, block_size=32, layers=6, heads=4, embd=96)


def zero(model: nn.Module, comm, stage: int, **settings) -> mpidl.ZeroOptimizer:
    return mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=comm, lr=1e-3, **settings)


def one_step(model: nn.Module, optimizer: mpidl.ZeroOptimizer, step: int = 0) -> None:
    x, y = sequences(step, 0)
    model(x, y).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_bytes_of_model_state_a_rank_follow_the_formulas(comm, stage: int) -> None:
    """fp32 Adam, Psi parameters, N ranks: 16, 8 + 8 / N, 4 + 12 / N and 16 / N bytes a parameter."""
    model = GPT2(COUNTED)
    psi, n = parameter_count(model), comm.size
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    if stage:
        call, optimizer = model, zero(model, comm, stage, bucket_cap_mb=0.2)
    else:
        call = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.2)
        optimizer = torch.optim.AdamW(model.parameters())
    call(tokens, tokens).backward()
    optimizer.step()
    held = model_state_bytes(model, optimizer)
    expected = {
        0: (4, 4, 8),
        1: (4, 4, 8 / n),
        2: (4, 4 / n, 8 / n),
        3: (4 / n, 4 / n, 8 / n),
    }[stage]
    for category, bytes_each in zip(("parameters", "gradients", "optimizer"), expected, strict=True):
        assert held[category] == pytest.approx(bytes_each * psi, rel=0.02), category
    # What passes through: at most three buckets of stage 2, three of stage 3's largest units.
    largest = {0: 0, 1: 0, 2: 3 * (0.2 * 2**20 + 4 * 96 * 4 * 96), 3: 3 * 4 * 14 * 96 * 96}[stage]
    assert held["buckets"] <= largest


@pytest.mark.parametrize("stage", STAGES)
def test_whole_states_load_into_the_plain_model_and_optimizer(comm, stage: int) -> None:
    recipe = Recipe(steps=3)
    trained = train(fresh(MODELS["mixture"]), recipe, f"zero{stage}", comm)
    plain = fresh(MODELS["mixture"])
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    if comm.rank:
        assert trained.weights == trained.state == absent_state(comm.rank)
        return
    plain.load_state_dict(trained.weights)
    assert trained.weights["head.weight"] is trained.weights["embed.weight"]
    optimizer.load_state_dict(trained.state)


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_loaded_states_as_if_it_had_not_stopped(comm, stage: int) -> None:
    model = fresh(MODELS["gpt2"])
    optimizer = zero(model, comm, stage)
    for step in range(3):
        one_step(model, optimizer, step)
        optimizer.zero_grad()
    weights, state = optimizer.model_state_dict(), copy.deepcopy(optimizer.state_dict())
    other = fresh(MODELS["gpt2"], rank=1)
    resumed = zero(other, comm, stage)
    resumed.load_model_state_dict(weights)
    resumed.load_state_dict(state)
    for step in range(3, 5):
        for m, o in ((model, optimizer), (other, resumed)):
            one_step(m, o, step)
            o.zero_grad()
    expected, found = optimizer.model_state_dict(), resumed.model_state_dict()
    assert comm.rank or all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_loading_a_state_that_does_not_fit_is_refused_on_every_rank(comm) -> None:
    optimizer = zero(fresh(MODELS["gpt2"]), comm, 3)
    with pytest.raises(mpidl.ConfigurationError, match=r"model_state_dict\(\) gave on rank 1, which holds no state"):
        optimizer.load_model_state_dict(absent_state(1))
    with pytest.raises(mpidl.ConfigurationError, match="missing names"):
        optimizer.load_model_state_dict({"nonsense": torch.ones(1)})
    with pytest.raises(mpidl.ConfigurationError, match=r"groups of \[\] parameters"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("stage", STAGES)
def test_parameter_groups_have_their_own_settings(comm, stage: int) -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-4, "weight_decay": 0.0},
        ]

    plain, model = fresh(MODELS["gpt2"]), fresh(MODELS["gpt2"], comm.rank)
    reference = torch.optim.AdamW(groups(plain), lr=1e-2, eps=1e-6)
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.AdamW, stage, groups(model), process_group=comm, lr=1e-2, eps=1e-6
    )
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


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_returns_the_norm_of_the_whole_gradient(comm, stage: int) -> None:
    plain, model = fresh(MODELS["gpt2"]), fresh(MODELS["gpt2"])
    optimizer = zero(model, comm, stage)
    x, y = sequences(0, 0)
    plain(x, y).backward()
    model(x, y).backward()
    for norm_type in (2.0, float("inf")):
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
        assert optimizer.clip_grad_norm_(1e9, norm_type) == pytest.approx(float(expected), rel=1e-5)
    optimizer.clip_grad_norm_(0.01)
    assert optimizer.clip_grad_norm_(1e9) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_no_rank_reached_is_left_alone(comm, stage: int) -> None:
    """Weight decay would shrink it; torch leaves a parameter without gradient as it is."""
    model = fresh(MODELS["mixture"])
    optimizer = zero(model, comm, stage, weight_decay=0.5)
    one_step(model, optimizer)
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert torch.equal(weights["unused"], torch.ones(5))
        assert not torch.equal(weights["scale"], torch.ones(1))


def test_on_one_node_stage_3_keeps_one_copy_of_the_parameters(comm) -> None:
    model = fresh(MODELS["mixture"], comm.rank)
    optimizer = zero(model, comm, 3)
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


def test_both_ways_of_stage_3_train_the_same_bits(comm) -> None:
    weights = []
    for share in (True, False):
        recipe = Recipe(steps=5, clip=0.5, engine={"share_in_node": share})
        weights.append(train(fresh(MODELS["mixture"], comm.rank), recipe, "stage 3", comm).weights)
    assert comm.rank or all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("share", [True, False])
def test_evaluation_and_sampling_leave_training_as_it_was(comm, share: bool) -> None:
    runs = []
    for disturbed in (False, True):
        model = fresh(MODELS["gpt2"])
        optimizer = zero(model, comm, 3, share_in_node=share)
        for step in range(3):
            if disturbed:
                with torch.no_grad():
                    model(*sequences(9, 9))
                model(*sequences(9, 9))  # with gradients, and no backward
                with optimizer.gathered(writable=disturbed == share):
                    if comm.rank == 0:
                        model.generate(torch.zeros(1, 1, dtype=torch.int64), 12)
            one_step(model, optimizer, step)
            optimizer.zero_grad()
        runs.append(optimizer.model_state_dict())
    assert comm.rank or all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_an_exception_in_the_middle_of_a_step_can_be_survived(comm) -> None:
    model = fresh(MODELS["gpt2"])
    optimizer = zero(model, comm, 3, share_in_node=False)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("deliberate")

    logits = model(sequences(0, 0)[0])
    logits.register_hook(fail)
    with pytest.raises(RuntimeError, match="deliberate"):
        logits.sum().backward()
    optimizer.zero_grad()
    one_step(model, optimizer)
    weights = optimizer.model_state_dict()
    expected = train(fresh(MODELS["gpt2"]), Recipe(settings={"lr": 1e-3}, steps=1)).weights
    if comm.rank == 0:
        assert largest_difference(dict(expected), weights) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_sixteen_bit_parameters_have_fp32_masters(comm, stage: int) -> None:
    """Steps far below bf16's resolution add up in the master, and show in time."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage, process_group=comm, lr=1e-4)
    for _ in range(100):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = optimizer.model_state_dict()
    rounded = optimizer.model_state_dict(masters=False)
    if comm.rank == 0:
        torch.testing.assert_close(weights["weight"], torch.full((4, 4), 0.99))
        assert torch.equal(rounded["weight"], weights["weight"].bfloat16())


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_is_gone_leaves_nothing_behind(comm, stage: int) -> None:
    model = fresh(MODELS["gpt2"])
    optimizer = zero(model, comm, stage)
    one_step(model, optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_units_are_the_blocks_and_the_rest(comm) -> None:
    model = fresh(MODELS["gpt2"])
    units = cut(model)
    assert [unit.name for unit in units] == ["transformer.h.0", "transformer.h.1", "transformer.h.2", ""]
    everything = [p for unit in units for p in unit.parameters]
    assert set(everything) == set(model.parameters())
    assert len(everything) == len(set(everything))
    by_class = cut(model, [nn.LayerNorm])
    assert [unit.name for unit in by_class][:2] == ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]


def test_marked_modules_are_units_in_place_of_the_blocks_or_beside_a_rule(comm) -> None:
    model = fresh(MODELS["gpt2"])
    block = model.transformer["h"][1]
    assert mpidl.zero.unit(block.mlp) is block.mlp
    assert [unit.name for unit in cut(model)] == ["transformer.h.1.mlp", ""]
    names = {unit.name for unit in cut(model, [type(block.attn)])}
    assert names == {"", "transformer.h.1.mlp", *(f"transformer.h.{number}.attn" for number in range(3))}


def test_own_units_train_alike(comm) -> None:
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_smaller_than_the_world(comm, stage: int) -> None:
    model = Tiny()
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage, process_group=comm, lr=1.0)
    model(torch.tensor(float(comm.rank))).backward()
    optimizer.step()
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        assert weights["only"].item() == pytest.approx(1 - (comm.size - 1) / 2)


def test_parameters_unfrozen_and_not_added_are_named(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[0].requires_grad_(True)
    optimizer = zero(model, comm, 3)
    model[1].bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(mpidl.TrainingError, match=r"1\.bias: unfrozen since construction; add it by add_param_group"):
        optimizer.step()
