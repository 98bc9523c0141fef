"""Engines take their group from a mesh; the world is no default while ranks hold different parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.optim import PeriodicAverager
from mpidl.optim.post_local import PostLocalSGDState

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

MODEL_SIZES = [{"tp": 2}, {"dp": 1, "pp": -1}, {"ep": 2}]


@pytest.fixture
def mesh(comm: Communicator) -> Iterator[Mesh]:
    """cp=2 where the ranks are even in number."""
    with Mesh(cp=2 - comm.size % 2, comm=comm) as made:
        yield made


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "DistributedDataParallel": lambda: mpidl.DistributedDataParallel(linear()),
    "ZeroOptimizer": lambda: mpidl.ZeroOptimizer(linear(), torch.optim.SGD, stage=1, lr=0.1),
    "SyncBatchNorm": lambda: mpidl.SyncBatchNorm(3)(torch.ones(2, 3)),
    "DistributedSampler": lambda: mpidl.data.DistributedSampler(range(8)),
    "global_mean": lambda: mpidl.global_mean(torch.ones(()), 1),
    "PeriodicAverager": lambda: PeriodicAverager(linear().parameters()),
    "PostLocalSGDState": lambda: PostLocalSGDState(None, 1),
    "check_replicas": lambda: mpidl.check_replicas(linear()),
    "clip_grad_norm_": lambda: mpidl.clip_grad_norm_(linear(), 1.0),
    "checkpoint": lambda: mpidl.checkpoint.save("never", linear()),
}


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("sizes", MODEL_SIZES, ids=str)
def test_the_world_is_no_default_while_ranks_hold_different_parameters(
    sizes: dict[str, int], comm: Communicator
) -> None:
    mesh = Mesh(**sizes, comm=comm)
    for name, make in DEFAULTS.items():
        with pytest.raises(
            ConfigurationError, match=f"{name}: by default all ranks .* a mesh with .*; needs "
        ) as caught:
            make()
        assert "\n" not in str(caught.value)
    mesh.close()
    mpidl.global_mean(torch.ones(()), 1)  # the world again
    with pytest.raises(ZeroDivisionError), Mesh(**sizes, comm=comm):
        raise ZeroDivisionError
    mpidl.global_mean(torch.ones(()), 1)


@pytest.mark.ranks(2, exactly=True)
def test_a_mesh_that_holds_the_same_parameters_everywhere_leaves_the_world(comm: Communicator) -> None:
    with Mesh(cp=2, comm=comm):
        mpidl.global_mean(torch.ones(()), 1)


def test_data_parallel_parts_take_dp_and_cp(mesh: Mesh) -> None:
    data = mesh.along("dp", "cp")
    assert mpidl.DistributedDataParallel(linear(), mesh=mesh).process_group is data
    assert mpidl.ZeroOptimizer(linear(), torch.optim.SGD, stage=2, mesh=mesh, lr=0.1).process_group is data
    assert mpidl.SyncBatchNorm(3, mesh=mesh).process_group is data
    converted = mpidl.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), mesh=mesh)
    assert converted.process_group is data
    assert mpidl.global_mean(torch.ones(()), 2, mesh=mesh).item() == 0.5


@pytest.mark.ranks(2, exactly=True)
def test_decisions_are_those_of_all_ranks(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        assert mpidl.GradScaler(mesh=mesh).process_group is comm
        model = mpidl.DistributedDataParallel(linear(), mesh=mesh)
        with pytest.raises(ConfigurationError, match=r"NonfiniteGuard: \d of the \d ranks .*tp=2.*needs mesh="):
            mpidl.NonfiniteGuard(model)
        guard = mpidl.NonfiniteGuard(model, on_nan="skip", mesh=mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not guard.allows(float("nan") if comm.rank == 1 else 1.0)


@pytest.mark.ranks(2, 4, exactly=True)
def test_samples_are_cut_over_dp_alone(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        seen = list(mpidl.data.DistributedSampler(range(8), mesh=mesh, shuffle=False))
        assert seen == list(range(8))[mesh.rank("dp") :: mesh.size("dp")]
        loader = mpidl.data.DataLoader(list(range(8)), batch_size=4, shuffle=True, mesh=mesh)
        batches = torch.cat(list(loader)).numpy()
        of_tp = np.empty((2, batches.size), batches.dtype)
        mesh["tp"].all_gather(of_tp, batches)
        assert (of_tp[0] == of_tp[1]).all()
        loader.close()


@pytest.mark.ranks(2, 4, exactly=True)
def test_ranks_of_cp_take_different_samples_by_no_default(comm: Communicator) -> None:
    """Ranks of cp hold parts of the same sequences."""
    with Mesh(cp=2, comm=comm) as mesh:
        for make in (mpidl.data.DistributedSampler, mpidl.data.DataLoader):
            with pytest.raises(
                ConfigurationError, match=r"a mesh with cp=2 is open, .*; needs mesh= or process_group="
            ):
                make(range(8))
        assert mpidl.data.DistributedSampler(range(8), mesh=mesh).rank == mesh.rank("dp")
    assert mpidl.data.DistributedSampler(range(8)).num_replicas == comm.size


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("engine", ["ddp", "zero"])
def test_one_part_of_a_model_is_not_saved_as_a_checkpoint(engine: str, comm: Communicator, tmp_path: Path) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        model, optimizer = linear(), None
        if engine == "ddp":
            model = mpidl.DistributedDataParallel(model, mesh=mesh)
        else:
            optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=1, mesh=mesh, lr=0.1)
        for call in (mpidl.checkpoint.save, mpidl.checkpoint.load):
            with pytest.raises(ConfigurationError, match=r"checkpoint: \d of the \d ranks of a mesh with tp=2"):
                call(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2, exactly=True)
def test_what_cannot_be_trained_over_dp_and_cp_is_refused(comm: Communicator) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        model = linear()
        mpidl.mesh.place(model.weight, "ep")
        with pytest.raises(ConfigurationError, match="weight is placed on ep, so its gradient is"):
            mpidl.DistributedDataParallel(model, mesh=mesh)
        with pytest.raises(ConfigurationError, match="weight is placed on ep"):
            mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=1, mesh=mesh, lr=0.1)
    with Mesh(tp=2, comm=comm) as mesh:
        model = linear()
        mpidl.mesh.place(model.weight, "tp")
        with pytest.raises(ConfigurationError, match="needs whole parameters, and weight is cut over tp"):
            mpidl.ZeroOptimizer(model, torch.optim.Adafactor, stage=1, mesh=mesh, lr=0.1)
        with pytest.raises(ConfigurationError, match=r"offload: LAMB .* weight is cut over tp"):
            mpidl.ZeroOptimizer(model, mpidl.optim.LAMB, stage=1, mesh=mesh, lr=0.1, offload="cpu")
        with pytest.raises(ConfigurationError, match=r"LAMB: got parameters that are cut over tp.* needs mesh="):
            mpidl.optim.LAMB(model.parameters())


def test_mesh_and_process_group_are_two_answers(mesh: Mesh) -> None:
    for make in (
        lambda **given: mpidl.DistributedDataParallel(linear(), **given),
        lambda **given: mpidl.GradScaler(**given),
        lambda **given: mpidl.SyncBatchNorm(3, **given),
        lambda **given: mpidl.data.DistributedSampler(range(3), **given),
    ):
        with pytest.raises(ConfigurationError, match=r"got mesh= and process_group=; needs one of them"):
            make(mesh=mesh, process_group=mesh.comm)
        with pytest.raises(ConfigurationError, match=r"mesh: got str; needs a mpidl.Mesh"):
            make(mesh="tp")
    with pytest.raises(ConfigurationError, match="place: got axis 'dp'; needs any of pp, tp, ep"):
        mpidl.mesh.place(torch.ones(1), "dp")


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_zero_needs_the_mesh_of_parts(axis: str, comm: Communicator) -> None:
    with Mesh(**{axis: 2}, comm=comm) as mesh:
        model = linear()
        over = {"process_group": mesh["edp" if axis == "ep" else "dp"]}
        mpidl.ZeroOptimizer(linear(), torch.optim.SGD, 1, lr=0.1, **over)  # a stage that declares nothing
        mpidl.mesh.place(model.weight, axis)
        with pytest.raises(ConfigurationError, match=f"ZeroOptimizer: weight is placed on {axis}.*; needs mesh=$"):
            mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, lr=0.1, **over)
        model.weight.requires_grad_(False)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, lr=0.1, **over)
        model.weight.requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"needs mesh=$"):
            optimizer.add_param_group({"params": [model.weight]})
        with pytest.raises(ConfigurationError, match=r"ZeroOptimizer: by default .*; needs mesh=$"):
            mpidl.ZeroOptimizer(linear(), torch.optim.SGD, 1, lr=0.1)


@pytest.mark.ranks(2, exactly=True)
def test_a_mesh_without_tp_is_refused_for_parts(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as cut_over, Mesh(comm=comm) as mesh:
        layer = mpidl.tensor.ColumnParallelLinear(4, 6, mesh=cut_over)
        layer(torch.ones(1, 4)).sum().backward()
        refused = pytest.raises(
            ConfigurationError, match=r"mesh: has tp=1, and .* of shape \(3, 4\) is a part .*\(6, 4\)"
        )
        with refused:
            mpidl.clip_grad_norm_(layer, 1.0, mesh=mesh)
        with refused:
            mpidl.DistributedDataParallel(layer, mesh=mesh)
        with refused:
            mpidl.ZeroOptimizer(layer, torch.optim.SGD, 1, mesh=mesh, lr=0.1)
        whole = mpidl.tensor.ColumnParallelLinear(4, 6, mesh=mesh)  # placed on tp, whose one rank has all of it
        whole(torch.ones(1, 4)).sum().backward()
        mpidl.clip_grad_norm_(whole, 1.0, mesh=mesh)
        mpidl.ZeroOptimizer(whole, torch.optim.SGD, 1, process_group=comm, lr=0.1)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("engine", ["ddp", "zero"])
@pytest.mark.parametrize("axis", ["pp", "ep", "tp"])
def test_scalers_of_one_part_are_refused(axis: str, engine: str, comm: Communicator) -> None:
    with Mesh(**{axis: 2}, comm=comm) as mesh:
        if axis != "ep":
            with pytest.raises(ConfigurationError, match=r"GradScaler: 1 of the 2 ranks .*; needs mesh="):
                mpidl.GradScaler(process_group=mesh["dp"])
            mpidl.GradScaler(process_group=mesh["dp"], enabled=False)
        model, optimizer, call = linear(), None, None
        for p in model.parameters():
            mpidl.mesh.place(p, axis)
        if engine == "ddp":
            call = mpidl.DistributedDataParallel(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, mesh=mesh, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((call or model)(torch.ones(1, 3)).sum()).backward()
        if (axis, engine) == ("tp", "zero"):  # its gradients answer for the ranks of tp
            scaler.step(optimizer)
            return
        with pytest.raises(
            ConfigurationError, match=rf"torch's .* rank of {axis} .*needs mpidl.GradScaler\(mesh=mesh\)"
        ):
            scaler.step(optimizer)
