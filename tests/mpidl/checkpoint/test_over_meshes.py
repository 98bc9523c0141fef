"""A model that is cut over tp: saved on any mesh by any engine, loaded on any other, whole tensors being the judge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import CheckpointError, Mesh, all_gather_object
from mpidl.checkpoint import (
    __main__ as command,
)
from mpidl.checkpoint import (
    export_checkpoint,
    export_safetensors,
    import_safetensors,
    index,
    load,
    save,
    verify,
    wait,
)
from mpidl.checkpoint.tensorfile import TensorFile
from mpidl.mesh import Cut, place
from tests.mpidl.checkpoint.cut_model import Layout, Training, training, whole_state
from tests.mpidl.checkpoint.training import name_in_checkpoints
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import ENGINES

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


def layouts(most: int) -> list[Layout]:
    return [(tp, size // tp) for size in range(1, most + 1) for tp in range(1, size + 1) if size % tp == 0]


@contextmanager
def meshes(comm: Communicator) -> Iterator[dict[int, Communicator | None]]:
    """Communicators of the first so many ranks."""
    groups = {size: comm.split(0 if comm.rank < size else None) for size in range(1, comm.size + 1)}
    yield groups
    for group in groups.values():
        if group is not None:
            group.close()


@pytest.mark.limit(300)
def test_any_mesh_and_engine_loads_what_any_other_saved(comm, shared: Path) -> None:
    """Every layout from every other, the engines in turn."""
    truth = whole_state(2)
    kinds = [(engine, at) for at in layouts(comm.size) for engine in ENGINES + ("plain",) * (at[1] == 1)]
    with meshes(comm) as groups:
        if comm.rank == 0:
            alone = Training("plain", groups[1])
            alone.step(2)
            alone.save(shared / "alone")
        comm.barrier()
        for engine, layout in kinds:
            group = groups[layout[0] * layout[1]]
            if group is not None:
                with training(engine, layout, group, seed=1) as run:
                    run.load(shared / "alone")
                    assert not [*run.differing(truth)], f"alone -> {engine} on {layout}"
                    run.save(shared / f"{engine}-{layout}")
        comm.barrier()
        for turn, (engine, layout) in enumerate(kinds):
            group = groups[layout[0] * layout[1]]
            if group is None:
                continue
            with training(engine, layout, group, seed=1) as run:
                for number, on in enumerate(layouts(comm.size)):
                    saved = ENGINES[(number + turn) % len(ENGINES)]
                    loaded = run.load(shared / f"{saved}-{on}", verify=engine != "stage 2")
                    assert not [*run.differing(truth)], f"{saved} on {on} -> {engine} on {layout}"
                    assert (loaded.engine, loaded.ranks) == (name_in_checkpoints(saved), on[0] * on[1])
        for saved, on in kinds[comm.rank :: comm.size]:
            assert verify(shared / f"{saved}-{on}/step-00000001").about["step"] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_every_element_is_written_once_and_the_export_is_that_of_one_process(comm, shared: Path, engine: str) -> None:
    if comm.rank == 0:
        alone = Training("plain", comm_self := comm.split_self())
        alone.step()
        alone.save(shared / "alone")
        export_safetensors(shared / "expected", alone.model, process_group=comm_self)
        comm_self.close()
    else:
        comm.split_self().close()
    comm.barrier()
    with training(engine, (comm.size, 1), comm, seed=1) as run:
        run.load(shared / "alone")
        run.save(shared / "cut")
        export_safetensors(shared / "out", run.call, mesh=run.mesh)
        if comm.rank == 0:
            held = {name: entry.count for name, entry in index.read(shared / "alone/step-00000001").tensors.items()}
            written = index.read(shared / "cut/step-00000001")
            for name, entry in written.tensors.items():
                if name in held:
                    assert sum(part.stop - part.start for part in entry.slices) == entry.count == held.pop(name)
            assert all(name.startswith("rank") for name in held)
            by_rank = [sum(f["bytes"] for n, f in written.files.items() if n[8] == str(r)) for r in range(comm.size)]
            assert max(by_rank) < 1.5 * min(by_rank)
            export_checkpoint(shared / "cut/step-00000001", shared / "again")
            for path in (shared / "out", shared / "again"):
                assert (path / "model.safetensors").read_bytes() == (shared / "expected/model.safetensors").read_bytes()
        comm.barrier()
        with torch.no_grad():
            for p in run.model.parameters():
                p.zero_() if engine == "ddp" else None
        import_safetensors(shared / "out", run.call, mesh=run.mesh)
        run.save(shared / "imported")
    if comm.rank == 0:
        export_checkpoint(shared / "imported/step-00000001", shared / "last")
        assert (shared / "last/model.safetensors").read_bytes() == (shared / "out/model.safetensors").read_bytes()


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", ["stage 1", "stage 3"])
def test_masters_of_a_cut_model_in_16_bits_come_back(comm, shared: Path, engine: str) -> None:
    with meshes(comm) as groups:
        with training(engine, (2, comm.size // 2), comm, dtype=torch.bfloat16) as run:
            run.step(2)
            kept = [o.values.clone() for o in run.optimizer.owned_state().slices()]
            run.save(shared / "cut")
            run.step()
            run.load(shared / "cut")
            assert all(map(torch.equal, kept, (o.values for o in run.optimizer.owned_state().slices())))
        if comm.rank == 0:
            with training(engine, (1, 1), groups[1], dtype=torch.bfloat16) as alone:
                alone.step(2)
                expected = [o.values.clone() for o in alone.optimizer.owned_state().slices()]
                alone.step()
                alone.load(shared / "cut")
                assert all(map(torch.equal, expected, (o.values for o in alone.optimizer.owned_state().slices())))


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_accumulation_goes_on_under_another_mesh(comm, shared: Path, engine: str) -> None:
    with training(engine, (2, comm.size // 2), comm) as run:
        run.call().backward()
        run.save(shared, micro_step=1)
        run.call().backward()
        run.optimizer.step()
        expected = export(run, shared / "expected")
    with training("stage 2" if engine == "ddp" else "ddp", (1, comm.size), comm, seed=1) as other:
        assert other.load(shared).micro_step == 1
        other.call().backward()
        other.optimizer.step()
        assert export(other, shared / "found") == expected


def export(run: Training, path: Path) -> bytes:
    """The whole weights' file."""
    export_safetensors(path, run.call, **run.where)
    return (path / "model.safetensors").read_bytes()


