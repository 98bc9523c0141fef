"""Replicas that differ are named, with the ranks; those that are the same pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpidl
from mpidl.replicas.checksums import checksum
from tests.mpidl.small_models import Mixture
from tests.mpidl.zero.ways import ENGINES, WAYS


def trained(comm, engine: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: torch.nn.Module = Mixture()
    if engine == "ddp":
        model = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, process_group=comm, **WAYS[engine])
    for step in range(2):
        x = torch.arange(12).reshape(2, 6).add(comm.rank + step) % 37
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES)
def test_what_training_leaves_is_the_same_everywhere(comm, engine: str) -> None:
    model, optimizer = trained(comm, engine)
    mpidl.check_replicas(model, optimizer, buffers=True)
    mpidl.check_replicas(model, optimizer, gather=True)


def differs(comm, message: str, *what, **how) -> None:
    """The error comes on every rank; a world of one has nothing to differ from."""
    if comm.size == 1:
        mpidl.check_replicas(*what, process_group=comm, **how)
        return
    with pytest.raises(mpidl.ModelMismatch) as raised:
        mpidl.check_replicas(*what, process_group=comm, **how)
    rest = [rank for rank in range(comm.size) if rank != comm.size - 1]
    ranks = f"rank{'s' * (len(rest) > 1)} {', '.join(map(str, rest))}"
    assert str(raised.value) == f"the ranks' replicas differ: {message} on rank {comm.size - 1} from {ranks}"


@pytest.mark.mpi
@pytest.mark.parametrize("place", [0, 3, -1])
def test_one_bit_of_one_parameter_is_found(comm, place: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1000), torch.nn.Linear(1000, 30))
    if comm.rank == comm.size - 1:
        bits = model[2].weight.data.view(-1).view(torch.int32)
        bits[place] ^= 1
    differs(comm, "parameter 2.weight", model)


@pytest.mark.mpi
def test_a_state_of_the_optimizer_is_found_by_its_parameter_s_name(comm) -> None:
    model, optimizer = trained(comm, "ddp")
    if comm.rank == comm.size - 1:
        optimizer.state[model.module.scale]["exp_avg"] += 1
    differs(comm, "state exp_avg of scale", model, optimizer)


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["ddp", "stage 3"])
def test_a_learning_rate_that_differs_is_found(comm, engine: str) -> None:
    _, optimizer = trained(comm, engine)
    optimizer.param_groups[0]["lr"] = 0.2 if comm.rank == comm.size - 1 else 0.1
    differs(comm, "group 0's lr", optimizer)


@pytest.mark.mpi
def test_buffers_only_where_they_are_asked_for(comm) -> None:
    model, _ = trained(comm, "ddp")
    model.module.calls += comm.rank == comm.size - 1
    mpidl.check_replicas(model)
    differs(comm, "buffer calls", model, buffers=True)


@pytest.mark.mpi
@pytest.mark.parametrize("make", [float, np.float32, torch.tensor, lambda value: np.array([0.0, value])])
def test_shared_results_and_how_many_more_differ(comm, make) -> None:
    value = float(comm.rank == comm.size - 1)
    differs(comm, "the loss", {"the step": 3, "the loss": make(value)})
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match="; so do 2 more"):
            mpidl.check_replicas({"a": value, "b": value, "c": value}, process_group=comm)


@pytest.mark.mpi
def test_one_element_deep_in_a_nest_is_found(comm) -> None:
    def nest(last: bool) -> dict[str, object]:
        x = torch.zeros(5000)
        x[2500] = last
        return {"a": {"b": [3, x]}}

    differs(comm, "a.b[1]", nest(comm.rank == comm.size - 1))
    differs(comm, "a.b", {"a": {"b": [1] if comm.rank == comm.size - 1 else (1,)}})
    optimizer = torch.optim.LBFGS(torch.nn.Linear(2000, 2).parameters())
    x = torch.zeros(4002)
    x[1000] = comm.rank == comm.size - 1
    optimizer.state[optimizer.param_groups[0]["params"][0]]["old_dirs"] = [x]
    differs(comm, "state old_dirs of parameter 0[0]", optimizer)


@pytest.mark.mpi
def test_sets_and_strings_and_sparse_tensors(comm) -> None:
    names = [f"name {number}" for number in range(50)]
    equal = {"set": set(names if comm.rank else reversed(names)), "text": np.array(names), "sparse": torch.eye(9)}
    equal["sparse"] = equal["sparse"].to_sparse()
    mpidl.check_replicas(equal, process_group=comm)
    differs(comm, "sparse", {"sparse": (torch.eye(9) * (1 + (comm.rank == comm.size - 1))).to_sparse()})


@pytest.mark.mpi
def test_what_only_some_ranks_have_differs(comm) -> None:
    differs(comm, "extra", {"a": 1} | ({"extra": 2} if comm.rank == comm.size - 1 else {}))


@pytest.mark.mpi
def test_wrong_arguments(comm) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="argument 1 is a list; needs a module"):
        mpidl.check_replicas([], process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="nothing to compare"):
        mpidl.check_replicas(process_group=comm)
    model, _ = trained(comm, "stage 1")
    with pytest.raises(mpidl.ConfigurationError, match="pass it to check_replicas too"):
        mpidl.check_replicas(model, process_group=comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 1024 * 8, 100_003])
def test_a_checksum_tells_bits_places_shapes_and_types(dtype: torch.dtype, size: int) -> None:
    x = (torch.arange(size) % 5 > 2).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x.reshape(1, -1))
    assert size == 0 or checksum(x.view(-1)[1:]) != checksum(x)
    if size > 6:
        other = x.clone()
        other[[2, 3]] = x[[3, 2]]
        assert checksum(other) != checksum(x)
        assert checksum(x[:-2].clone()[1:]) == checksum(x[1:-2])  # wherever it lies
    assert checksum(torch.ones(4, 6).T) == checksum(torch.ones(6, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("nbytes", [8 << 10, 64 << 10, 128 << 10])
def test_a_checksum_tells_the_order_of_rows(dtype: torch.dtype, nbytes: int) -> None:
    """Also of rows that differ in their signs alone, which are the highest bits of what is computed with."""
    columns = nbytes // dtype.itemsize
    random = torch.randn(4, columns).mul(100).to(dtype)
    signs = torch.tensor([1, -1, -1, 1]).to(dtype).view(4, 1).expand(4, columns)
    small = torch.arange(4).to(dtype).view(4, 1).expand(4, columns)
    for rows in (random, signs, small):
        orders = ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3], [0, 3, 2, 1], [2, 3, 0, 1], [0, 1, 3, 2], [3, 1, 2, 0])
        different = {tuple(rows[order][:, 0].tolist()): checksum(rows[order]) for order in orders}
        assert len(set(different.values())) == len(different) > 1


@pytest.mark.parametrize("distance", [2, 1024, 1 << 13, (1 << 13) - 1, (1 << 13) + 1, 3 << 13])
def test_a_checksum_tells_differences_that_make_up_for_each_other(distance: int) -> None:
    """distance: in words of 8 bytes."""
    x = 7 * torch.arange(5 << 13)
    sums = {checksum(x)}
    for first in (0, 1024, 1 << 13):
        for change in (1, -(1 << 63), 1 << 62):
            other = x.clone()
            other[first] += change
            other[first + distance] -= change
            sums.add(checksum(other))
        other = x.clone()
        other[[first, first + distance]] = x[[first + distance, first]]
        sums.add(checksum(other))
        block = x.clone()
        length = min(distance, 1024)
        one, two = slice(first, first + length), slice(first + distance, first + distance + length)
        block[one], block[two] = x[two], x[one]
        sums.add(checksum(block))
    assert len(sums) == 1 + 3 * 5


def test_a_checksum_does_not_go_by_where_a_tensor_lies() -> None:
    x = torch.arange(100_003, dtype=torch.float32)
    assert checksum(x[1:]) == checksum(x[1:].clone())
