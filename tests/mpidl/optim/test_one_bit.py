"""Optimizers that send one bit an element, against float64 numpy that simulates all ranks; DDP and ZeRO-1 alike."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.gradients.buckets import layout_of
from mpidl.job.objects import broadcast_object
from mpidl.optim.one_bit import OneBitOptimizer
from mpidl.optim.one_bit.exchange import OneBitExchange
from tests.mpidl.optim import one_bit_reference as reference
from tests.mpidl.small_models import MODELS, fresh

ENGINES = ("ddp", "stage 1")
SHAPES = [(5, 3), (40,), (1,), (9, 11)]
engines = pytest.mark.parametrize("engine", ENGINES)


class Slopes(nn.Module):
    """Parameters whose gradients are what a forward pass is given."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape, generator=random) for shape in SHAPES])

    def forward(self, slopes: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, slopes, strict=True)]).sum()


def slopes(step: int, rank: int) -> list[torch.Tensor]:
    """Gradients of sizes that differ, with elements that are always zero."""
    random = np.random.default_rng([step, rank])
    made = [torch.from_numpy(random.normal(size=shape) * 10.0**n + 0.3) for n, shape in enumerate(SHAPES)]
    made[3][4] = 0.0
    return made


class Training:
    """An engine with an optimizer on slopes."""

    def __init__(
        self, comm: Communicator, engine: str, optimizer_class: Any, model: nn.Module, **settings: Any
    ) -> None:
        self.comm, self.model, self.called = comm, model, model
        if engine == "ddp":
            wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
            self.called = wrapped
            self.inner: OneBitOptimizer = optimizer_class(model.parameters(), process_group=comm, **settings)
            self.optimizer: Any = self.inner
            wrapped.register_comm_hook(self.inner, mpidl.optim.one_bit_hook)
        else:
            self.optimizer = mpidl.ZeroOptimizer(model, optimizer_class, stage=1, process_group=comm, **settings)
            self.inner = self.optimizer.inner_optimizer

    def step(self, *inputs: Any, scale: float = 1.0) -> None:
        (self.called(*inputs) * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            self.step([g.float() for g in slopes(step, self.comm.rank)])

    def state(self) -> dict[str, Any]:
        """The state_dict, of mean errors."""
        self.inner.gather_errors()
        found: dict[str, Any] = self.optimizer.state_dict()
        return found

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def check_equal_on_all_ranks(self) -> None:
        theirs = self.weights().clone()
        self.comm.broadcast(theirs)
        assert torch.equal(theirs, self.weights())


def nodes_of(comm: Communicator, where: str | None) -> int:
    return comm.nodes if where == "between_nodes" else comm.size


def of_nodes(step: int, ranks: int, nodes: int) -> list[list[np.ndarray]]:
    """The gradients of each node: the means of its ranks'."""
    local = ranks // nodes
    everyone = [[g.float().double().numpy() for g in slopes(step, rank)] for rank in range(ranks)]
    groups = [everyone[node * local : (node + 1) * local] for node in range(nodes)]
    return [[np.mean(each, 0) for each in zip(*group, strict=True)] for group in groups]


def check_against(training: Training, expected: Any, steps: int, nodes: int, rtol: float = 2e-4) -> None:
    """Steps, and compares the weights with the reference's after each."""
    for step in range(steps):
        training.run(step, 1)
        expected.step(of_nodes(step, training.comm.size, nodes))
        for p, w in zip(training.model.parameters(), expected.w, strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=rtol, atol=rtol)
        training.check_equal_on_all_ranks()


def start() -> list[np.ndarray]:
    return [p.detach().double().numpy() for p in Slopes().parameters()]


# ---- 1-bit Adam ----------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_adam_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    nodes = nodes_of(comm, where)
    expected = reference.Adam(start(), reference.Exchange(SHAPES, comm.size, nodes), freeze_step=6, lr=0.01, wd=0.1)
    settings = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 6, "where": where}
    check_against(Training(comm, engine, mpidl.optim.OneBitAdam, Slopes(), **settings), expected, 16, nodes)


