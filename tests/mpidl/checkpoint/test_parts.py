"""Checkpoints of a model whose parts lie over pp and tp of a mesh: each part comes back to the ranks that hold it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import CheckpointError, ConfigurationError, Mesh
from mpidl.checkpoint import __main__ as command
from mpidl.checkpoint import folder, load, newest, save, verify, wait
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


def axes_of(comm: Communicator) -> list[dict[str, int]]:
    """All the ranks are parts, and, where they are even in number, half of them."""
    return [{"pp": comm.size}] if comm.size % 2 else [{"tp": 2}, {"pp": 2}, {"dp": 1, "pp": 2, "tp": -1}]


class Training:
    """A part of a model, other values and another width on each, and what trains it over dp."""

    def __init__(self, engine: str, mesh: Mesh, seed: int = 0) -> None:
        stage, piece = mesh.rank("pp"), mesh.rank("tp")
        torch.manual_seed(100 * seed + 10 * stage + piece)
        self.mesh, self.width = mesh, 3 + stage
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(self.width, 5), torch.nn.Dropout(0.5))
        for p in self.model.parameters():
            mpidl.mesh.place(p, "pp", "tp")
        self.call: Any = self.model
        self.optimizer: Any
        if engine in WAYS:
            self.optimizer = mpidl.ZeroOptimizer(
                self.model, torch.optim.AdamW, mesh=mesh, lr=0.01 * (1 + stage), **WAYS[engine]
            )
        else:
            if engine == "ddp":
                self.call = mpidl.DistributedDataParallel(self.model, mesh=mesh)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (1 + stage))
        torch.manual_seed(mesh.comm.rank + 50 * seed)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            x = torch.arange(2.0 * self.width).view(2, self.width) * (1 + self.mesh.rank("dp"))
            loss = self.call(x).square().mean()  # the dropout's masks go on with the rank's random numbers
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: Path, step: int, **more: Any) -> Any:
        return save(path, self.call, self.optimizer, step=step, mesh=self.mesh, **more)

    def load(self, path: Path, **more: Any) -> Any:
        return load(path, self.call, self.optimizer, mesh=self.mesh, **more)


@contextmanager
def training(comm: Communicator, engine: str = "ddp", seed: int = 0, **axes: int) -> Iterator[Training]:
    with Mesh(**axes, comm=comm) as mesh:
        yield Training(engine, mesh, seed)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_part_goes_on_to_the_bit(comm, shared: Path, engine: str) -> None:
    for number, axes in enumerate(axes_of(comm)):
        path = shared / str(number)
        with training(comm, engine, **axes) as first:
            first.steps(2)
            first.save(path, 2, extra=first.mesh.coordinates["pp"])
            expected = first.steps(2)
        with training(comm, engine, seed=1, **axes) as second:
            loaded = second.load(path)
            assert (loaded.path, loaded.step, loaded.ranks) == (path / "step-00000002", 2, comm.size)
            assert loaded.extra == second.mesh.coordinates["pp"]
            assert second.steps(2) == expected
        assert verify(path / "step-00000002").about["step"] == 2


@pytest.mark.ranks(2, exactly=True)
def test_dp_may_differ_and_sizes_of_parts_may_not(comm, shared: Path) -> None:
    whole = torch.nn.Linear(3, 5)
    save(shared / "whole", whole, process_group=comm)
    with training(comm, tp=2) as first:
        first.steps(1)
        first.save(shared / "tp", 1)
        with pytest.raises(CheckpointError, match=r"holds a whole model; here is the parts of a model over tp=2"):
            first.load(shared / "whole")
    with training(comm, pp=2) as other:
        before = [p.clone() for p in other.model.parameters()]
        with pytest.raises(CheckpointError, match=r"holds the parts of a model over tp=2; here is .* over pp=2; needs"):
            other.load(shared / "tp")
        assert all(map(torch.equal, before, other.model.parameters()))
    with pytest.raises(CheckpointError, match=r"holds the parts of a model over tp=2; here is a whole model"):
        load(shared / "tp", whole, process_group=comm)


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("engine", ["ddp", "stage 3"])
def test_parts_of_two_data_ranks_are_loaded_by_one_each(comm, shared: Path, engine: str) -> None:
    with training(comm, "stage 2", tp=2) as first:
        first.steps(1)
        first.save(shared, 1)
        first.optimizer.unwrap()
        held = [p.detach().clone() for p in first.model.parameters()]
    half = comm.split(comm.rank // 2)
    with training(half, engine, seed=1, tp=2) as second:
        second.load(shared)
        if engine == "stage 3":
            second.optimizer.unwrap()
        tp = comm.rank % 2
        assert second.mesh.rank("tp") == tp  # as it was before
        for mine, theirs in zip(second.model.parameters(), held, strict=True):
            assert torch.equal(mine, theirs)
    half.close()


@pytest.mark.ranks(2, exactly=True)
def test_a_directory_is_complete_with_all_parts_alone(comm, shared: Path, capsys) -> None:
    with training(comm, pp=2) as run:
        run.save(shared, 1)
        run.save(shared, 2, background=True)
        assert wait(run.call) == shared / "step-00000002"
        run.save(shared, 2, keep_last=2)  # in the place of the former
        index = shared / "step-00000002" / "part-pp1" / "index.json"
        text = index.read_text()
        comm.barrier()
        for damage in (text[:-9], (shared / "step-00000001" / "part-pp1" / "index.json").read_text()[:-1], None):
            if comm.rank == 0:
                index.unlink() if damage is None else index.write_text(damage)
            comm.barrier()
            assert newest(shared)[0] == shared / "step-00000001"
            assert run.load(shared).step == 1
            comm.barrier()
        run.save(shared, 3, keep_last=1)
        assert sorted(path.name for path in shared.glob("[!.]*")) == ["latest", "step-00000003"]
        if comm.rank == 0:
            assert command.main(["inspect", str(shared / "latest"), "--tensors"]) == 0
            shown = capsys.readouterr().out
            assert "part-pp1/model/0.weight  float32 (5, 4)" in shown
            assert "2, pp=2" in shown
            assert command.main(["verify", str(shared)]) == 0
            assert command.main(["export", str(shared), str(shared / "out")]) == 1
            assert (
                "holds the parts of a model over pp=2, which do not join to a whole one: 0.weight stands in"
                in capsys.readouterr().err
            )
        comm.barrier()


@pytest.mark.ranks(2, exactly=True)
def test_experts_are_parts_over_ep_and_what_is_dense_is_none(comm, shared: Path) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        dense = mpidl.DistributedDataParallel(torch.nn.Linear(2, 2), mesh=mesh)
        save(shared / "dense", dense, mesh=mesh)
        assert not list((shared / "dense" / "step-00000000").glob("part*"))
        load(shared / "dense", torch.nn.Linear(2, 2), mesh=mesh)
        expert = torch.nn.Linear(2, 2)
        mpidl.mesh.place(expert.weight, "ep")
        weight = torch.nn.init.constant_(expert.weight, mesh.rank("ep")).clone()
        save(shared, expert, mesh=mesh)
        assert sorted(path.name for path in (shared / "step-00000000").glob("part*")) == ["part-ep0", "part-ep1"]
        torch.nn.init.zeros_(expert.weight)
        load(shared, expert, mesh=mesh)
        assert torch.equal(expert.weight, weight)
        other = comm.duplicate()
        trained = mpidl.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=other)
        with pytest.raises(ConfigurationError, match=r"trained over 2 ranks that are neither dp x cp of .* nor edp"):
            save(shared, trained, mesh=mesh)
        other.close()


@pytest.mark.ranks(2, exactly=True)
def test_what_fails_in_one_part_is_an_error_on_every_rank(comm, shared: Path, monkeypatch) -> None:
    with training(comm, pp=2) as run:
        run.save(shared, 1)
        with pytest.raises(ConfigurationError, match=r"extra.*on rank 1"):
            run.save(shared, 2, extra=object() if comm.rank == 1 else None)
        if comm.rank == 1:
            monkeypatch.setattr("mpidl.checkpoint.saving.write_part", lambda *_: os.stat(shared / "none"))
        with pytest.raises(CheckpointError, match=r"No such file .*on rank 1.*step-00000002 was not saved"):
            run.save(shared, 2)
        monkeypatch.undo()
        assert folder.named(shared) == [shared / "step-00000001"]
        run.model.add_module("more", torch.nn.Linear(1, 1) if comm.rank else torch.nn.Identity())
        with pytest.raises(CheckpointError, match=r"missing: more.weight, more.bias \(on rank 1\)"):
            load(shared, run.call, mesh=run.mesh)
        with pytest.raises(ConfigurationError, match=r"1 of the 2 ranks of a mesh with pp=2 take part.*needs mesh="):
            save(shared, run.call)
