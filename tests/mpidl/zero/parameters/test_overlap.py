"""Stages 1 and 2: new parameters are gathered while the next forward pass begins, which waits before it uses them."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.zero.parameters.read_hook import Watched
from tests.mpidl.zero.reference import Plain, Several, engine, plainly

pytestmark = pytest.mark.mpi

STAGES = pytest.mark.parametrize("way", ["stage 1", "stage 2"])


class Late:
    """A gather that happens when `wait` is called, and no sooner."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run

    def wait(self, timeout: float | None = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    @property
    def waited_for(self) -> bool:
        return self._run is None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """The gathers of steps, in the order in which they were asked for."""
    works: list[Late] = []
    gather = Communicator.all_gather

    def all_gather(comm: Communicator, out: Any, x: Any, *args: Any, async_op: bool = False, **settings: Any) -> Any:
        if not async_op:
            return gather(comm, out, x, *args, **settings)
        works.append(Late(lambda: gather(comm, out, x, *args, **settings)))
        return works[-1]

    monkeypatch.setattr(Communicator, "all_gather", all_gather)
    return works


def stepped(comm, way: str) -> tuple[nn.Module, mpidl.ZeroOptimizer, nn.Module]:
    """After one step, and the plain model after it."""
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    plain.step(lambda m, rank: plainly(m, rank, 0).backward())
    plainly(model, comm.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, plain.model


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@STAGES
def test_each_block_waits_for_its_own_parameters(comm, late, way: str) -> None:
    model, optimizer, _ = stepped(comm, way)
    late.clear()
    plainly(model, comm.rank, 1).backward()
    optimizer.step()
    assert not any(work.waited_for for work in late)
    parts = [*model.blocks, model.head]
    on_their_way: list[list[bool]] = []

    def after(*_: Any) -> None:
        on_their_way.append([isinstance(part.weight, Watched) for part in model.modules() if type(part) is nn.Linear])

    for part in parts:
        part.register_forward_hook(after)
    model(torch.ones(1, 3))
    assert on_their_way == [[number > done for number in range(4)] for done in range(4)]
    assert all(type(p) is nn.Parameter for p in model.parameters())


USES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "sum": lambda m: m.head.weight.sum(),
    "data": lambda m: m.head.weight.data.clone(),
    "part": lambda m: m.head.weight[0],
    "list": lambda m: torch.cat([p.reshape(-1) for p in m.parameters()]),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_mul(list(m.parameters()), 2.0)[-1],
    "linear": lambda m: nn.functional.linear(torch.ones(1, 3), m.head.weight),
    "numpy": lambda m: torch.from_numpy(m.head.weight.detach().numpy().copy()),
    "dlpack": lambda m: torch.from_dlpack(m.head.weight.detach()).clone(),
    "pointer": lambda m: torch.tensor((ctypes.c_float * 6).from_address(m.head.weight.data_ptr())[:]),
    "list of numbers": lambda m: torch.tensor(m.head.weight.tolist()),
    "state_dict": lambda m: m.state_dict()["head.weight"].clone(),
    "saved": lambda m: saved(m),
    "evaluation": lambda m: evaluated(m),
    "in place": lambda m: changed(m),
}


def saved(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)["head.weight"]


def evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(1, 3))


def changed(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.head.weight.mul_(2).clone()


@STAGES
@pytest.mark.parametrize("use", USES)
def test_every_reader_of_a_parameter_sees_the_new_values(comm, late, way: str, use: str) -> None:
    model, _, plain = stepped(comm, way)
    assert not late[-1].waited_for
    same(USES[use](model), USES[use](plain))


@STAGES
def test_what_a_rank_owns_is_given_when_no_gather_works_on_it_any_more(comm, late, way: str) -> None:
    """Some libraries' in-place all-gather turns the blocks around in the receiver's memory, this rank's own as well."""
    _, optimizer, _ = stepped(comm, way)
    assert not any(work.waited_for for work in late)
    optimizer.owned_state()
    assert len(late) == len(optimizer.stats()["buckets"])
    assert all(work.waited_for for work in late)


@STAGES
def test_parameters_arrive_without_the_optimizer(comm, late, way: str) -> None:
    model, optimizer, plain = stepped(comm, way)
    del optimizer
    same(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))


@STAGES
def test_gathered_and_states_wait(comm, late, way: str) -> None:
    _, optimizer, plain = stepped(comm, way)
    whole = optimizer.model_state_dict()
    for name, p in plain.state_dict().items() if comm.rank == 0 else ():
        same(whole[name], p)
    with optimizer.gathered():
        assert all(work.waited_for for work in late)


@STAGES
def test_compiled_parts_have_their_parameters_before_the_pass(comm, late, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    model.blocks[1].compile(backend="eager")
    plainly(model, comm.rank, 0).backward()
    optimizer.step()
    assert late
    assert all(work.waited_for for work in late)