def test_a_rank_reads_what_it_holds(comm, shared: Path, monkeypatch) -> None:
    """Rows and long runs alone; of short runs also what lies between them."""
    nbytes = 0
    read = TensorFile.read_into

    def counted(file: TensorFile, target: memoryview, offset: int) -> None:
        nonlocal nbytes
        nbytes += len(target)
        read(file, target, offset)

    monkeypatch.setattr(TensorFile, "read_into", counted)
    with training("ddp", (comm.size, 1), comm) as run:
        run.step()
        run.save(shared)
        nbytes = 0
        run.load(shared, verify=False, random_states=False)
        held = sum(p.nbytes for p in run.model.parameters()) * 3 + run.model.mean.nbytes
        assert nbytes == held
        nbytes = 0
        run.load(shared, random_states=False)
        compared = np.array([nbytes - held, sum(p.nbytes for p in Training("plain", None).model.parameters()) * 3])
        comm.all_reduce(compared)
        assert compared[0] == compared[1] // comm.size + run.model.mean.nbytes


@pytest.mark.ranks(2, exactly=True)
def test_random_states_come_back_on_the_same_mesh_and_are_equal_over_tp_on_another(comm, shared: Path) -> None:
    with training("ddp", (2, 1), comm) as run:
        torch.manual_seed(comm.rank)
        run.save(shared / "tp")
        expected = torch.rand(3)
        run.load(shared / "tp")
        assert torch.equal(torch.rand(3), expected)
    with training("ddp", (1, 2), comm) as run:
        torch.manual_seed(5 + comm.rank)
        run.save(shared / "dp")
        torch.rand(3)
    with training("ddp", (2, 1), comm) as run:
        run.load(shared / "dp")
        drawn = all_gather_object(comm, torch.rand(3).tolist())
        torch.manual_seed(5)
        assert drawn == [torch.rand(3).tolist()] * 2


class Staged(torch.nn.Module):
    """Layers with the names of one model, or those of one stage of pp; the last one has a copy of the first's table."""

    def __init__(self, stage: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = {"table": torch.nn.Linear(3, 4), "middle": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 3)}
        chosen = [{"table", "middle"}, {"table", "last"}]
        for name, layer in layers.items():
            if stage is None or name in chosen[stage]:
                self.add_module(name, layer)
                for p in layer.parameters() if stage is not None else ():
                    place(p, "pp", counted=name != "table" or stage == 0)


@pytest.mark.ranks(2, exactly=True)
def test_stages_with_the_model_s_names_are_one_checkpoint(comm, shared: Path) -> None:
    whole = Staged(None)
    with Mesh(pp=2, comm=comm) as mesh:
        stage = Staged(mesh.rank("pp"))
        optimizer = torch.optim.AdamW([{"params": stage.parameters()}, {"params": []}])
        for p in stage.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        save(shared, stage, optimizer, mesh=mesh)
        values = {name: p.clone() for name, p in stage.named_parameters()}
        with torch.no_grad():
            for p in stage.parameters():
                p.zero_()
        load(shared, stage, optimizer, mesh=mesh)
        assert all(torch.equal(values[name], p) for name, p in stage.named_parameters())
    of_all = torch.optim.AdamW([{"params": whole.parameters()}, {"params": []}])
    load(shared, whole, of_all, process_group=comm)
    for name, p in stage.named_parameters():
        other = dict(whole.named_parameters())[name]
        assert torch.equal(values[name], other)
        assert torch.equal(optimizer.state[p]["exp_avg"], of_all.state[other]["exp_avg"])
    save(shared / "back", whole, of_all, process_group=comm)
    with Mesh(pp=2, comm=comm) as mesh:
        load(shared / "back", stage, optimizer, mesh=mesh)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        save(shared / "stages", stage, optimizer, mesh=mesh)
        assert (shared / "stages/step-00000000/part-pp1").is_dir()
        load(shared / "stages", stage, optimizer, mesh=mesh)
        assert optimizer.param_groups[0]["lr"] == 0.1 * (1 + comm.rank)
        if comm.rank == 0:
            with pytest.raises(
                CheckpointError, match="which do not join to a whole one: the optimizer differs between"
            ):
                export_checkpoint(shared / "stages/step-00000000", shared / "out")
        comm.barrier()


