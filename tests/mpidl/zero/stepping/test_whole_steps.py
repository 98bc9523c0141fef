"""Optimizers whose step needs whole parameters: Muon, Adafactor and ones of one's own, in every stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.absent_state import absent_state
from mpidl.job.objects import broadcast_object
from mpidl.zero.stepping import whole_steps
from tests.mpidl.small_models import Mixture, fresh, sequences
from tests.mpidl.zero.reference import SETTINGS
from tests.mpidl.zero.ways import WAYS, every_way

pytestmark = pytest.mark.mpi
STEPS = 4


class Matrices(nn.Module):
    """Nothing but matrices, which is what Muon takes, tall and wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 7)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 7, bias=False)) for _ in range(3)]
        )
        self.head = nn.Linear(7, 37, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Own(torch.optim.Optimizer):
    """One's own, which changes a parameter by `change` and counts steps wherever one can."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            assert group["params"][0].dim() < 9  # looks at one, whether or not the rank has any
            group["steps"] += 1
            for p in group["params"]:
                self.change(p, self.state[p], group["lr"])

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is not None:
            p.sub_(p.grad, alpha=lr / self.calls)


class Normalised(Own):
    """Divides matrices' gradients by their norms and sums them up; of the rest it takes the signs."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is not None:
            change = p.grad / p.grad.norm() if p.dim() > 1 else p.grad.sign()
            state["sum"] = state["sum"] + change if "sum" in state else change.clone()
            state["largest"] = max(state.get("largest", 0.0), float(change.abs().max()))
            p.sub_(state["sum"], alpha=lr)


class Factored(Own):
    """Keeps lists of numbers for rows and columns, and matrices in a list."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is None:
            return
        if p.dim() > 1:
            if not state:
                state.update(row=torch.zeros(p.shape[0]), column=torch.zeros(p.shape[1]))
                state["left"] = torch.zeros(p.shape[0], p.shape[0])
                state["listed"] = [torch.zeros(n, n) for n in p.shape]
            state["row"].add_(p.grad.square().mean(1))
            state["column"].add_(p.grad.square().mean(0))
            state["left"].add_(torch.outer(p.grad.sum(1), p.grad.sum(1)))  # a product's bits depend on its alignment
            state["listed"][1].add_(torch.outer(p.grad.sum(0), p.grad.sum(0)))
            scale = 1 + torch.outer(state["row"], state["column"]).sqrt() + state["left"].norm()
            p.sub_(p.grad / (scale + state["listed"][1].norm()), alpha=lr)
        else:
            p.sub_(p.grad, alpha=lr)


class DecaysMatrices(Own):
    """Elementwise, but by the number of dimensions; also where there is no gradient."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.dim() > 1:
            p.mul_(1 - lr)
        super().change(p, state, lr)


class Fills(Own):
    """Gives those that have no gradient one of zeros, as some that go with Muon do."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.sub_(p.grad / (p.grad.norm() + 1e-7), alpha=lr)


class Late(Own):
    """Elementwise in the first steps."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is not None:
            p.sub_(p.grad if self.calls < 4 else p.grad / p.grad.norm(), alpha=lr)


class Replaces(Normalised):
    """Gives a parameter other memory."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        before = p.data.clone()
        super().change(p, state, lr)
        after = p.data.clone()
        p.data.copy_(before)
        p.data = after


class ReplacesSlices(Own):
    """Gives a parameter other memory, and steps on slices."""

    def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is not None:
            p.data = p.data - lr * p.grad


class CountsWhatItSees(Own):
    """Notes something only where a parameter of the group has a gradient, in a tensor, which it changes in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if given:
                group["seen"] = group.get("seen", torch.zeros(1))
                group["seen"] += 1
            for p in given:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"] / float(group["seen"]))


class OfTheGroup(Own):
    """A step that depends on all parameters of a group, by very little."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in given]).norm() if given else 1.0
            for p in given:
                p.sub_(p.grad / norm, alpha=group["lr"])


class OwnGroups(Own):
    """Makes groups by itself."""

    def __init__(self, params: Any, lr: float) -> None:
        given = [p for group in params for p in group["params"]]
        super().__init__([{"params": [p for p in given if p.dim() == n]} for n in (1, 2)], lr)


class Remembers(Normalised):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["everywhere"] = 3
        super().step()


class FailsOnce(Normalised):
    """On one rank alone."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise ArithmeticError("deliberate")
        super().step()


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Muon": (Matrices, torch.optim.Muon, {"lr": 0.02}),
    "Adafactor": (Mixture, torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor, foreach": (Mixture, torch.optim.Adafactor, {"lr": 0.05, "foreach": True}),
    "one's own": (Mixture, Normalised, {"lr": 0.01}),
    "one's own, of a low rate": (Mixture, Normalised, {"lr": 1e-6}),
    "states of other shapes": (Mixture, Factored, {"lr": 0.1}),
    "by dimensions": (Mixture, DecaysMatrices, {"lr": 0.1}),
    "filling": (Mixture, Fills, {"lr": 0.01}),
    "late": (Mixture, Late, {"lr": 0.01}),
    "replacing": (Mixture, Replaces, {"lr": 0.01}),
    "replacing slices": (Mixture, ReplacesSlices, {"lr": 0.1}),
    "counting": (Mixture, CountsWhatItSees, {"lr": 0.01}),
}
BRIEF = [("stage 3 gathered", "Muon"), ("stage 1", "Adafactor"), *(("stage 3", method) for method in [*METHODS][3:])]
ON_SLICES = ("replacing slices",)
every_method = pytest.mark.parametrize("method", METHODS)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = sequences(step, 0)
    return tokens[rank : rank + 3], targets[rank : rank + 3]


def go_on(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        model(*batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero(comm, method: str, way: str, **more: Any) -> tuple[nn.Module, mpidl.ZeroOptimizer]:
    make, cls, settings = METHODS[method]
    model = fresh(make, comm.rank)
    return model, mpidl.ZeroOptimizer(model, cls, process_group=comm, **SETTINGS[way], **settings, **more)


def ddp(comm, method: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The judge: its gradients are the same bits, and it steps on whole parameters as torch does."""
    make, cls, settings = METHODS[method]
    model = mpidl.DistributedDataParallel(fresh(make, comm.rank), process_group=comm, find_unused_parameters=True)
    return model, cls([p for p in model.parameters() if p.requires_grad], **settings)


def check_weights(comm, optimizer: mpidl.ZeroOptimizer, expected: nn.Module) -> None:
    found = optimizer.model_state_dict()
    if comm.rank == 0:
        for name, p in expected.state_dict().items():
            assert torch.equal(found[name], p), name


def check_states(comm, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares states on rank 0, to the bit."""
    if comm.rank:
        assert found == absent_state(comm.rank)
        return
    kept = {number: entry for number, entry in expected["state"].items() if entry}  # some only look
    assert found["state"].keys() == kept.keys()
    for number, entry in kept.items():
        assert found["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=0, atol=0, msg=f"{number}, {key}")
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@every_method
@pytest.mark.thorough(*(f"{way}-{method}" for method in METHODS for way in WAYS if (way, method) not in BRIEF))
@every_way
def test_the_same_bits_as_whole_parameters_on_every_rank(comm, method: str, way: str, monkeypatch) -> None:
    """Weights, state, and what the next steps make of both, with a state loaded from torch's own in between."""
    monkeypatch.setattr(whole_steps, "BATCH_BYTES", 400)  # several batches, some of one parameter larger than that
    model, optimizer = zero(comm, method, way)
    assert optimizer.stats()["steps_on"] == ("slices" if method in ON_SLICES else "wholes")
    judge, reference = ddp(comm, method)
    for first in range(0, 3 * STEPS, STEPS):
        for m, o in ((judge, reference), (model, optimizer)):
            go_on(m, o, comm.rank, range(first, first + STEPS))
        check_weights(comm, optimizer, judge.module)
        if first == STEPS:
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        check_states(comm, optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("method", ["Muon", "Adafactor"])
def test_a_checkpoint_goes_on_in_another_engine(comm, method: str, tmp_path: Path) -> None:
    """From shards to whole parameters and back, to the bit."""
    shared = Path(broadcast_object(comm, str(tmp_path)))
    model, optimizer = zero(comm, method, "stage 3 gathered")
    go_on(model, optimizer, comm.rank, range(STEPS))
    mpidl.checkpoint.save(shared / "a", model, optimizer)
    go_on(model, optimizer, comm.rank, range(STEPS, 2 * STEPS))

    judge, reference = ddp(comm, method)
    mpidl.checkpoint.load(shared / "a", judge, reference)
    go_on(judge, reference, comm.rank, range(STEPS, 2 * STEPS))
    check_weights(comm, optimizer, judge.module)
    check_states(comm, optimizer.state_dict(), reference.state_dict())
    mpidl.checkpoint.save(shared / "b", judge, reference)

    other, again = zero(comm, method, "stage 2")
    mpidl.checkpoint.load(shared / "b", other, again)
    for m, o in ((judge, reference), (other, again)):
        go_on(m, o, comm.rank, range(2 * STEPS, 3 * STEPS))
    check_weights(comm, again, judge.module)


@every_way
def test_every_rank_keeps_its_part_of_the_state(comm, way: str) -> None:
    model, optimizer = zero(comm, "Muon", way)
    go_on(model, optimizer, comm.rank, range(2))
    total, largest = sum(p.numel() for p in model.parameters()), max(p.numel() for p in model.parameters())

    def held() -> int:
        return sum(tensor.numel() for tensor in optimizer.held_tensors()["optimizer"])

    counts = torch.tensor([held()])
    assert counts[0] <= total / comm.size + largest
    comm.all_reduce(counts)
    assert counts[0] == total
    optimizer.state_dict()  # cut over the ranks, for a moment
    counts = torch.tensor([held()])
    comm.all_reduce(counts)
    assert counts[0] == total
    assert all(whole.untyped_storage().nbytes() <= 8 for whole in wholes(optimizer)), "parameters are kept whole"


def wholes(optimizer: mpidl.ZeroOptimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.inner_optimizer.param_groups for p in group["params"]]


@every_way
def test_16_bit_parameters_step_as_their_masters(comm, way: str) -> None:
    """A plain fp32 model that is given the reduced gradients steps to the masters' bits."""
    precision = mpidl.Precision(torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = zero(comm, "Muon", way, precision=precision)
    plain = fresh(Matrices)
    reference = torch.optim.Muon(plain.parameters(), lr=0.02)
    for step in range(STEPS):
        model(*batch(comm.rank, step)).backward()
        gradients = optimizer.gradients()
        if comm.rank == 0:
            for name, p in plain.named_parameters():
                p.grad = gradients[name].clone()
            reference.step()
        optimizer.step()
        optimizer.zero_grad()
        check_weights(comm, optimizer, plain)


def test_settings_of_groups_and_groups_added_later(comm) -> None:
    """A learning rate of a group of its own, a scheduler, and a matrix that is unfrozen."""
    model, judge = (fresh(Matrices, comm.rank if sharded else 0) for sharded in (True, False))
    for m in (model, judge):
        m.head.weight.requires_grad_(False)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [m.embed.weight], "lr": 0.1}, {"params": list(m.blocks.parameters())}]

    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.Adafactor, process_group=comm, stage=3, params=groups(model), lr=0.02
    )
    wrapped = mpidl.DistributedDataParallel(judge, process_group=comm)
    reference = torch.optim.Adafactor(groups(judge), lr=0.02)
    for m, o in ((wrapped, reference), (model, optimizer)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
        go_on(m, o, comm.rank, range(2))
        schedule.step()
        go_on(m, o, comm.rank, range(2, 4))
        head = (judge if m is wrapped else model).head.weight
        head.requires_grad_(True)
        o.add_param_group({"params": [head], "lr": 0.3})
        go_on(m, o, comm.rank, range(4, 6))
    check_weights(comm, optimizer, judge)
    check_states(comm, optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (Mixture, {"optimizer_class": torch.optim.Muon}, ValueError, "Muon only supports 2D parameters"),
        (
            Matrices,
            {"optimizer_class": torch.optim.Muon, "offload": "cpu"},
            mpidl.ConfigurationError,
            "offload: a step of Muon needs whole parameters",
        ),
        (
            Matrices,
            {"optimizer_class": OfTheGroup},
            mpidl.ConfigurationError,
            "OfTheGroup cannot be sharded: a step on a parameter depends on the other parameters",
        ),
        (
            Matrices,
            {"optimizer_class": OfTheGroup, "lr": 1e-7},
            mpidl.ConfigurationError,
            "depends on the other parameters",
        ),
        (Mixture, {"optimizer_class": OwnGroups}, mpidl.ConfigurationError, "OwnGroups makes 2 groups of the 1"),
    ],
)
def test_what_is_refused(comm, make: Any, given: dict[str, Any], error: type[Exception], message: str) -> None:
    """On every rank, and before the model is changed."""
    model = fresh(make)
    with pytest.raises(error, match=message):
        mpidl.ZeroOptimizer(model, process_group=comm, stage=3, **{"lr": 0.1, **given})
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_state_of_no_parameter_is_not_saved(comm) -> None:
    model = fresh(Mixture, comm.rank)
    optimizer = mpidl.ZeroOptimizer(model, Remembers, process_group=comm, stage=3, lr=0.01)
    go_on(model, optimizer, comm.rank, range(2))
    with pytest.raises(mpidl.TrainingError, match=r"Remembers .*'everywhere' .*no parameter"):
        optimizer.state_dict()


def test_a_step_that_fails_on_one_rank_fails_on_all_and_can_be_made_again(comm) -> None:
    model = fresh(Mixture, comm.rank)
    optimizer = mpidl.ZeroOptimizer(model, FailsOnce, process_group=comm, stage=2, lr=0.01)
    judge = fresh(Mixture, comm.rank)
    reference = mpidl.ZeroOptimizer(judge, Normalised, process_group=comm, stage=2, lr=0.01)
    inner = optimizer.inner_optimizer
    inner.fails = comm.rank == comm.size - 1
    error, message = (ArithmeticError, "^deliberate") if inner.fails else (mpidl.ConfigurationError, "deliberate")
    with pytest.raises(error, match=message):
        go_on(model, optimizer, comm.rank, range(1))
    assert all(p.grad is None and p.untyped_storage().nbytes() <= 8 for p in wholes(optimizer)), "memory is kept"
    inner.fails = False
    optimizer.zero_grad()
    for m, o in ((model, optimizer), (judge, reference)):  # without the state of ranks that had stepped already
        o.load_state_dict({"state": {}, "param_groups": o.state_dict().get("param_groups")})
        go_on(m, o, comm.rank, range(1, 4))
    expected, found = reference.model_state_dict(), optimizer.model_state_dict()
    assert comm.rank or all(torch.equal(found[name], p) for name, p in expected.items() if name != "calls")


def test_a_group_that_needs_more_than_the_first_ones_is_refused(comm) -> None:
    class ByGroup(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / p.grad.norm() if group.get("normalised") else p.grad, alpha=group["lr"])

    model = fresh(Matrices, comm.rank)
    model.head.weight.requires_grad_(False)
    optimizer = mpidl.ZeroOptimizer(model, ByGroup, process_group=comm, stage=3, lr=0.01)
    go_on(model, optimizer, comm.rank, range(1))
    model.head.weight.requires_grad_(True)
    with pytest.raises(mpidl.ConfigurationError, match=r"step of ByGroup .*needs whole"):
        optimizer.add_param_group({"params": [model.head.weight], "normalised": True})
    optimizer.add_param_group({"params": [model.head.weight]})
    go_on(model, optimizer, comm.rank, range(1, 2))


def test_a_trial_draws_no_random_numbers(comm) -> None:
    class Draws(Own):
        def change(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
            state["drawn"] = torch.rand(3, 3)
            super().change(p, state, lr)

    model = fresh(Matrices, comm.rank)
    torch.manual_seed(5)
    mpidl.ZeroOptimizer(model, Draws, process_group=comm, stage=3, lr=0.01)
    found = torch.rand(1)
    torch.manual_seed(5)
    assert found == torch.rand(1)
