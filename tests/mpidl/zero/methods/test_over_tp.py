"""Errors of one rank of tp, which all raise: else the others would wait for it, or go on alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Communicator
from mpidl import ConfigurationError, Mesh, ModelMismatch, TrainingError
from mpidl.optim import EMA
from mpidl.zero import Safetensors
from mpidl.zero.offload.swap_file import SwapFile
from tests.mpidl.zero.cut_over_tp import backward, made, whole
from tests.mpidl.zero.cut_over_tp import mesh as mesh

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 4, exactly=True),
    pytest.mark.filterwarnings("ignore:Mesh"),
]
CALLS: dict[str, Callable[[Any, EMA], Any]] = {
    "model_state_dict": lambda optimizer, _: optimizer.model_state_dict(),
    "unwrap": lambda optimizer, _: optimizer.unwrap(),
    "averaged": lambda _, average: average.model_state_dict(),
}


@pytest.mark.parametrize("call", CALLS)
def test_weights_that_one_rank_changed(comm: Communicator, mesh: Mesh, call: str) -> None:
    model, optimizer = made(mesh)
    average = EMA(model)
    backward(model, 1)
    optimizer.step()
    average.update()
    if comm.rank == comm.size - 1:
        model[0].bias.data = torch.zeros(4)
    with pytest.raises(TrainingError, match=r"0\.bias: "):
        CALLS[call](optimizer, average)


def test_weights_that_one_rank_changes_while_averages_are_shown(comm: Communicator, mesh: Mesh) -> None:
    model, _ = made(mesh)
    average = EMA(model)
    average.update()

    def change() -> None:
        with average.averaged():
            if comm.rank == comm.size - 1:
                model[0].bias.data = torch.zeros(4)

    with pytest.raises(TrainingError, match=rf"on rank {comm.size - 1}, a change that was undone: 0\.bias: "):
        change()


def test_parameters_that_one_rank_did_not_unfreeze(comm: Communicator, mesh: Mesh) -> None:
    model, optimizer = made(mesh, frozen=0)
    if comm.rank < comm.size - 1:
        model[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"add_param_group: 0\.weight is frozen"):
        optimizer.add_param_group({"params": list(model[0].parameters())})


@pytest.mark.parametrize("when", ["at construction", "later"])
@pytest.mark.parametrize("fault", ["not there", "not readable"])
def test_files_that_one_rank_cannot_read(
    comm: Communicator, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, when: str
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file(whole().state_dict(), path)
    load = partial(made, mesh, weights=path)
    if when == "later":
        _, optimizer = made(mesh)
        load = partial(optimizer.load_safetensors, path)

    def fail(*_: Any) -> None:
        raise OSError("no such file")

    if comm.rank == comm.size - 1:
        if fault == "not there":
            path.unlink()
        else:
            monkeypatch.setattr("mpidl.zero.construction.file_values.elements", fail)
    with pytest.raises(ConfigurationError, match="no such file"):
        load()


def test_a_disk_that_is_full_for_one_rank(comm: Communicator, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(SwapFile, "_lengthen", fail)
    with pytest.raises(ConfigurationError, match="No space left"):
        made(mesh, offload="disk")


@pytest.mark.parametrize("when", ["at construction", "later"])
@pytest.mark.parametrize("who", ["one rank", "all of one rank of tp"])
def test_files_that_differ(comm: Communicator, mesh: Mesh, tmp_path: Path, who: str, when: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors, path = whole().state_dict(), tmp_path / "model.safetensors"
    if comm.rank == comm.size - 1 if who == "one rank" else mesh.rank("tp") == 1:
        del tensors["0.bias"]
    safetensors.save_file(tensors, path)
    missing = {"missing": lambda name: name == "0.bias"}
    load = partial(made, mesh, weights=Safetensors(path, **missing))
    if when == "later":
        _, optimizer = made(mesh)
        load = partial(optimizer.load_safetensors, path, **missing)
    with pytest.raises(ModelMismatch, match=r"missing names.*0\.bias"):
        load()
