"""A step of ranks of tp is of all of them or of none, and they are given the same settings."""

from __future__ import annotations

import pytest
import torch

from collectives import Communicator
from mpidl import Mesh, ModelMismatch, TrainingError
from tests.mpidl.zero.cut_over_tp import backward, made
from tests.mpidl.zero.cut_over_tp import mesh as mesh

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 4, exactly=True),
    pytest.mark.filterwarnings("ignore:Mesh"),
]
BEYOND_THE_FIRST = 11  # in which replicated gradients are not compared


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("refused", [2, BEYOND_THE_FIRST])
def test_a_step_that_one_rank_refuses_is_refused_on_all(
    comm: Communicator, mesh: Mesh, stage: int, refused: int
) -> None:
    model, optimizer = made(mesh, stage=stage)
    last = comm.size - 1
    for step in range(1, refused + 1):
        backward(model, step)
        if step == refused:
            if comm.rank == last:
                model[0].bias.grad = torch.ones(4)
            where = "" if comm.rank == last else rf" \(on rank {last}\)"
            with pytest.raises(TrainingError, match=rf"0\.bias: its \.grad was set.*{where}$"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()


def test_steps_in_backward_are_refused_on_all(comm: Communicator, mesh: Mesh) -> None:
    model, optimizer = made(mesh, stage=2, step_in_backward=True)
    backward(model, 1)
    if comm.rank == comm.size - 1:
        model[0].bias.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(TrainingError, match=r"0\.bias: its \.grad was set"):
        backward(model, 2)


@pytest.mark.parametrize("setting", ["optimizer_class", "stage", "lr"])
def test_settings_that_differ_over_tp_are_refused(mesh: Mesh, setting: str) -> None:
    values = {"optimizer_class": (torch.optim.SGD, torch.optim.AdamW), "stage": (1, 2), "lr": (0.1, 0.2)}[setting]
    with pytest.raises(ModelMismatch, match=rf"ZeroOptimizer: rank 0 has {setting}=.*, rank 1 has {setting}="):
        made(mesh, **{setting: values[mesh.rank("tp")]})


def test_a_step_with_settings_that_differ_over_tp_is_refused(mesh: Mesh) -> None:
    model, optimizer = made(mesh)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + mesh.rank("tp"))
    backward(model, 1)
    with pytest.raises(ModelMismatch, match=r"step: rank 0 has group 0's lr=0\.1, rank 1 has group 0's lr=0\.2"):
        optimizer.step()