@pytest.mark.mpi
def test_the_warm_up_is_adam(comm: Communicator) -> None:
    ours = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), lr=0.01, weight_decay=0.1, freeze_step=100)
    ours.run(0, 5)
    plain = Slopes()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        for n, p in enumerate(plain.parameters()):
            p.grad = torch.stack([slopes(step, rank)[n].float() for rank in range(comm.size)]).mean(0)
        adam.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(ours.weights(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
def test_v_is_frozen_when_it_is_steady_after_the_warm_up_of_the_rate(comm: Communicator) -> None:
    """D = 1 / (1 - 0.8) = 5 steps. Gradients shrink by 0.9 a step, so that v does by 0.81, until step 12."""
    training = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), betas=(0.9, 0.8), lr_warmup_steps=3)
    found = None
    sizes = [0.9 ** min(step, 12) for step in range(60)]
    norms: list[float] = []
    v = 0.0
    for step, size in enumerate(sizes, 1):
        v = 0.8 * v + 0.2 * size**2
        norms.append(v / (1 - 0.8**step))
        if found is None and step > 5 and norms[-1] >= 0.96 * norms[-6]:
            found = step
        training.step([torch.full(shape, size) for shape in SHAPES])
        assert training.inner.progress["frozen_at"] == found, step  # type: ignore[attr-defined]
    assert found is not None
    late = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), betas=(0.9, 0.8), lr_warmup_steps=found + 3)
    for size in sizes[: found + 4]:
        late.step([torch.full(shape, size) for shape in SHAPES])
    assert late.inner.progress["frozen_at"] == found + 4


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (mpidl.optim.OneBitAdam, {"freeze_step": 4}),
    "zero_one": (mpidl.optim.ZeroOneAdam, {"renewals": 2, "local_after": 6}),
    "lamb": (mpidl.optim.OneBitLamb, {"freeze_step": 4}),
}
classes = pytest.mark.parametrize("name", CLASSES)


@pytest.mark.mpi
@classes
def test_a_parameter_that_never_had_a_gradient_stays(comm: Communicator, name: str) -> None:
    training = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **{"weight_decay": 0.0, **CLASSES[name][1]})
    before = training.model.weights[3][4].detach().clone()
    training.run(0, 12)
    assert torch.equal(training.model.weights[3][4], before)


@pytest.mark.mpi
@classes
def test_ddp_and_stage_1_train_alike(comm: Communicator, name: str) -> None:
    """Accumulated under no_sync, and with a pass that communicates before the last one."""
    found = []
    for engine in ENGINES:
        training = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        owner = training.called if engine == "ddp" else training.optimizer
        for step in range(12):
            inputs = [g.float() for g in slopes(step, comm.rank)]
            with owner.no_sync():
                training.called(inputs).backward()
            training.called(inputs).backward()
            training.step(inputs, scale=0.5)
        training.check_equal_on_all_ranks()
        found.append(training.weights())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
@engines
@classes
@pytest.mark.parametrize("clip", ["own", "torch", "mpidl"])
def test_clipping_and_loss_scaling_are_of_the_ranks_own_gradients(
    comm: Communicator, engine: str, name: str, clip: str
) -> None:
    """After the freeze a rank clips what it has, over several nodes their means; an overflow on one rank skips the step
    on all, without a trace."""
    together = comm.node_ranks if comm.nodes > 1 else (comm.rank,)
    made = [Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1]) for _ in range(2)]
    scaler = mpidl.GradScaler(init_scale=4.0, process_group=comm)
    for step in range(10):
        inputs = [g.float() for g in slopes(step, comm.rank)]
        held = [torch.stack(same).mean(0) for same in zip(*(slopes(step, rank) for rank in together), strict=True)]
        size = torch.cat([g.float().flatten() for g in held]).norm()
        clipped = step > 6
        made[0].step([g / max(1.0, float(size) / 50.0) for g in inputs] if clipped else inputs)
        for wrong in [True, False] if step == 8 else [False]:
            loss = made[1].called(inputs)
            scaler.scale(loss * float("inf") if wrong and comm.rank == 0 else loss).backward()
            scaler.unscale_(made[1].optimizer)
            if clipped and clip == "mpidl":
                mpidl.clip_grad_norm_(made[1].model.parameters(), 50.0)
            elif clipped and clip == "torch":
                torch.nn.utils.clip_grad_norm_(made[1].model.parameters(), 50.0)
            elif clipped and engine == "ddp":
                mpidl.clip_grad_norm_(made[1].model, 50.0)
            elif clipped:
                made[1].optimizer.clip_grad_norm_(50.0)
            scaler.step(made[1].optimizer)
            scaler.update(4.0)
            made[1].optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    made[1].check_equal_on_all_ranks()
    torch.testing.assert_close(made[1].weights(), made[0].weights(), rtol=1e-4, atol=1e-4)


