"""Several backward passes of one forward pass, as of auxiliary losses: gradients are those of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.ddp.reference import check, made, mean_gradients
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import every_way

pytestmark = pytest.mark.mpi

every_setting = pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}, {"bucket_cap_mb": 25}],
    ids=str,
)
trunks = pytest.mark.parametrize("trunk", [False, True], ids=["parted", "shared"])


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * step + rank + 1))


class Heads(nn.Module):
    """Three outputs; with a trunk that all share, or each with layers of its own. The last one has a normalization."""

    def __init__(self, trunk: bool = True) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3) if trunk else nn.Identity()
        self.norm = nn.BatchNorm1d(3)
        self.heads = nn.ModuleList([zero.Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.tanh(self.trunk(x))
        return [self.heads[0](x), self.heads[1](x), self.norm(self.heads[2](x))]


def passes(m: Any, x: torch.Tensor, order: tuple[int, ...] = (0, 2, 1)) -> None:
    """The losses live on; the outputs do not."""
    losses = [(out + 1).square().mean() for out in m(x)]
    for number in order:
        losses[number].backward(retain_graph=True)


class Summed:
    """A loss whose backward pass is several ones."""

    def __init__(self, m: Any, rank: int) -> None:
        self.m, self.rank = m, rank

    def backward(self) -> None:
        passes(self.m, data(self.rank))


@every_setting
@trunks
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "eval"])
def test_each_output_by_itself(comm, settings: dict, trunk: bool, evaluates: bool) -> None:
    def make() -> nn.Module:
        return Heads(trunk).train(not evaluates)

    model = made(make)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **{"bucket_cap_mb": 1e-5, **settings})
    expected = mean_gradients(make, Summed, comm.size)
    norm = torch.cat([g.flatten() for g in expected.values() if g is not None]).norm()
    for limit in (1e9, 0.1 * norm, 0.1 * norm):
        passes(wrapped, data(comm.rank))
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(limit))
        scale = min(1.0, float(limit / norm))
        check(model, {name: None if g is None else g * scale for name, g in expected.items()})
        model.zero_grad()


@every_setting
def test_accumulation(comm, settings: dict) -> None:
    model = made(Heads)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **{"bucket_cap_mb": 1e-5, **settings})
    expected = mean_gradients(Heads, Summed, comm.size, passes=2)
    for _ in range(2):
        with wrapped.no_sync():
            passes(wrapped, data(comm.rank))
        passes(wrapped, data(comm.rank))
        check(model, expected)
        model.zero_grad()


@every_setting
def test_two_forward_passes_before(comm, settings: dict) -> None:
    model = made(Heads)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **{"bucket_cap_mb": 1e-5, **settings})
    expected = mean_gradients(Heads, Summed, comm.size, passes=2)
    for _ in range(2):
        first, second = ([(out + 1).square().mean() for out in wrapped(data(comm.rank))] for _ in range(2))
        for loss in [*first, *reversed(second)]:
            loss.backward(retain_graph=True)
        check(model, expected)
        model.zero_grad()


def test_an_output_that_is_never_used_is_an_error_one_step_later(comm) -> None:
    model = made(Heads)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    a, _b, c = wrapped(data(comm.rank))
    (a + c).sum().backward()
    a, _b, c = wrapped(data(comm.rank))
    with pytest.raises(mpidl.TrainingError, match=r"gave no gradient to heads\.1\.inner\.weight"):
        (a + c).sum().backward()
    model.zero_grad()
    expected = mean_gradients(Heads, Summed, comm.size)
    passes(wrapped, data(comm.rank))
    check(model, expected)


def test_an_output_that_is_gone_is_an_error_at_once(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Heads), process_group=comm)
    a = wrapped(data(comm.rank))[0]
    with pytest.raises(mpidl.TrainingError, match=r"gave no gradient to norm\.weight"):
        a.sum().backward()


@every_way
@trunks
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
def test_the_stages(comm, way: str, trunk: bool, accumulates: bool, clip: float | None) -> None:
    def make() -> nn.Module:
        return Heads(trunk)

    model, optimizer = zero.engine(comm, make, way)
    plain = zero.Plain(make, comm.size)
    for step in range(3):

        def run(m: nn.Module, rank: int, step: int = step) -> None:
            passes(m, data(rank, step))

        for rank in range(comm.size):
            for _ in range(1 + accumulates):
                run(plain.model, rank)
        for p in plain.model.parameters():
            p.grad /= comm.size
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), clip)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        if accumulates:
            with optimizer.no_sync():
                run(model, comm.rank)
        run(model, comm.rank)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        zero.check(model, optimizer, plain.model)


def test_a_static_graph_wants_one_backward_pass(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Heads), process_group=comm, static_graph=True, bucket_cap_mb=1e-5)
    losses = [out.square().mean() for out in wrapped(data(comm.rank))]
    losses[0].backward(retain_graph=True)
    with pytest.raises(mpidl.TrainingError, match="static_graph=True, but the graph changed"):
        losses[1].backward()
