"""States of schedulers, scalers and samplers: those that training can go on with come back, others are refused."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import SWALR

import mpidl
from mpidl.checkpoint import index, load, save
from mpidl.optim import warmup_cosine
from tests.mpidl.checkpoint.mutations import as_text

pytestmark = pytest.mark.mpi


class Decay:
    """A factor of the learning rate that keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.last: int | None = None

    def __call__(self, step: int) -> float:
        self.asked.append(step)
        self.last = step
        return 1 / (1 + step)


class Slow(of_torch.ExponentialLR):
    """A scheduler of a program's, with torch's loading and a list that grows."""

    def __init__(self, optimizer: Any, gamma: float) -> None:
        self.rates: list[float] = []
        self.best: float | None = None
        super().__init__(optimizer, gamma)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.rates.append(self.get_last_lr()[0])
        self.best = max(self.rates)


class Listed:
    """A scheduler of a program's whose state is no dictionary."""

    def __init__(self, optimizer: Any, factor: float) -> None:
        self.optimizer, self.factor, self.rates = optimizer, factor, [0.5]

    def step(self) -> None:
        self.rates.append(self.rates[-1] * 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[-1]

    def state_dict(self) -> Any:
        return self.rates if len(self.rates) > 1 else None

    def load_state_dict(self, state: Any) -> None:
        self.rates = list(state)


def nested(o: Any, k: int) -> Any:
    """Makes three levels, so that the innermost has a `last_epoch` of -3. The outer milestones are not reached."""
    inner = of_torch.SequentialLR(o, [of_torch.ConstantLR(o, 0.5, k), of_torch.CosineAnnealingWarmRestarts(o, 4)], [3])
    middle = of_torch.SequentialLR(o, [of_torch.LinearLR(o, 0.5), inner], [50])
    return of_torch.SequentialLR(o, [of_torch.ConstantLR(o, 0.1, k), middle], [50])


# Each of an optimizer and a number, in which the run that is resumed differs.
SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "LambdaLR": lambda o, k: of_torch.LambdaLR(o, [Decay(), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda o, k: of_torch.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o, k: of_torch.StepLR(o, k),
    "MultiStepLR": lambda o, k: of_torch.MultiStepLR(o, [k, 6, 6]),
    "ConstantLR": lambda o, k: of_torch.ConstantLR(o, 0.1, k),
    "LinearLR": lambda o, k: of_torch.LinearLR(o, 0.5, total_iters=2 * k),
    "ExponentialLR": lambda o, k: of_torch.ExponentialLR(o, 1 - 0.1 * k),
    "PolynomialLR": lambda o, k: of_torch.PolynomialLR(o, 3 * k, power=k),
    "CosineAnnealingLR": lambda o, k: of_torch.CosineAnnealingLR(o, 5 * k),
    "CosineAnnealingWarmRestarts": lambda o, k: of_torch.CosineAnnealingWarmRestarts(o, k, 2),
    "CyclicLR": lambda o, k: of_torch.CyclicLR(o, 0.01, 0.1 * k, step_size_up=k),
    "CyclicLR by a callable": lambda o, k: of_torch.CyclicLR(o, 0.01, 0.2, k, mode="mine", scale_fn=Decay()),
    "OneCycleLR": lambda o, k: of_torch.OneCycleLR(
        o, 0.1, total_steps=20 + k, anneal_strategy=("cos", "linear")[k % 2]
    ),
    "ReduceLROnPlateau": lambda o, k: of_torch.ReduceLROnPlateau(o, patience=k, min_lr=[0.0, 0.01] if k == 2 else 0.0),
    "SequentialLR": lambda o, k: of_torch.SequentialLR(
        o, [of_torch.ConstantLR(o, 0.1, k), of_torch.MultiStepLR(o, [k])], [5]
    ),
    "SequentialLR in another": nested,
    "ChainedScheduler": lambda o, k: of_torch.ChainedScheduler(
        [of_torch.ConstantLR(o, 0.1, 3 * k), of_torch.OneCycleLR(o, 0.1, total_steps=20)]
    ),
    "SWALR": lambda o, k: SWALR(o, 0.05, 4 * k),
    "warmup_cosine": lambda o, k: warmup_cosine(o, 3, 20),
    "of a program": lambda o, k: Slow(o, 1 - 0.1 * k),
    "of a program, with a list": Listed,
}


class Small:
    """A model with an optimizer of two groups, a scheduler, a scaler and a sampler."""

    def __init__(self, comm: Any, scheduler: str, k: int = 2, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.comm, self.model = comm, torch.nn.Linear(3, 2)
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.05}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer, k)
        self.scaler = scaler or mpidl.GradScaler(init_scale=8.0 * k, process_group=comm)
        self.sampler = mpidl.data.DistributedSampler(range(8), comm)

    def steps(self, count: int) -> list[list[float]]:
        rates = []
        for _ in range(count):
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.ones(4, 3)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            arguments = (1.0,) if isinstance(self.scheduler, of_torch.ReduceLROnPlateau) else ()
            self.scheduler.step(*arguments)
            rates.append([group["lr"] for group in self.optimizer.param_groups])
        return rates

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.scaler, self.sampler

    def save(self, path: Path) -> Path:
        save(path, *self.parts(), step=4, process_group=self.comm)
        self.comm.barrier()
        return path / "step-00000004"

    def load(self, path: Path) -> Any:
        return load(path, *self.parts(), process_group=self.comm)

    def states(self) -> str:
        """All that a load might change, but the weights."""
        kept = (self.scheduler.state_dict(), self.scaler.state_dict(), self.sampler.state_dict())
        return f"{kept} {self.optimizer.state_dict()}"


def change(comm: Any, path: Path, edit: Callable[[Any], Any]) -> None:
    """Edits the index on rank 0, and gives it the checksum of that."""
    if comm.rank == 0:
        content = json.loads((path / index.NAME).read_text())
        edit(content)
        (path / index.NAME).write_text(as_text(content, index.content_checksum))
    comm.barrier()


def put(content: Any, at: str, value: Any) -> None:
    """Replaces what lies at a place; deletes it for `...`."""
    *outer, last = at.split("/")
    for key in outer:
        content = content[int(key) if isinstance(content, list) else key]
    place: Any = int(last) if isinstance(content, list) else last
    if value is ...:
        del content[place]
    else:
        content[place] = value


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler_goes_on_as_if_it_had_not_stopped(comm, shared: Path, name: str) -> None:
    run = Small(comm, name)
    run.steps(4)
    path = run.save(shared)
    expected = run.steps(8)
    for k in (2, 3):
        again = Small(comm, name, k)
        again.load(path)
        assert again.steps(8) == expected
        again.load(path)  # over a later state
        assert again.steps(8) == expected


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("StepLR", "scheduler", {}, "scheduler: lacks last_epoch"),
        ("StepLR", "scheduler", {"a": 1}, "scheduler: lacks last_epoch"),
        ("StepLR", "scheduler", None, "scheduler: is None; needs a mapping"),
        ("StepLR", "scheduler/last_epoch", -7, "scheduler.last_epoch: is -7; needs an integer of at least -1"),
        ("StepLR", "scheduler/last_epoch", 1 << 63, "last_epoch: is 9223372036854775808; needs an integer"),
        ("StepLR", "scheduler/last_epoch", True, "last_epoch: is a boolean; needs a number"),
        ("StepLR", "scheduler/_step_count", None, "scheduler._step_count: is None; needs a number"),
        ("StepLR", "scheduler/step_size", 0, "scheduler.step_size: is 0; needs a number above 0"),
        ("StepLR", "scheduler/gamma", 10**400, "scheduler.gamma: is 1000.*; needs a number that fits"),
        ("StepLR", "scheduler/base_lrs", [0.1], "scheduler.base_lrs: has 1 values; needs 2"),
        ("StepLR", "scheduler/base_lrs/1", None, "scheduler.base_lrs.1: is None; needs a number"),
        ("MultiStepLR", "scheduler/milestones", {"a": 1}, "milestones: has 'a'; needs the numbers of epochs"),
        ("MultiStepLR", "scheduler/milestones/$dict/0/1", "x", "milestones.2: is 'x'; needs an integer of at least 1"),
        ("CosineAnnealingWarmRestarts", "scheduler/T_cur", ..., "scheduler: lacks T_cur"),
        ("CosineAnnealingWarmRestarts", "scheduler/T_i", 0, "scheduler.T_i: is 0; needs an integer of at least 1"),
        ("CyclicLR", "scheduler/cycle_momentum", "x", "cycle_momentum: is a text; needs a boolean"),
        ("CyclicLR", "scheduler/_scale_fn_custom", 3, "_scale_fn_custom: is a number; needs a mapping"),
        ("LambdaLR", "scheduler/lr_lambdas/0", 3, "lr_lambdas.0: is a number; needs a mapping"),
        ("OneCycleLR", "scheduler/total_steps", None, "scheduler.total_steps: is None; needs a number"),
        ("OneCycleLR", "scheduler/total_steps", 0, "scheduler.total_steps: is 0; needs an integer of at least 1"),
        ("OneCycleLR", "scheduler/_schedule_phases/0", {}, "_schedule_phases.0: lacks end_step"),
        ("OneCycleLR", "scheduler/_schedule_phases/0/end_step", None, "0.end_step: is None; needs a number"),
        ("OneCycleLR", "scheduler/_schedule_phases/1/start_lr", None, "1.start_lr: is None; needs a text"),
        ("OneCycleLR", "scheduler/_schedule_phases/1/start_lr", "lr0", "1.start_lr: is none of initial_lr, max_lr"),
        ("OneCycleLR", "scheduler/_anneal_func_type", "", "_anneal_func_type: is none of cos, linear"),
        ("ReduceLROnPlateau", "scheduler/best", ..., "scheduler: lacks best"),
        ("ReduceLROnPlateau", "scheduler/default_min_lr", "x", "default_min_lr: is a text; needs a number"),
        ("SequentialLR", "scheduler/_milestones/0", None, "scheduler._milestones.0: is None; needs a number"),
        ("SequentialLR", "scheduler/_schedulers/0/factor", None, "_schedulers.0.factor: is None; needs a number"),
        ("SequentialLR", "scheduler/_schedulers/1", {}, "scheduler._schedulers.1: lacks last_epoch"),
        ("SequentialLR", "scheduler/_schedulers/1/last_epoch", -2, "_schedulers.1.last_epoch: is -2"),
        ("SequentialLR", "scheduler/_schedulers/0/optimizer", 3, "0: has 'optimizer', which is no part of it"),
        ("SequentialLR", "scheduler/_schedulers", {}, "scheduler._schedulers: is a mapping; needs a sequence"),
        ("ChainedScheduler", "scheduler/_schedulers/1/_schedule_phases/0", {}, "1._schedule_phases.0: lacks end_step"),
        ("of a program", "scheduler", {}, "scheduler: lacks last_epoch"),
        ("of a program", "scheduler/last_epoch", None, "scheduler.last_epoch: is None; needs a number"),
        ("StepLR", "scaler/scale", None, "scaler.scale: is None; needs a number above 0 that is finite in float32"),
        *[
            ("StepLR", "scaler/scale", value, f"scaler.scale: is {said}")
            for value, said in ((-1.0, "-1"), (0.0, "0"), (1e308, "1e"))
        ],
        ("StepLR", "scaler/scale", {"$float": "nan"}, "scaler.scale: is nan; needs a number above 0"),
        ("StepLR", "scaler/growth_factor", -5, "scaler.growth_factor: is -5; needs a finite number of at least 1"),
        ("StepLR", "scaler/backoff_factor", 1.5, "scaler.backoff_factor: is 1.5; needs a number above 0, of at most 1"),
        ("StepLR", "scaler/growth_interval", 0, "scaler.growth_interval: is 0; needs an integer of at least 1"),
        ("StepLR", "scaler/_growth_tracker", 1 << 63, "scaler._growth_tracker: is 9223372036854775808; needs an"),
        ("StepLR", "scaler/_growth_tracker", ..., "scaler: lacks _growth_tracker"),
        ("StepLR", "sampler/epoch", 10**30, "sampler.epoch: is 1000000000000000000000000000000; needs an integer"),
        ("StepLR", "sampler/seed", (1 << 64) - 1, "sampler.epoch: is 1; needs a sum with the seed"),
        ("StepLR", "sampler/shuffle", "x", "sampler.shuffle: is 'x'; needs true or false"),
        ("StepLR", "sampler", None, "sampler: is None; needs an object"),
        ("StepLR", "optimizer/groups/1/settings/initial_lr", None, "groups.1.initial_lr: is None; needs a number"),
        *[
            ("StepLR", "optimizer/state/bias/step/$scalar/1", value, f"state of bias: step: is {said}; needs a finite")
            for value, said in ((-1.0, "-1.0"), (-5.0, "-5.0"), (1e308, "inf"), ({"$float": "nan"}, "nan"))
        ],
    ],
)
def test_a_state_that_would_fail_later_or_begin_again_is_refused(
    comm, shared: Path, name: str, at: str, value: Any, said: str
) -> None:
    run = Small(comm, name)
    run.sampler.set_epoch(1)
    run.steps(1)
    path = run.save(shared)
    change(comm, path, lambda content: put(content, at, value))
    again = Small(comm, name)
    before, weight = again.states(), again.model.weight.detach().clone()
    with pytest.raises(mpidl.CheckpointError) as raised:
        again.load(path)
    messages = mpidl.all_gather_object(comm, str(raised.value))
    assert re.search(said, messages[0]), messages[0]
    assert len(set(messages)) == 1
    assert again.states() == before
    assert torch.equal(again.model.weight, weight)


