"""Saves that are refused: wrong arguments, and ranks whose replicas differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from mpidl.checkpoint import claim, export_safetensors, import_safetensors, load, save
from tests.mpidl.checkpoint.folders import names
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import fresh

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("engine", ["plain", "ddp"])
@pytest.mark.parametrize("what", ["model/transformer.wte.weight", "optimizer/exp_avg/transformer.wte.weight"])
def test_replicas_that_differ_are_refused_by_name(comm, shared: Path, engine: str, what: str) -> None:
    run = Run(engine, comm)
    run.steps(0, 1)
    weight = run.model.transformer["wte"].weight
    changed = weight.data if what.startswith("model") else run.optimizer.state[weight]["exp_avg"]
    if comm.rank == comm.size - 1:
        changed[-1, -1] += 1e-3
    last, rest = comm.size - 1, ", ".join(map(str, range(comm.size - 1)))
    said = f"the ranks' replicas differ, of which each writes a part: {what} on rank {last} from rank"
    with pytest.raises(mpidl.CheckpointError) as raised:
        run.save(shared, 1)
    assert str(raised.value) == f"step-00000001 was not saved: {said}{'s' * (last > 1)} {rest}"
    assert names(shared) == []
    if what.startswith("model"):
        with pytest.raises(mpidl.CheckpointError, match="was not exported: the ranks' replicas differ"):
            export_safetensors(shared / "out", run.call, process_group=comm)
    assert names(shared) == []
    comm.barrier()
    run.save(shared, 1, compare=False)
    assert names(shared) == ["latest", "step-00000001"]


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_that_differ_are_rank_0_s_or_each_rank_s_own(comm, shared: Path, broadcast: bool) -> None:
    model = fresh(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    replica = mpidl.DistributedDataParallel(model, process_group=comm, broadcast_buffers=broadcast)
    replica(torch.arange(6.0).view(2, 3)).sum().backward()
    model[1].running_mean += comm.rank  # as by a pass without gradients over samples of its own
    mean = model[1].running_mean.clone()
    means = mpidl.all_gather_object(comm, mean)
    save(shared, replica)
    model[1].running_mean.zero_()
    load(shared, replica)
    assert torch.equal(model[1].running_mean, means[0] if broadcast else mean)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": -1}, "step: got -1"),
        ({"step": 1.5}, "step: got 1.5"),
        ({"keep_last": 0}, "keep_last: got 0"),
        ({"keep_last": True}, "keep_last: got True"),
        ({"micro_step": True}, "micro_step: got True"),
        ({"scheduler": 3}, "scheduler: got a int"),
        ({"optimizer": "Adam"}, "optimizer: got str"),
        ({"step": np.float64(1)}, "step: got "),
        ({"file_bytes": 0}, "file_bytes: got 0"),
    ],
)
def test_wrong_arguments_are_refused(comm, shared: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=said):
        save(shared, torch.nn.Linear(3, 2), process_group=comm, **settings)
    assert names(shared) == []


def test_integers_of_numpy_are_integers(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    count = np.int64(1)
    for step in np.arange(4, 6):
        save(shared, model, step=step, micro_step=np.int64(0), keep_last=count, file_bytes=count, process_group=comm)
    assert names(shared) == ["latest", "step-00000005"]
    assert load(shared / "latest", model, process_group=comm).step == 5


def test_paths_that_are_none_are_refused(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for call in (save, load, export_safetensors, import_safetensors):
        with pytest.raises(mpidl.ConfigurationError, match="path: got NoneType; needs a directory's path"):
            call(None, model, process_group=comm)  # type: ignore[operator]
    with pytest.raises(mpidl.ConfigurationError, match="path: got int; needs a directory's path"):
        claim(3, comm)  # type: ignore[arg-type]
    if comm.rank == 0:
        (shared / "notes").write_text("mine")
    comm.barrier()
    for refused in (save, export_safetensors):
        with pytest.raises(mpidl.CheckpointError, match=r"notes: is a file; needs a directory"):
            refused(shared / "notes", model, process_group=comm)  # type: ignore[operator]
    with pytest.raises(mpidl.CheckpointError, match=r"notes: is a file; needs the directory of a checkpoint"):
        load(shared / "notes", model, process_group=comm)
    assert names(shared) == ["notes"]


def test_models_and_optimizers_that_do_not_belong_together_are_refused(comm, shared: Path) -> None:
    run, other = Run("stage 2", comm), Run("stage 2", comm)
    with pytest.raises(mpidl.ConfigurationError, match="is not the one that trains this model"):
        save(shared, run.model, other.optimizer)
    with pytest.raises(mpidl.ConfigurationError, match="in group 0 is no parameter of the model"):
        save(shared, torch.nn.Linear(3, 2), torch.optim.SGD(torch.nn.Linear(3, 2).parameters()), process_group=comm)
    with pytest.raises(mpidl.ModelMismatch, match="step=0, rank 1 has step=1") if comm.size > 1 else _nothing():
        save(shared, run.model, run.optimizer, step=comm.rank)
    with pytest.raises(mpidl.ModelMismatch, match="scheduler='LambdaLR'") if comm.size > 1 else _nothing():
        save(shared, run.model, run.optimizer, None if comm.rank else run.schedule)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...
