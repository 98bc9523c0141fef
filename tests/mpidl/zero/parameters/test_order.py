"""ZeRO whichever units run: on all ranks or some, in any order, several times, in checkpoints, or never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpidl
from tests.mpidl.graphs import GRAPHS
from tests.mpidl.zero.reference import SETTINGS, SGD, Several, after_failure, check, data, engine, follow, made, plainly
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi


class Buffered(Several):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        return super().forward(x * self.factor, order)


@every_way
@pytest.mark.each("name")
@pytest.mark.parametrize("name", GRAPHS)
def test_training_is_that_of_one_process(comm, name: str, way: str) -> None:
    follow(comm, way, GRAPHS[name].make, GRAPHS[name].loss)


@every_way
def test_units_called_several_times_or_not_at_all_in_another_order_each_step(comm, way: str) -> None:
    orders = [(0, 1, 2), (2, 0, 2, 2), (1,), (), (2, 1, 0)]
    follow(comm, way, Several, lambda m, rank, step: m(data(rank), orders[step]).square().sum(), steps=5)


@every_part
def test_after_evaluation_by_other_units_on_each_rank_the_states_come(comm, way: str) -> None:
    model, optimizer = engine(comm, Buffered, way)
    plain = made(Buffered)
    order = [(0,), (0, 1, 2), (), (2, 1, 1)][comm.rank % 4]

    def evaluate() -> None:
        with torch.no_grad():
            model(data(comm.rank), order)

    evaluate()
    check(model, optimizer, plain)
    evaluate()
    with optimizer.gathered(model.head):
        evaluate()
    for state in (optimizer.model_state_dict, optimizer.state_dict, optimizer.gradients):
        evaluate()
        state()
    with optimizer.no_sync():
        model(data(comm.rank), order)
    evaluate()
    plainly(model, comm.rank, 0).backward()  # broadcasts the buffer first
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Buffered)


@every_part
def test_a_hook_that_fails_before_forward_leaves_nothing_running(comm, way: str) -> None:
    class Refused(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise Refused

    model = made(Several, comm.rank)
    handle = model.register_forward_pre_hook(refuse)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **SETTINGS[way], **SGD)
    with pytest.raises(Refused):
        plainly(model, comm.rank, 0)
    handle.remove()
    if way == "stage 3 gathered" and comm.size > 1:
        with pytest.raises(mpidl.TrainingError, match="norm of a parameter that is sharded"):
            model.head.weight.norm()
    after_failure(comm, model, optimizer, Several)


@every_part
def test_several_outputs_of_which_some_are_used(comm, way: str) -> None:
    @dataclass
    class Output:
        first: torch.Tensor
        others: dict[str, torch.Tensor]

    class Packs(Several):
        def forward(self, x):
            first = self.blocks[0](x)
            return Output(first, {"b": self.blocks[1](first), "c": self.head(self.blocks[2](x))})

    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        out = m(data(rank, step))
        return (out.first * out.others["b"]).sum() if step else out.others["c"].square().sum()

    follow(comm, way, Packs, loss)


@every_part
def test_a_loss_that_does_not_come_from_the_output(comm, way: str) -> None:
    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        fit = plainly(m, rank, step)
        penalty = sum(p.square().sum() for p in m.parameters())
        return penalty * (rank + 1) if step == 1 else penalty + fit

    follow(comm, way, Several, loss)


@every_part
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "re-entrant"])
def test_the_whole_model_in_a_checkpoint(comm, way: str, reentrant: bool) -> None:
    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        return checkpoint(m, data(rank, step).requires_grad_(), use_reentrant=reentrant).square().sum()

    follow(comm, way, Buffered, loss)


@every_part
@pytest.mark.parametrize("order", [(2, 0, 0, 0), (2, 1, 0, 2, 1, 0)], ids=["before", "after"])
def test_a_gradient_that_comes_in_parts(comm, way: str, order: tuple[int, ...]) -> None:
    """From re-entrant checkpoints that share a parameter: before its bucket is reduced, or after it."""

    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        x = data(rank).requires_grad_()
        for number in order:
            x = checkpoint(m.blocks[number], x, use_reentrant=True)
        return m.head(x).square().sum()

    follow(comm, way, Several, loss)


@every_part
def test_a_gradient_that_comes_late_on_some_ranks(comm, way: str) -> None:
    def loss(m: Any, rank: int, step: int) -> torch.Tensor:
        x = data(rank).requires_grad_()
        for number in (2, 1, 0, 2, 0) if rank == step % comm.size else (2, 1, 0):
            x = checkpoint(m.blocks[number], x, use_reentrant=True)
        return m.head(x).square().sum()

    follow(comm, way, Several, loss)