def test_a_state_of_another_torch_may_lack_settings_and_have_more(comm, shared: Path) -> None:
    run = Small(comm, "StepLR")
    run.steps(3)
    path = run.save(shared)
    expected = run.steps(4)
    for key in ("_is_initial", "_get_lr_called_within_step", "gamma", "base_lrs"):
        change(comm, path, lambda content, key=key: put(content, f"scheduler/{key}", ...))
    change(comm, path, lambda content: put(content, "scheduler/verbose", False))
    again = Small(comm, "StepLR")
    again.load(path)
    assert again.steps(4) == expected


def test_a_scaler_that_was_off_leaves_the_scale_and_is_told(comm, shared: Path) -> None:
    off = mpidl.GradScaler(enabled=False, process_group=comm)
    path = Small(comm, "StepLR", scaler=off).save(shared)
    again = Small(comm, "StepLR", 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.load(path)
        Small(comm, "StepLR", scaler=off).load(path)
    said = [str(warning.message) for warning in told if "not enabled" in str(warning.message)]
    assert len(said) == (comm.rank == 0)
    assert again.scaler.get_scale() == 32.0


def test_a_scale_that_is_kept_by_torchs_setters_comes_back(comm, shared: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    path = Small(comm, "StepLR", scaler=scaler).save(shared)
    again = Small(comm, "StepLR", scaler=torch.amp.GradScaler("cpu"))
    again.load(path)
    assert again.scaler.state_dict() == scaler.state_dict()