@pytest.mark.mpi
@engines
@classes
def test_training_goes_on_from_a_state(comm: Communicator, engine: str, name: str) -> None:
    """With the mean of the errors, in either engine, which a new state tells again."""
    first = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
    first.run(0, 9)
    state = first.state()
    again = first.state()
    if comm.rank == 0:
        assert all(torch.equal(state["state"][0][key], again["state"][0][key]) for key in state["state"][0])
        assert comm.size == 1 or any(entry["error"].any() for entry in state["state"].values())
    weights = first.weights()
    for other in ENGINES:
        model = Slopes()
        with torch.no_grad():
            for p, q in zip(model.parameters(), first.model.parameters(), strict=True):
                p.copy_(q)
        second = Training(comm, other, CLASSES[name][0], model, lr=0.01, **CLASSES[name][1])
        given = state
        if other == "ddp" and engine == "stage 1":
            given = broadcast_object(comm, state)
        second.optimizer.load_state_dict(given)
        assert torch.equal(second.weights(), weights)
        told = second.state()
        if comm.rank == 0:
            for number, entry in state["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(told["state"][number][key], value, rtol=1e-6, atol=1e-7)
        second.run(9, 3)
        second.check_equal_on_all_ranks()


@pytest.mark.mpi
@classes
def test_a_state_of_errors_that_differ_is_refused_on_one_rank_alone(comm: Communicator, name: str) -> None:
    """So that rank 0 alone may ask, as programs that save on it do."""
    training = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
    training.run(0, 1)
    training.optimizer.state_dict()  # no bits were sent yet
    training.run(1, 8)
    for again in (False, True):
        if comm.rank == 0 and comm.size > 1:
            with pytest.raises(mpidl.TrainingError, match=r"errors of its own; needs gather_errors\(\) on every rank"):
                training.optimizer.state_dict()
        training.inner.gather_errors()
        if comm.rank == 0:
            assert "error" in training.optimizer.state_dict()["state"][0]
        if not again:
            training.run(9, 1)
    training.check_equal_on_all_ranks()


@pytest.mark.mpi
@engines
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"betas": (0.9,)}, r"betas: got \(0\.9,\); needs two numbers"),
        ({"eps": 0}, "eps: got 0; needs a number above 0"),
        ({"lr": -1.0}, "lr: got -1.0; needs a number of at least 0"),
        ({"freeze_step": 0}, "freeze_step: got 0; needs an integer of at least 1"),
        ({"freeze_ratio": 1.5}, "freeze_ratio: got 1.5; needs a number above 0 and at most 1"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps: got -1"),
        ({"where": "here"}, "where: got 'here'; needs one of between_nodes, everywhere, or None"),
        ({"error_feedback": 1}, "error_feedback: got 1; needs True or False"),
    ],
)
def test_wrong_settings_are_one_error_on_every_rank(
    comm: Communicator, engine: str, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Training(comm, engine, mpidl.optim.OneBitAdam, Slopes(), **wrong)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2}, "stage: got 2 with OneBitAdam, which needs each rank's own gradients whole"),
        ({"stage": 3}, "stage: got 3 with OneBitAdam"),
        ({"stage": 1, "offload": "cpu"}, "offload: OneBitAdam keeps whole fp32 states"),
        ({"stage": 1, "compress": "int8"}, "compress: OneBitAdam"),
        ({"stage": 1, "step_in_backward": True}, "step_in_backward: OneBitAdam exchanges all gradients at once"),
        ({"stage": 1, "precision": mpidl.zero.Precision(torch.bfloat16)}, "precision: OneBitAdam"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(comm: Communicator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        mpidl.ZeroOptimizer(Slopes(), mpidl.optim.OneBitAdam, process_group=comm, **options)


@pytest.mark.mpi
def test_an_engine_without_the_hook_and_ranks_with_other_settings_are_refused(comm: Communicator) -> None:
    if comm.size == 1:
        return
    model = Slopes()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = mpidl.optim.OneBitAdam(model.parameters(), process_group=comm)
    wrapped([g.float() for g in slopes(0, comm.rank)]).backward()
    with pytest.raises(mpidl.TrainingError, match="OneBitAdam: no engine asks it what to reduce"):
        optimizer.step()
    with pytest.raises(mpidl.ConfigurationError, match="step_in_backward"):
        wrapped.step_in_backward(optimizer)
    other = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), eps=1e-8 * (1 + comm.rank))
    with pytest.raises(mpidl.errors.ModelMismatch, match="OneBitAdam: rank 0 has eps=1e-08, rank 1 has eps=2e-08"):
        other.run(0, 1)


