"""Whole states of an optimizer that go into shards: from plain torch, of parameters of any shape, and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.absent_state import absent_state
from tests.mpidl.checkpoint.cut_model import Training as Cut
from tests.mpidl.checkpoint.cut_model import training
from tests.mpidl.zero.reference import SETTINGS, Block, Several, check, engine, made, plainly
from tests.mpidl.zero.ways import STAGES, every_part

pytestmark = pytest.mark.mpi


class Scaled(nn.Module):
    """With a parameter of no dimensions; alone: without any other that trains."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block().requires_grad_(not alone) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@every_part
@pytest.mark.parametrize(
    ("method", "alone"),
    [(torch.optim.AdamW, False), (torch.optim.NAdam, True), (torch.optim.ASGD, False), (mpidl.optim.LAMB, True)],
)
def test_a_parameter_of_no_dimensions(comm, method: Any, alone: bool, way: str) -> None:
    """Its state looks like the count of steps, which is no state of an element."""
    model, plain = made(lambda: Scaled(alone), comm.rank), made(lambda: Scaled(alone))
    optimizer = mpidl.ZeroOptimizer(model, method, process_group=comm, lr=0.1, **SETTINGS[way])
    reference = method([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        for m, o in ((plain, reference), (model, optimizer)):
            plainly(m, 0, step).backward()
            o.step()
            o.zero_grad()
        check(model, optimizer, plain)
        expected, found = copy.deepcopy(reference.state_dict()), optimizer.state_dict()
        if comm.rank == 0:
            for number, entry in expected["state"].items():
                for key, value in entry.items():
                    assert not torch.is_tensor(value) or value.shape == found["state"][number][key].shape
        optimizer.load_state_dict(found if step % 2 else expected)


class Noting(Several):
    """A model that has more to keep than tensors. refused: a number of batches that it does not load."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"batches": 0}
        self.refused = -1

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        if state == {"batches": self.refused}:
            raise ValueError("too many batches")
        self.seen = state


@every_part
def test_extra_states_are_rank_0_s_and_go_to_all(comm, way: str) -> None:
    model, optimizer = engine(comm, Noting, way)
    model.seen = {"batches": 5 + comm.rank}
    state = optimizer.model_state_dict()
    if comm.rank == 0:
        assert list(state) == list(made(Noting).state_dict())
        assert state["_extra_state"] == {"batches": 5}
        made(Noting).load_state_dict(state)
    again, other = engine(comm, Noting, way)
    other.load_model_state_dict(state)
    assert again.seen == {"batches": 5}
    without = {name: value for name, value in state.items() if name != "_extra_state"}
    with pytest.raises(mpidl.ConfigurationError, match=r"missing names \['_extra_state'\]"):
        other.load_model_state_dict(without)
    again.refused = 5 if comm.rank == comm.size - 1 else -1
    with pytest.raises(mpidl.ConfigurationError, match="_extra_state: too many batches"):
        other.load_model_state_dict(state)


@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("way", STAGES)
def test_gradients_of_a_model_that_is_cut_over_tp_are_whole(comm, way: str) -> None:
    judge = Cut("plain", None)
    judge.call().backward()
    with training(way, (comm.size, 1), comm) as run:
        run.call().backward()
        found = run.optimizer.gradients()
        assert found.keys() == dict(judge.model.named_parameters()).keys()
        for name, p in judge.model.named_parameters():
            assert torch.equal(found[name], p.grad), name


def groups(**given: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"params": list(range(8))}], **given}


WRONG: dict[str, tuple[Any, str]] = {
    "None": (None, "got NoneType; needs what a state_dict"),
    "nothing": ({}, "got nothing; needs what a state_dict"),
    "half": ({"state": {}}, "got 'state'; needs what a state_dict"),
    "a group of no parameters": (groups(param_groups=[{"lr": 1.0}]), "param_groups: needs dictionaries with 'params'"),
    "no group": (groups(param_groups=[]), r"got groups of \[\] parameters; needs \[8\]"),
    "other groups": (groups(param_groups=[{"params": [0]}]), r"got groups of \[1\] parameters; needs \[8\]"),
    "a name": (groups(state={"head.bias": {}}), "got a state of parameter 'head.bias', which is in no group"),
    "a number too high": (groups(state={8: {}}), "got a state of parameter 8, which is in no group"),
    "a shape": (
        groups(state={0: {"momentum_buffer": torch.ones(99)}}),
        r"got momentum_buffer of shape \(99,\) for a parameter of shape \(3, 3\)",
    ),
    "a number as states": (groups(state=3), "state: needs a dictionary"),
    "no state": (groups(state={0: None}), "state: needs a dictionary"),
    "no groups": (groups(param_groups=None), "param_groups: needs dictionaries with 'params'"),
    "a text as a state": (groups(state={0: {"momentum_buffer": "x"}}), "got momentum_buffer 'x' for parameter 0"),
    "a text as a setting": (
        groups(param_groups=[{"params": list(range(8)), "lr": "fast"}]),
        "got lr 'fast' in a group",
    ),
}
WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "None": (lambda _: None, "got NoneType; needs a dictionary"),
    "a list": (lambda state: list(state.values()), "got list; needs a dictionary"),
    "no tensor": (lambda state: {**state, "head.bias": 3.0}, "head.bias is of type float; needs a tensor"),
    "a shape": (lambda state: {**state, "head.bias": torch.ones(9)}, r"head.bias has shape \(9,\); needs \(2,\)"),
    "missing": (lambda _: {"nonsense": torch.ones(1)}, r"missing names \['blocks"),
    "of a rank without it": (
        lambda _: absent_state(1),
        r"got on rank 0 what model_state_dict\(\) gave on rank 1, which holds no state",
    ),
    "a number as name": (lambda state: {**state, 3: torch.ones(2)}, r"missing names \[\], unexpected names \['3'\]"),
}


@pytest.mark.each("what")
@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(comm, what: str) -> None:
    given, message = WRONG[what]
    _, optimizer = engine(comm, Several, "stage 3 gathered")
    before = optimizer.param_groups[0]["lr"]
    with pytest.raises(mpidl.ConfigurationError, match=f"load_state_dict: {message}"):
        optimizer.load_state_dict(given if comm.rank == 0 else {})  # what the others give is ignored
    assert optimizer.param_groups[0]["lr"] == before
    optimizer.load_state_dict(groups())


@every_part
@pytest.mark.each("what")
@pytest.mark.parametrize("what", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_on_every_rank_and_change_nothing(comm, what: str, way: str) -> None:
    change, message = WRONG_WEIGHTS[what]
    model, optimizer = engine(comm, Several, way)
    plain = made(Several)
    with pytest.raises(mpidl.ConfigurationError, match=f"load_model_state_dict: {message}"):
        optimizer.load_model_state_dict(change(plain.state_dict()))
    check(model, optimizer, plain)
