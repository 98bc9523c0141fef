"""States that parts of a mesh have each for itself, without a cut to join them, come back to each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import Mesh
from mpidl.checkpoint import load, save
from mpidl.mesh import Cut, place
from mpidl.optim import DiLoCo
from tests.mpidl.checkpoint.cut_model import training

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


def in_parts(path: Path) -> bool:
    return any(path.glob("step-*/part-*"))


def test_diloco_over_tp_comes_back_to_each_rank(comm, shared: Path) -> None:
    def made(run: Any) -> DiLoCo:
        return DiLoCo(run.optimizer, period=2, process_group=run.mesh.along("dp", "cp"))

    with training("plain", (comm.size, 1), comm) as run:
        run.optimizer = made(run)
        run.step(3)
        run.save(shared)
        expected = [theta.clone() for theta in run.optimizer.averager.global_parameters()]
        run.step(2)
        weights = [p.detach().clone() for p in run.model.parameters()]
        comm.barrier()
    with training("plain", (comm.size, 1), comm, seed=1) as again:
        again.optimizer = made(again)
        again.load(shared)
        assert all(map(torch.equal, again.optimizer.averager.global_parameters(), expected))
        again.step(2)
        assert all(map(torch.equal, again.model.parameters(), weights))


class Seen:
    """A sampler with a tensor."""

    def __init__(self, value: float) -> None:
        self.seen = torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("differs", [True, False])
def test_tensors_of_a_sampler_come_back_to_each_part(comm, shared: Path, differs: bool) -> None:
    with training("ddp", (comm.size, 1), comm) as run:
        value = float(comm.rank if differs else 5)
        run.save(shared, sampler=Seen(value))
        again = Seen(-1.0)
        run.load(shared, sampler=again)
        assert again.seen.tolist() == [value] * 3
    assert in_parts(shared) == (differs and comm.size > 1)


class Noting(nn.Module):
    """A cut weight, a buffer that has seen something, and an extra state."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        tp, size = mesh.rank("tp"), mesh.size("tp")
        self.weight = nn.Parameter(torch.full((1, 3), float(tp)))
        place(self.weight, "tp", cut=Cut.along((size, 3), 0, [(tp, tp + 1)]))
        self.register_buffer("seen", torch.zeros(4))
        self.extra: dict[str, Any] = {"number": 0, "tensor": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("what", ["buffer", "number", "tensor", "nothing"])
def test_buffers_and_extra_states_come_back_to_each_part(comm, shared: Path, what: str) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model, again = Noting(mesh), Noting(mesh)
        model.seen += comm.rank if what == "buffer" else 7
        model.extra["number"] = comm.rank if what == "number" else 7
        model.extra["tensor"] += comm.rank if what == "tensor" else 7
        save(shared, model, mesh=mesh)
        load(shared, again, mesh=mesh)
        assert torch.equal(again.seen, model.seen)
        assert again.extra["number"] == model.extra["number"]
        assert torch.equal(again.extra["tensor"], model.extra["tensor"])
        assert torch.equal(again.weight, model.weight)
        assert in_parts(shared) == (what != "nothing" and comm.size > 1)


def test_without_a_comparison_buffers_are_one_part_s(comm, shared: Path) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = Noting(mesh)
        model.seen += comm.rank
        save(shared, model, mesh=mesh, compare=False)
        load(shared, model, mesh=mesh)
        assert len({*map(tuple, mpidl.all_gather_object(comm, model.seen.tolist()))}) == 1
        assert not in_parts(shared)
