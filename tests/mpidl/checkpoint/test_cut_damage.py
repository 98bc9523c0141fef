"""Damage and cuts that do not fit, in checkpoints of a model that is cut over tp: refused on every rank."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch

from mpidl import CheckpointError, CheckpointMismatch, ConfigurationError
from mpidl.checkpoint import (
    export_safetensors,
    index,
    load,
    save,
    verify,
)
from mpidl.checkpoint.tensorfile import TensorFile
from mpidl.mesh import Cut, place
from tests.mpidl.checkpoint.cut_model import Model, cut_over, training, whole_state
from tests.mpidl.checkpoint.mutations import as_text, mutated

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


@pytest.mark.ranks(2, 3)
def test_what_does_not_fit_is_refused_on_every_rank(comm, shared: Path) -> None:
    with training("stage 2", (comm.size, 1), comm) as run:
        run.step()
        run.save(shared)
        before = [o.values.clone() for o in run.optimizer.owned_state().slices()]
        other = Model()
        other.table = torch.nn.Parameter(torch.zeros(256, 300))
        with pytest.raises(
            CheckpointMismatch, match=r"of another shape: table \(has \(257, 300\), needs \(256, 300\)\)"
        ):
            load(shared, other, mesh=run.mesh)
        wide = cut_over(run.mesh)
        cut = Cut.along((comm.size * 2, 5), 0, [(2 * comm.rank, 2 * comm.rank + 2)])
        wide.kv = torch.nn.Parameter(torch.zeros(2, 5))
        place(wide.kv, "tp", cut=cut)
        with pytest.raises(CheckpointMismatch, match=r"of another shape: kv"):
            load(shared, wide, mesh=run.mesh)
        for wrong, said in [
            (Cut.along((9, 5), 0, [(0, 2)]), r"cut: kv has cuts of 10 of its 45 elements, on all ranks of tp together"),
            (Cut((2, 5), (((0, 1), (0, 1)), ((0, 5),))), "cut: kv has runs of dimension 0 that overlap"),
            (Cut.along((2, 5), 0, [(1, 3)]), "cut: kv has runs outside the 2 indices of dimension 0"),
            (Cut.along((2 + comm.rank, 5), 0, [(0, 2)]), r"kv has the whole shape \(2, 5\) on one rank and \(3, 5\)"),
        ]:
            place(wide.kv, "tp", cut=wrong)
            with pytest.raises(ConfigurationError, match=said):
                save(shared / "wrong", wide, mesh=run.mesh)
        assert all(map(torch.equal, before, (o.values for o in run.optimizer.owned_state().slices())))
        run.load(shared)
    with pytest.raises(ConfigurationError, match=r"heads has cuts of .* on this rank alone; needs mesh="):
        save(shared / "wrong", wide, process_group=comm)


@pytest.mark.ranks(2, 3)
def test_copies_that_differ_are_refused(comm, shared: Path) -> None:
    with training("stage 1" if comm.size % 2 else "ddp", (comm.size, 1), comm) as run:
        with torch.no_grad():
            run.model.norm += comm.rank == 1
        if comm.size % 2 == 0:
            with pytest.raises(CheckpointError, match=r"replicas differ.*: model/norm on rank"):
                run.save(shared)
            with pytest.raises(CheckpointError, match=r"replicas differ.*: norm on rank"):
                export_safetensors(shared / "out", run.call, mesh=run.mesh)


@pytest.mark.ranks(2, exactly=True)
def test_damage_and_pieces_that_do_not_fit_are_refused_on_every_rank(comm, shared: Path) -> None:
    with training("stage 3", (2, 1), comm) as run:
        run.step()
        run.save(shared)
        path = shared / "step-00000001"
        text = (path / index.NAME).read_text()
        for change, said in [
            (lambda e: e["cuts"][0][0].__setitem__(0, [0, 128]), "has cuts of 76800 of its 77100 elements"),
            (lambda e: e["cuts"][1][0].__setitem__(0, [0, 128]), "has cuts that overlap"),
            (lambda e: e["cuts"].pop(), "has cuts of"),
            (lambda e: e["slices"].pop(0), "has slices that do not fit together"),
            (lambda e: e["slices"][0].update(cut=1), "has slices that do not fit together"),
            (lambda e: e["slices"][0].pop("cut"), "has slices that do not fit together"),
            (lambda e: e.pop("cuts"), "has slices that do not fit together"),
            (lambda e: e["cuts"][0].append([[0, 1]]), "has a cut that has runs of 3 dimensions"),
            (lambda e: e["cuts"][0].__setitem__(0, [[0, "x"]]), "needs where a run of indices begins and ends"),
        ]:
            content = json.loads(text)
            change(content["tensors"]["model/table"])
            comm.barrier()
            if comm.rank == 0:
                (path / index.NAME).write_text(as_text(content, index.content_checksum))
            comm.barrier()
            with pytest.raises(CheckpointError, match=said):
                run.load(path)
        comm.barrier()
        if comm.rank == 0:
            (path / index.NAME).write_text(text)
            piece = json.loads(text)["tensors"]["model/fused"]["slices"][0]
            with TensorFile(path / piece["file"]) as file:
                begin = file.spans[piece["key"]].begin
            with (path / piece["file"]).open("r+b") as opened:
                opened.seek(begin)
                opened.write(b"\xff\x00\xff")
        comm.barrier()
        with pytest.raises(CheckpointError, match=r"is damaged: bytes .* of model/fused"):
            run.load(path)
        with pytest.raises(CheckpointError, match=r"is damaged: bytes .* of model/fused"):
            verify(path)
        run.comm.barrier()


@pytest.mark.ranks(2, exactly=True)
def test_any_mutation_of_cuts_is_refused_on_every_rank_or_loads_what_was_saved(comm, shared: Path) -> None:
    truth = whole_state(1)
    with training("stage 2", (2, 1), comm) as run:
        run.step()
        run.save(shared)
        file = shared / "step-00000001" / index.NAME
        sound = json.loads(file.read_text())
        rng = random.Random(5)
        refused = 0
        for _ in range(60):
            content = copy.deepcopy(sound)
            names = [name for name, entry in sound["tensors"].items() if "cuts" in entry]
            cut = {name: content["tensors"][name] for name in names}
            changed, what = mutated(cut, rng)
            content["tensors"] |= changed
            comm.barrier()
            if comm.rank == 0:
                file.write_text(as_text(content, index.content_checksum))
            comm.barrier()
            try:
                run.load(file.parent)
            except CheckpointError:
                refused += 1
            assert not [*run.differing(truth)], what
        assert refused > 40
