"""Clipping over a mesh: the norm of the whole model, each element once, as one process computes it."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh, ModelMismatch, TrainingError
from mpidl.mesh import place
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

SIZES: dict[int, list[dict[str, int]]] = {
    2: [{"tp": 2}, {"pp": 2}],
    3: [{"tp": 3}],
    4: [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}],
}
WIDTH = {"cut": 5, "own": 4, "same": 3}  # elements a rank: cut over tp, a stage's own, cut over nothing


class Part(torch.nn.Module):
    """One rank's part of a model whose gradients are its inputs: `cut` over tp and pp, `own` over pp, `same`."""

    def __init__(self, cut: torch.Tensor, own: torch.Tensor, same: torch.Tensor) -> None:
        super().__init__()
        self.cut, self.own, self.same = (torch.nn.Parameter(values.clone()) for values in (cut, own, same))
        place(self.cut, "tp", "pp")
        place(self.own, "pp")

    def forward(self, cut: torch.Tensor, own: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        return (self.cut.square() * cut).sum() + (self.own * own).sum() + (self.same * same).sum()


def numbers(seed: int, pp: int, tp: int) -> tuple[torch.Tensor, ...]:
    """Those of the whole model: [pp, tp, 5], [pp, 4], [3]."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=random) for shape in ((pp, tp, 5), (pp, 4), (3,)))


def part_of(whole: tuple[torch.Tensor, ...], mesh: Mesh) -> tuple[torch.Tensor, ...]:
    return whole[0][mesh.rank("pp"), mesh.rank("tp")], whole[1][mesh.rank("pp")], whole[2]


def train(engine: str, mesh: Mesh, norm_type: float) -> tuple[list[float], Part]:
    """Three clipped steps on this rank's part; the norms, and the part."""
    pp, tp = mesh.size("pp"), mesh.size("tp")
    part = Part(*part_of(numbers(0, pp, tp), mesh))
    model: torch.nn.Module = part
    optimizer: Any
    if engine == "ddp":
        model = mpidl.DistributedDataParallel(part, mesh=mesh)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    else:
        data = mesh.along("dp", "cp")
        group = data.split(data.rank) if "hybrid" in engine else None  # every rank has all, and is one of the replicas
        way = WAYS[engine.removesuffix(" hybrid")]
        optimizer = mpidl.ZeroOptimizer(part, torch.optim.SGD, mesh=mesh, shard_group=group, lr=0.1, **way)
    norms = []
    for step in range(3):
        data = numbers(100 * step + mesh.rank("dp", "cp") + 1, pp, tp)
        optimizer.zero_grad()
        model(*part_of(data, mesh)).backward()
        if engine == "ddp":
            norms.append(mpidl.clip_grad_norm_(part, 0.5, norm_type, mesh=mesh))
        else:
            norms.append(optimizer.clip_grad_norm_(0.5, norm_type))
        optimizer.step()
    if engine != "ddp":
        optimizer.unwrap()
    return norms, part


def train_whole(pp: int, tp: int, data_ranks: int, norm_type: float) -> tuple[list[float], Part]:
    """Norms and parts of the same training by one process."""
    model = Part(*numbers(0, pp, tp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(data_ranks):
            (model(*numbers(100 * step + rank + 1, pp, tp)) / data_ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type).item())
        optimizer.step()
    return norms, model


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.one_node
@pytest.mark.parametrize("norm_type", [2.0, 3.0, inf])
@pytest.mark.parametrize("engine", [*ENGINES, "stage 2 hybrid"])
def test_clipped_training_is_that_of_one_process(engine: str, norm_type: float, comm: Communicator) -> None:
    for sizes in SIZES[comm.size]:
        with Mesh(**sizes, comm=comm) as mesh:
            norms, part = train(engine, mesh, norm_type)
            expected, whole = train_whole(mesh.size("pp"), mesh.size("tp"), mesh.size("dp", "cp"), norm_type)
            assert norms == pytest.approx(expected, rel=1e-5)
            assert len(set(map(tuple, mpidl.all_gather_object(comm, norms)))) == 1
            for mine, theirs in zip(part.parameters(), part_of(tuple(whole.parameters()), mesh), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach())


@pytest.mark.ranks(4)
@pytest.mark.one_node
def test_experts_count_once_over_edp_and_are_added_over_ep(comm: Communicator) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        expert, dense, copy = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
        place(expert, "ep")
        place(copy, counted=False)
        expert.grad = torch.tensor([3.0, 0.0]) * (1 + mesh.rank("ep"))
        dense.grad, copy.grad = torch.tensor([0.0, 2.0]), torch.tensor([7.0, 7.0])
        assert mpidl.clip_grad_norm_([expert, dense, copy], 100.0, mesh=mesh) == pytest.approx((9 + 36 + 4) ** 0.5)


@pytest.mark.ranks(2, exactly=True)
def test_gradients_that_should_be_equal_and_are_not_are_an_error(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.full((2,), 1.0 + comm.rank)
        with pytest.raises(
            TrainingError, match=r"differ over its 2 ranks; sum them over tp, or declare .*place\(p, 'tp'\)"
        ):
            mpidl.clip_grad_norm_(p, 1.0, mesh=mesh)
        assert (p.grad == 1.0 + comm.rank).all()
        p.grad = torch.full((2,), inf if comm.rank else 1.0)  # as of an fp16 overflow
        assert mpidl.clip_grad_norm_(p, 1.0, mesh=mesh) == inf


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("other", [3.0, inf])
def test_norms_of_different_types_are_an_error_on_every_rank(other: float, comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.ones(2)
        norm_type = other if comm.rank == comm.size - 1 else 2.0
        match = f"rank 0 has norm_type=2, rank {comm.size - 1} has norm_type={other:g}"
        with pytest.raises(ModelMismatch, match=match):
            mpidl.clip_grad_norm_(p, 1.0, norm_type, mesh=mesh)
        assert (p.grad == 1.0).all()


@pytest.mark.ranks(2, exactly=True)
def test_a_stage_without_gradients_takes_part(comm: Communicator) -> None:
    with Mesh(pp=2, comm=comm) as mesh:
        p = torch.nn.Parameter(torch.zeros(2))
        place(p, "pp")
        p.grad = torch.tensor([3.0, 4.0]) if comm.rank else None
        assert mpidl.clip_grad_norm_(p, 1.0, mesh=mesh) == 5.0


def test_on_data_parallelism_alone_nothing_is_sent(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    with Mesh(comm=comm) as mesh:
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        monkeypatch.setattr(comm, "all_gather", None)
        monkeypatch.setattr(comm, "all_reduce", None)
        assert mpidl.clip_grad_norm_(p, 1.0, mesh=mesh) == 5.0
