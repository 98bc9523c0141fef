"""Changes of whole parameters inside `gathered`: the same on all ranks, or one rank's for all; others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import Several, check, engine, made
from tests.mpidl.zero.ways import every_part, every_way, zero

pytestmark = pytest.mark.mpi


def head_to(value: float) -> Callable[[nn.Module], Any]:
    return lambda m: nn.init.constant_(m.head.weight, value)


def head_data(m: Any) -> None:
    m.head.weight.data.fill_(7.0)


def replaced(m: Any) -> None:
    m.head.weight.data = torch.full((2, 3), 7.0)


def transposed(m: Any) -> None:
    m.blocks[0].inner.weight.data = m.blocks[0].inner.weight.data.t()


def seventh(m: Any) -> None:
    m.load_state_dict({name: torch.full_like(value, 7.0) for name, value in m.state_dict().items()})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": head_to(7.0),
    "data": head_data,
    "replaced": replaced,
    "transposed": transposed,
    "loaded": seventh,
}


@every_part
@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_are_the_same_on_all_ranks_are_kept(comm, what: str, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = made(Several)
    with optimizer.gathered():
        CHANGES[what](model)
    CHANGES[what](plain)
    check(model, optimizer, plain)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@every_part
@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_one_rank_alone_are_refused_on_every_rank(comm, what: str, way: str) -> None:
    if comm.size == 1:
        return
    model, optimizer = engine(comm, Several, way)
    named = r"blocks\.0\.inner\.weight" if what in ("transposed", "loaded") else r"head\.weight"

    def change() -> None:
        with optimizer.gathered():
            if comm.rank == comm.size - 1:
                CHANGES[what](model)

    with pytest.raises(mpidl.TrainingError, match=rf"^{named}.*: changed inside gathered, but not.*from_rank=0"):
        change()
    plain = made(Several)
    optimizer.load_model_state_dict(plain.state_dict())
    check(model, optimizer, plain)


@every_part
@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_one_rank_go_to_all_where_asked(comm, what: str, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = made(Several)
    last = comm.size - 1
    with optimizer.gathered(from_rank=last):
        CHANGES[what](model) if comm.rank == last else head_to(-1.0)(model)
    CHANGES[what](plain)
    check(model, optimizer, plain)


@every_way
def test_masters_and_frozen_parameters_follow_one_rank(comm, way: str) -> None:
    model = made(Several)
    model.head.bias.requires_grad_(False)
    optimizer = zero(model, comm, way, torch.optim.SGD, lr=0.0, precision=mpidl.Precision(torch.bfloat16))
    with optimizer.gathered(model.head, from_rank=0):
        if comm.rank == 0:
            model.head.weight.fill_(3.0)
            model.head.bias.fill_(5.0)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # of masters, at a rate of 0
    weights = optimizer.model_state_dict()
    with optimizer.gathered(writable=False):
        assert (model.head.weight == 3.0).all()
        assert (model.head.bias == 5.0).all()
    assert comm.rank or (weights["head.weight"] == 3.0).all()


@every_part
def test_what_does_not_fit_is_not_taken(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)

    def change() -> None:
        with optimizer.gathered():
            model.head.weight.data = torch.ones(7, 3)

    with pytest.raises(mpidl.TrainingError, match=r"head\.weight: replaced .*another shape"):
        change()
    check(model, optimizer, made(Several))


@every_part
def test_an_error_of_the_block_is_raised_and_not_hidden(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)

    def change() -> None:
        with optimizer.gathered():
            model.head.weight.fill_(float(comm.rank))
            raise KeyError("deliberate")

    with pytest.raises(KeyError, match="deliberate"):
        change()


WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "a number": (lambda m: {"module": 3}, "gathered: got int; needs a module of the model"),
    "a parameter": (lambda m: {"module": m.head.weight}, "gathered: got a parameter; needs a module"),
    "a stranger": (lambda m: {"module": nn.Linear(2, 2)}, "the Linear has parameters that are not the model's"),
    "no rank": (lambda m: {"from_rank": 99}, "from_rank: got 99; needs a rank below"),
    "True": (lambda m: {"from_rank": True}, "from_rank: got True; needs a rank below"),
    "nothing to change": (lambda m: {"from_rank": 0, "writable": False}, "from_rank: is for changes"),
}


@every_part
@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm, what: str, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    make, message = WRONG[what]
    wrong = comm.rank == comm.size - 1
    with pytest.raises(mpidl.ConfigurationError, match=re.escape(message)):
        optimizer.gathered(**(make(model) if wrong else {})).__enter__()
    check(model, optimizer, made(Several))


@every_part
def test_a_module_of_nothing_is_none_of_the_model(comm, way: str) -> None:
    """An empty list is no whole model."""
    model, optimizer = engine(comm, Several, way)
    with optimizer.gathered(nn.ModuleList()):
        pass
    check(model, optimizer, made(Several))


def head_only(m: Any) -> Any:
    return m.head


def nothing(m: Any) -> None:
    return None


@every_part
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("outer", [head_only, nothing])
@pytest.mark.parametrize("inner", [head_only, nothing])
def test_a_block_inside_another_sees_its_changes_and_keeps_its_own(comm, inner, outer, reshard: bool, way: str) -> None:
    model, optimizer = engine(comm, Several, way, reshard_after_forward=reshard)
    plain = made(Several)
    with optimizer.gathered(outer(model)):
        model.head.bias.fill_(1.0)
        with optimizer.gathered(inner(model)):
            assert (model.head.bias == 1.0).all()
            model.head.weight.fill_(2.0)
            seventh(inner(model) or model)
            model.head.bias.mul_(3.0)
        assert (model.head.bias == 21.0).all()
        model.head.weight.add_(1.0)
    seventh(inner(plain) or plain)
    with torch.no_grad():
        plain.head.bias.mul_(3.0)
        plain.head.weight.add_(1.0)
    check(model, optimizer, plain)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@every_part
@pytest.mark.parametrize("inner", [None, 0, -1])
@pytest.mark.parametrize("outer", [0, -1])
def test_changes_of_one_rank_go_to_all_from_both_blocks(comm, outer: int, inner: int | None, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    outer %= comm.size
    inner = None if inner is None else inner % comm.size
    with optimizer.gathered(from_rank=outer):
        if comm.rank == outer:
            model.head.bias.fill_(3.0)
        with optimizer.gathered(model.head, from_rank=inner):
            assert (model.head.bias == 3.0).all()
            if inner in (None, comm.rank):
                model.head.bias.add_(1.0)
        assert (model.head.bias == 4.0).all()
        if comm.rank == outer:
            model.head.weight.fill_(5.0)
    plain = made(Several)
    nn.init.constant_(plain.head.bias, 4.0)
    nn.init.constant_(plain.head.weight, 5.0)
    check(model, optimizer, plain)


@every_part
def test_an_inner_block_does_not_begin_with_what_differs(comm, way: str) -> None:
    if comm.size == 1:
        return
    model, optimizer = engine(comm, Several, way)

    def change() -> None:
        with optimizer.gathered():
            head_to(float(comm.rank))(model)
            with optimizer.gathered(model.blocks[0]):
                raise AssertionError

    with pytest.raises(mpidl.TrainingError, match=r"^head\.weight: changed inside gathered, but not equally"):
        change()
    optimizer.load_model_state_dict(made(Several).state_dict())
    check(model, optimizer, made(Several))


@every_part
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_an_error_of_an_inner_block_leaves_both_changes(comm, caught: str, way: str) -> None:
    model, optimizer = engine(comm, Several, way)

    def both() -> None:
        with optimizer.gathered():
            model.head.bias.fill_(1.0)
            try:
                with optimizer.gathered(model.head):
                    model.head.weight.fill_(2.0)
                    raise KeyError("deliberate")
            except KeyError:
                if caught == "outside":
                    raise
            model.head.bias.add_(1.0)

    if caught == "outside":
        with pytest.raises(KeyError, match="deliberate"):
            both()
    else:
        both()
    plain = made(Several)
    nn.init.constant_(plain.head.bias, 1.0 if caught == "outside" else 2.0)
    nn.init.constant_(plain.head.weight, 2.0)
    check(model, optimizer, plain)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@every_part
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("loads", ["state", "files"])
def test_weights_are_loaded_inside_a_block(comm, tmp_path, loads: str, writable: bool, half: bool, way: str) -> None:
    precision = mpidl.Precision(torch.bfloat16) if half else None
    model, optimizer = engine(comm, Several, way, precision=precision)
    plain = made(Several, rank=2)
    whole = dict(plain.state_dict())
    with optimizer.gathered(writable=writable):
        if writable:
            model.head.bias.fill_(1.0)
        if loads == "state":
            optimizer.load_model_state_dict(whole)
        else:
            files = pytest.importorskip("safetensors.torch")
            files.save_file(whole, tmp_path / "weights.safetensors")
            optimizer.load_safetensors(tmp_path / "weights.safetensors")
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), whole[name].to(p.dtype), rtol=0, atol=0)
        if writable:
            model.head.weight.zero_()
            whole["head.weight"].zero_()
    found = optimizer.model_state_dict()
    for name, value in found.items() if comm.rank == 0 else ():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    model(torch.ones(1, 3, dtype=torch.bfloat16 if half else None)).sum().backward()
    optimizer.step()


@every_part
def test_weights_of_a_part_are_loaded_inside_a_block_that_has_changed_others(comm, tmp_path, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    whole = dict(made(Several, rank=2).state_dict())
    kept = whole.pop("head.bias")
    with optimizer.gathered():
        model.head.bias.fill_(3.0)
        files = pytest.importorskip("safetensors.torch")
        files.save_file(whole, tmp_path / "weights.safetensors")
        optimizer.load_safetensors(tmp_path / "weights.safetensors", missing=lambda name: name == "head.bias")
        assert torch.equal(model.head.bias, torch.full_like(kept, 3.0))
    found = optimizer.model_state_dict()
    for name, value in found.items() if comm.rank == 0 else ():
        expected = torch.full_like(kept, 3.0) if name == "head.bias" else whole[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["stage 3", "stage 3 gathered"])
def test_after_a_part_of_the_model_was_called_by_itself(comm, way: str) -> None:
    """Its weights are whole until a pass of the model, or a step, ends; a block reads and changes them all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = zero(model, comm, way)
    y = model[0](torch.ones(3, 4))
    found = optimizer.model_state_dict()
    if comm.rank == 0:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with optimizer.gathered(), torch.no_grad():
        model[0].weight.mul_(2.0)
    with optimizer.gathered(writable=False):
        assert torch.equal(model[0].weight, 2.0 * expected["0.weight"])
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    del y
