"""Wrong arguments and models of DistributedDataParallel, and what programs for torch set and ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb: got 0; needs a size above 0, in MiB"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb: got '25'"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb: got nan"),
        ({"find_unused_parameters": "yes"}, "find_unused_parameters: got 'yes'; needs True or False"),
        ({"static_graph": None}, "static_graph: got None"),
        ({"broadcast_buffers": 2}, "broadcast_buffers: got 2"),
        ({"forward_sync_buffers": 2}, "forward_sync_buffers: got 2"),
        ({"gradient_as_bucket_view": []}, "gradient_as_bucket_view: got"),
        ({"process_group": 3}, "process_group: got int; needs a collectives.Communicator"),
        ({"parameters_to_ignore": ["weight", "w"]}, "the module has no w"),
        ({"parameters_to_ignore": "weight"}, "got 'weight'; needs a list of names"),
        ({"parameters_to_ignore": ["weight", "bias"]}, "no parameter that requires a gradient"),
        ({"device_ids": [0]}, r"device_ids: got \[0\].*lies on cpu"),
        ({"dim": 1}, "dim: got 1"),
        ({"parameters_to_ignore": None}, "parameters_to_ignore: got None; needs a list"),
        ({"device_ids": 0}, "device_ids: got 0"),
        ({"device_ids": "somewhere"}, "device_ids: got 'somewhere'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(comm, settings: dict, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        mpidl.DistributedDataParallel(nn.Linear(1, 1), **{"process_group": comm, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.ReLU(), "no parameter that requires a gradient"),
        (lambda: "model", "module: got str; needs a torch.nn.Module"),
        (lambda: nn.LazyLinear(3), "weight has no shape yet; run a forward pass"),
        (lambda: mpidl.DistributedDataParallel(nn.Linear(1, 1)), "wrapped already"),
    ],
    ids=["nothing-to-train", "no-module", "lazy", "wrapped"],
)
def test_what_cannot_be_wrapped_is_refused(comm, make, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message) as caught:
        mpidl.DistributedDataParallel(make(), process_group=comm)
    assert isinstance(caught.value, RuntimeError) == ("no parameter" in message)  # as torch has it


def test_what_programs_for_torch_ask_of_a_wrapper(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped: Any = mpidl.DistributedDataParallel(model, process_group=comm)
    assert (wrapped.device, wrapped.device_type) == (torch.device("cpu"), "cpu")
    assert (wrapped.device_ids, wrapped.output_device) == (None, None)
    assert wrapped.require_backward_grad_sync
    assert wrapped.will_sync_module_buffers()
    own: Any = mpidl.DistributedDataParallel(model, process_group=comm, broadcast_buffers=False)
    assert not own.will_sync_module_buffers()
    assert not mpidl.DistributedDataParallel(nn.Linear(1, 1), process_group=comm).will_sync_module_buffers()
    at: Any = mpidl.DistributedDataParallel(model, device_ids=["cpu"], process_group=comm)
    assert (at.device_ids, at.output_device) == ([torch.device("cpu")], torch.device("cpu"))
    assert at(torch.ones(3, 2)).shape == (3, 2)


def test_parameters_to_ignore_can_be_set_before(comm) -> None:
    model = nn.Linear(2, 2)
    names = ["bias"]
    mpidl.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    assert wrapped.parameters_to_ignore == {"bias"}


def half_frozen(yes: bool) -> nn.Module:
    model = nn.Linear(3, 1)
    model.weight.requires_grad_(not yes)
    return model


def tied(yes: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if yes:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda last: nn.Linear(3, 2 if last else 1), r"rank 0 has parameter weight: \(1, 3\).*\(2, 3\)"),
        (lambda last: nn.Linear(3, 1).to(torch.float64 if last else torch.float32), r"weight.*float32.*float64"),
        (lambda last: nn.Linear(3, 1, bias=not last), r"rank 0 has parameter bias.*rank \d has nothing more"),
        (lambda last: nn.Linear(3, 1).requires_grad_(not last), r"no parameter that requires a gradient"),
        (half_frozen, r"weight: .*float32, rank \d has parameter weight: .*frozen"),
        (tied, r"rank 0 has parameter 1.weight: .*, rank \d has .*the same as 0.weight"),
        (
            lambda last: nn.Sequential(nn.ReLU(), nn.Linear(3, 1)) if last else nn.Sequential(nn.Linear(3, 1)),
            "0.weight",
        ),
        (
            lambda last: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last if last else torch.contiguous_format),
            r"weight: \(2, 2, 3, 3\) torch.float32, .*strides",
        ),
    ],
    ids=["shape", "dtype", "count", "trains", "frozen", "tied", "names", "order"],
)
def test_ranks_with_different_models_are_told_which_parameter(comm, make, message: str) -> None:
    if comm.size == 1:
        return
    with pytest.raises(mpidl.MpidlError, match=message):
        mpidl.DistributedDataParallel(make(comm.rank == comm.size - 1), process_group=comm)


def test_ranks_with_different_settings_are_told_which(comm) -> None:
    if comm.size == 1:
        return
    with pytest.raises(mpidl.ModelMismatch, match=r"init_sync=\(True, True\), rank 1 has init_sync=\(False, True\)"):
        mpidl.DistributedDataParallel(nn.Linear(1, 1), process_group=comm, init_sync=comm.rank != 1)
    with pytest.raises(mpidl.ModelMismatch, match=rf"rank 0 .*bucket_cap_mb=2.0, rank {comm.size - 1} .*=1.0"):
        mpidl.DistributedDataParallel(
            nn.Linear(1, 1), process_group=comm, bucket_cap_mb=1 if comm.rank == comm.size - 1 else 2
        )
