"""Optimizers whose step needs whole parameters: Muon, Adafactor and ones of one's own, in every stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.objects import broadcast_object
from mpidl.zero import whole_steps
from tests.mpidl.models import Mixture, fresh, sequences
from tests.mpidl.zero_reference import WAYS, every_way

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


class Normalised(torch.optim.Optimizer):
    """Divides matrices' gradients by their norms and sums them up; of the rest it takes the signs."""

    def __init__(self, params: Any, lr: float, listed: bool = False) -> None:
        super().__init__(params, {"lr": lr, "listed": listed, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                change = p.grad / p.grad.norm() if p.dim() > 1 else p.grad.sign()
                entry = self.state[p]
                entry["sum"] = entry["sum"] + change if entry else change.clone()
                entry["largest"] = max(entry.get("largest", 0.0), float(change.abs().max()))
                if group["listed"]:
                    entry["history"] = torch.tensor([1.0, 2.0, 3.0])
                p.sub_(entry["sum"], alpha=group["lr"])


class OfTheGroup(Normalised):
    """A step that depends on all parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 1.0
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Muon": (Matrices, torch.optim.Muon, {"lr": 0.02}),
    "Adafactor": (Mixture, torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor, foreach": (Mixture, torch.optim.Adafactor, {"lr": 0.05, "foreach": True}),
    "one's own": (Mixture, Normalised, {"lr": 0.01}),
}
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
    return model, mpidl.ZeroOptimizer(model, cls, process_group=comm, **WAYS[way], **settings, **more)


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
    """Of rank 0, to the bit."""
    if comm.rank:
        assert found == {}
        return
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        assert found["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=0, atol=0, msg=f"{number}, {key}")
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@every_method
@pytest.mark.thorough(*(f"2-{method}" for method in METHODS), *(f"{way}-Adafactor, foreach" for way in WAYS))
@every_way
def test_the_same_bits_as_whole_parameters_on_every_rank(comm, method: str, way: str, monkeypatch) -> None:
    """Weights, state, and what the next steps make of both, with a state loaded from torch's own in between."""
    monkeypatch.setattr(whole_steps, "_BATCH_BYTES", 400)  # several batches, some of one parameter larger than that
    model, optimizer = zero(comm, method, way)
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
    model, optimizer = zero(comm, method, "3-gathered")
    go_on(model, optimizer, comm.rank, range(STEPS))
    mpidl.checkpoint.save(shared / "a", model, optimizer)
    go_on(model, optimizer, comm.rank, range(STEPS, 2 * STEPS))

    judge, reference = ddp(comm, method)
    mpidl.checkpoint.load(shared / "a", judge, reference)
    go_on(judge, reference, comm.rank, range(STEPS, 2 * STEPS))
    check_weights(comm, optimizer, judge.module)
    check_states(comm, optimizer.state_dict(), reference.state_dict())
    mpidl.checkpoint.save(shared / "b", judge, reference)

    other, again = zero(comm, method, "2")
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
    return [p for group in optimizer._inner._inner.param_groups for p in group["params"]]


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
            "OfTheGroup cannot be sharded: a step on a parameter depends on the others",
        ),
    ],
)
def test_what_is_refused(comm, make: Any, given: dict[str, Any], error: type[Exception], message: str) -> None:
    """On every rank, and before the model is changed."""
    model = fresh(make)
    with pytest.raises(error, match=message):
        mpidl.ZeroOptimizer(model, process_group=comm, stage=3, lr=0.1, **given)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_state_that_cannot_be_told_from_a_slice_is_not_saved(comm) -> None:
    model = fresh(Mixture, comm.rank)
    optimizer = mpidl.ZeroOptimizer(model, Normalised, process_group=comm, stage=3, lr=0.01, listed=True)
    go_on(model, optimizer, comm.rank, range(2))
    with pytest.raises(mpidl.TrainingError, match="its state 'history' is a list of 3 numbers"):
        optimizer.state_dict()
    go_on(model, optimizer, comm.rank, range(2, 3))