@pytest.mark.mpi
@classes
def test_checkpoints_keep_states_and_the_mean_errors(comm: Communicator, name: str, tmp_path: Path) -> None:
    """Saved by either engine, loaded by the other one, which then steps as one that has loaded the state_dict."""
    folder = Path(broadcast_object(comm, str(tmp_path)))
    for engine, other in (ENGINES, ENGINES[::-1]):
        first = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        first.run(0, 9)
        path = folder / engine
        mpidl.checkpoint.save(path, first.called, first.optimizer, step=9)
        state = broadcast_object(comm, first.state())
        made = []
        for way in ("checkpoint", "state"):
            second = Training(comm, other, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
            if way == "checkpoint":
                mpidl.checkpoint.load(path, second.called, second.optimizer)
            else:
                with torch.no_grad():
                    for p, q in zip(second.model.parameters(), first.model.parameters(), strict=True):
                        p.copy_(q)
                second.optimizer.load_state_dict(state)
            second.run(9, 3)
            second.check_equal_on_all_ranks()
            made.append(second.weights())
        assert torch.equal(*made)


# ---- 0/1 Adam ------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_zero_one_adam_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    """Every interval of v up to 4, then local steps of 1, 2 and 4; weights are compared where they are the same."""
    nodes = nodes_of(comm, where)
    schedule = {"renewals": 2, "local_after": 12, "local_interval_steps": 2, "max_local_interval": 4}
    exchange = reference.Exchange(SHAPES, comm.size, nodes)
    expected = reference.ZeroOne(start(), exchange, 0.01, 0.1, *schedule.values())
    settings = {"lr": 0.01, "weight_decay": 0.1, "where": where, **schedule}
    training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), **settings)
    exchanged = 0
    for step in range(26):
        training.run(step, 1)
        expected.step(of_nodes(step, comm.size, nodes))
        own = comm.rank // (comm.size // nodes)
        for p, w in zip(training.model.parameters(), expected.of_nodes[own], strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=5e-4, atol=5e-4)
        assert training.inner.is_synchronised == (expected.since == 0)  # type: ignore[attr-defined]
        if training.inner.is_synchronised:  # type: ignore[attr-defined]
            exchanged += 1
            training.check_equal_on_all_ranks()
    assert exchanged == 12 + 2 + 1 + 2


@pytest.mark.mpi
@engines
def test_zero_one_adam_gives_no_state_between_exchanges(comm: Communicator, engine: str) -> None:
    settings = {"local_after": 2, "local_interval_steps": 1, "max_local_interval": 4}
    training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), **settings)
    training.run(0, 4)  # an exchange at step 3, the next one at step 5
    with pytest.raises(mpidl.TrainingError, match="a state after step 4, when each rank has weights of its own; needs"):
        training.optimizer.state_dict()
    training.run(4, 1)
    training.state()


# ---- 1-bit LAMB ----------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_lamb_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    nodes = nodes_of(comm, where)
    expected = reference.Lamb(start(), reference.Exchange(SHAPES, comm.size, nodes), freeze_step=6, lr=0.01, wd=0.1)
    settings = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 6, "where": where}
    check_against(Training(comm, engine, mpidl.optim.OneBitLamb, Slopes(), **settings), expected, 16, nodes)


@pytest.mark.mpi
def test_lamb_corrects_the_trust_ratio_by_the_steps_that_gave_one(comm: Communicator) -> None:
    """Before the freeze the first parameter has no gradient, the second one in the first step alone."""

    class Some(Slopes):
        def forward(self, slopes: list[torch.Tensor], reached: list[int]) -> torch.Tensor:  # type: ignore[override]
            return torch.stack([(self.weights[n] * slopes[n]).sum() for n in reached]).sum()

    model, lr, decay, eps = Some(), 0.01, 0.1, 1e-6
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    own = mpidl.optim.OneBitLamb(
        model.parameters(), lr=lr, weight_decay=decay, eps=eps, freeze_step=3, process_group=comm
    )
    wrapped.register_comm_hook(own, mpidl.optim.one_bit_hook)
    never, once = list(model.parameters())[:2]
    former, first = never.detach().clone(), once.detach().clone()
    for step, reached in enumerate([[1, 2, 3], [2, 3], [2, 3], [1, 2, 3]]):
        before = once.detach().clone()
        wrapped([g.float() for g in slopes(step, comm.rank)], reached).backward()
        own.step()
        own.zero_grad()
    torch.testing.assert_close(never.detach(), (1 - lr * decay) * former, rtol=1e-5, atol=1e-6)
    mean = torch.stack([slopes(0, rank)[1].float() for rank in range(comm.size)]).mean(0)
    measured = first.norm() / (mean / (mean.abs() + eps) + decay * first).norm()
    m, v = (own.state[once][key] for key in ("exp_avg", "exp_avg_sq"))
    update = m / (1 - 0.9**4) / ((v / (1 - 0.999**3)).sqrt() + eps) + decay * before
    found = (before - once.detach()).norm() / (lr * update.norm())
    assert found.item() == pytest.approx(measured.item() * own.progress["factors"][1], rel=1e-2)