@pytest.mark.ranks(2, exactly=True)
def test_experts_that_are_cut_over_ep_are_one_checkpoint(comm, shared: Path) -> None:
    weights = torch.arange(24.0).view(4, 2, 3)
    with Mesh(ep=2, comm=comm) as mesh:
        cut = Cut.along((4, 2, 3), 0, [(2 * comm.rank, 2 * comm.rank + 2)])
        experts = torch.nn.ParameterDict({"w": torch.nn.Parameter(cut.of(weights))})
        place(experts["w"], "ep", cut=cut)
        save(shared, experts, mesh=mesh)
        assert not [*(shared / "step-00000000").glob("part*")]
    whole = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(4, 2, 3))})
    load(shared, whole, process_group=comm)
    assert torch.equal(whole["w"], weights)


@pytest.mark.ranks(2, exactly=True)
def test_the_command_shows_and_exports_what_was_cut(comm, shared: Path, capsys) -> None:
    with training("stage 2", (2, 1), comm) as run:
        run.step()
        run.save(shared, background=True)
        wait(run.call)
    if comm.rank == 0:
        assert command.main(["inspect", str(shared / "latest"), "--tensors"]) == 0
        shown = capsys.readouterr().out
        assert "zero2 on 2 ranks, tp=2" in shown
        assert (
            "model/fused  float32 (5, 18)  0:45 of [0:5, 0:3 6:9 12:15] in rank00000-000.safetensors; 0:45 of" in shown
        )
        assert command.main(["verify", str(shared)]) == 0
        assert command.main(["export", str(shared), str(shared / "out")]) == 0
    comm.barrier()


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_parallelized_gpt2_goes_on_in_one_process_and_back(comm, shared: Path, optimizer: Any) -> None:
    """Adafactor keeps rows and columns of the whole parameter, which no part has."""
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(fresh(MODELS["gpt2"]), mesh)
        trained = mpidl.ZeroOptimizer(model, optimizer, stage=1, mesh=mesh, lr=1e-3)
        losses = [train_on_all(model, trained, step) for step in range(2)]
        save(shared / "tp", model, trained, mesh=mesh)
        export_safetensors(shared / "out", model, mesh=mesh)
        losses += [train_on_all(model, trained, step) for step in range(2, 4)]
    alone = comm.split_self()
    whole = fresh(MODELS["gpt2"], rank=1)
    plain = optimizer(whole.parameters(), lr=1e-3)
    load(shared / "tp", whole, plain, process_group=alone)
    export_safetensors(shared / f"out{comm.rank}", whole, process_group=alone)
    for file in (shared / "out").iterdir():  # the settings too
        assert (shared / f"out{comm.rank}" / file.name).read_bytes() == file.read_bytes()
    np.testing.assert_allclose([train_on_all(whole, plain, step) for step in range(2, 4)], losses[2:], rtol=1e-5)
    save(shared / f"alone{comm.rank}", whole, plain, process_group=alone)
    alone.close()
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(fresh(MODELS["gpt2"], rank=1), mesh)
        trained = mpidl.ZeroOptimizer(model, optimizer, stage=2 if mesh.size("dp") > 1 else 1, mesh=mesh, lr=1e-3)
        comm.barrier()
        load(shared / "alone0", model, trained, mesh=mesh)
        found = [train_on_all(model, trained, step) for step in range(4, 6)]
    expected = [train_on_all(whole, plain, step) for step in range(4, 6)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def train_on_all(model: Any, optimizer: Any, step: int) -> float:
    """A step on the global batch, the same on every rank."""
    loss = model(*sequences(step, 0))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.ranks(4, exactly=True)
def test_gradients_that_each_replica_has_for_itself_are_kept_for_each(comm, shared: Path) -> None:
    with training("ddp", (2, 2), comm) as run:
        replica = run.mesh.rank("dp")

        def accumulated(scale: float) -> dict[str, torch.Tensor]:
            with run.call.no_sync():
                (run.call() * scale).backward()
            return {name: p.grad.clone() for name, p in run.model.named_parameters()}

        expected = accumulated(1.0 + replica)
        run.save(shared, micro_step=1)
        run.optimizer.zero_grad()
        accumulated(5.0)
        run.load(shared)
        assert all(torch.equal(p.grad, expected[name]) for name, p in run.model.named_parameters())
        mean = {name: grad * 1.5 / (1.0 + replica) for name, grad in expected.items()}
    with training("ddp", (2, 1), comm.split(comm.rank // 2, comm.rank)) as half:
        half.load(shared)
        for name, p in half.model.named_parameters():
            torch.testing.assert_close(p.grad, mean[name])