@pytest.mark.mpi
def test_the_warm_up_is_lamb(comm: Communicator) -> None:
    ours = Training(comm, "ddp", mpidl.optim.OneBitLamb, Slopes(), lr=0.01, freeze_step=100)
    ours.run(0, 5)
    plain = Slopes()
    lamb = mpidl.optim.LAMB(plain.parameters(), lr=0.01)
    for step in range(5):
        for n, p in enumerate(plain.parameters()):
            p.grad = torch.stack([slopes(step, rank)[n].float() for rank in range(comm.size)]).mean(0)
        lamb.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(ours.weights(), expected, rtol=1e-5, atol=1e-5)


# ---- learning and bytes --------------------------------------------------------------------------------------------


@pytest.mark.mpi
@classes
def test_a_step_after_the_freeze_sends_97_percent_less(comm: Communicator, name: str) -> None:
    """Of fp32 gradients, and 94 % less of 16-bit ones: counted, against the all-reduce's 2 (N-1)/N elements."""
    if comm.size == 1:
        return
    model = nn.Linear(300, 300)
    training = Training(comm, "ddp", CLASSES[name][0], model, where="everywhere", **CLASSES[name][1])
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(comm.rank))
    sent = []
    for _ in range(8):
        training.called(x).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        sent.append(training.inner.sent_bytes)
    steps = [after - before for before, after in pairwise(sent) if after > before]
    assert steps
    elements = sum(p.numel() for p in model.parameters())
    all_reduce = 2 * (comm.size - 1) / comm.size * elements
    for each in steps:
        assert 1 - each / (4 * all_reduce) == pytest.approx(0.97, abs=0.005)
        assert 1 - each / (2 * all_reduce) == pytest.approx(0.94, abs=0.005)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random walk over 37 tokens in steps of -1, 0 or 1."""
    random = np.random.default_rng([7, step, rank])
    walk = (random.integers(37, size=(8, 1)) + random.integers(-1, 2, size=(8, 9)).cumsum(1)) % 37
    tokens = torch.from_numpy(walk)
    return tokens[:, :-1], tokens[:, 1:]


def learned(comm: Communicator, optimizer_class: Any, steps: int, **settings: Any) -> float:
    """The mean loss of the last steps of a small GPT-2 on random walks."""
    model = fresh(MODELS["gpt2"], 0)
    training = Training(comm, "ddp", optimizer_class, model, **settings)
    losses = []
    for step in range(steps):
        x, y = batch(step, comm.rank)
        loss = training.called(x, y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses[-20:]).mean()
    comm.all_reduce(mean, "avg")
    return float(mean)


_FULL: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99)}
LEARNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of full precision, and of bits
    "adam": ({**_FULL, "freeze_step": 1000}, {**_FULL, "freeze_step": 80}),
    "zero_one": (
        {**_FULL, "renewals": 1000},
        {**_FULL, "renewals": 16, "local_after": 60, "local_interval_steps": 20, "max_local_interval": 4},
    ),
    "lamb": ({**_FULL, "lr": 1e-2, "freeze_step": 1000}, {**_FULL, "lr": 1e-2, "freeze_step": 80}),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", LEARNING)
def test_a_language_model_learns_most_of_what_it_learns_in_full_precision(comm: Communicator, name: str) -> None:
    full, bits = (learned(comm, CLASSES[name][0], 120, **settings) for settings in LEARNING[name])
    start = math.log(37)
    assert full < 0.8 * start
    assert start - bits > 0.65 * (start - full)


@pytest.mark.mpi
def test_without_error_feedback_the_mean_of_many_exchanges_is_another_one(comm: Communicator) -> None:
    if comm.size == 1:
        return
    layout = layout_of([torch.empty(1000)], comm.size)
    random = np.random.default_rng(comm.rank)
    own = torch.zeros(layout.padded)
    own[:1000] = torch.from_numpy(random.normal(size=1000)).float()
    expected = own.clone()
    comm.all_reduce(expected, "avg")
    left = []
    for feeds_back in (True, False):
        exchange = OneBitExchange(comm, "everywhere", feeds_back)
        errors, summed = exchange.errors_of(layout, own.device), torch.zeros(layout.padded)
        errors.mask((own == 0).nonzero().flatten())
        for _ in range(60):
            array = own.clone()
            exchange.start(array, errors).wait()
            summed += array / 60
        left.append(float((summed - expected).norm() / expected.norm()))
    assert left[0] < 0.1
    assert left[1] > 5 * left[0]
