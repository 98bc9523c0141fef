"""Gradients of experts are means over all losses, as one process computes them, whatever engine averages them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.mesh import place, placement
from tests.mpidl.zero.ways import STAGES, WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

ENGINES = ("ddp", "ddp copied", "ddp no_sync", "ddp hook", *STAGES)
STEPS = 3


def experts_of(number: int) -> torch.nn.Module:
    """The layers of one ep rank."""
    torch.manual_seed(number)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    for p in made.parameters():
        place(p, "ep")
    return made


def tokens(step: int, micro: int, data_rank: int, expert: int) -> torch.Tensor:
    """Those that a rank of dp x cp sends to an expert."""
    random = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * data_rank + expert)
    return torch.randn(2, 3, generator=random, dtype=torch.float64)


def train(engine: str, mesh: Mesh) -> torch.nn.Module:
    """The experts of this rank, with the tokens of all ranks of ep, in two micro-steps a step."""
    ep = mesh.rank("ep")
    senders = [mesh.layout.rank_along(rank, "dp", "cp") for rank in mesh.ranks("ep")]
    module = experts_of(ep)
    call: Any = module
    optimizer: Any
    if engine in WAYS:
        optimizer = mpidl.ZeroOptimizer(module, torch.optim.SGD, mesh=mesh, lr=0.1, momentum=0.9, **WAYS[engine])
        assert optimizer.process_group is mesh["edp"]
    else:
        call = mpidl.DistributedDataParallel(module, mesh=mesh)
        assert call.process_group is mesh["edp"]
        if "copied" in engine:
            call = copy.deepcopy(call)
            module = call.module
        if "hook" in engine:
            call.register_comm_hook(mesh["edp"], lambda group, bucket: bucket.reduce(process_group=group))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for micro in range(2):
            x = torch.cat([tokens(step, micro, sender, ep) for sender in senders])
            if micro == 0 and "no_sync" in engine:
                with call.no_sync():
                    call(x).square().sum().backward()
            else:
                call(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine in WAYS:
        optimizer.unwrap()
    return module


def train_alone(expert: int, data_ranks: int) -> torch.nn.Module:
    """Trains the experts in one process, with the mean of all ranks' losses."""
    module = experts_of(expert)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for micro in range(2):
            for data_rank in range(data_ranks):
                (module(tokens(step, micro, data_rank, expert)).square().sum() / data_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("engine", ENGINES)
def test_experts_are_trained_as_by_one_process(engine: str, comm: Communicator) -> None:
    with Mesh(ep=3 if comm.size == 3 else 2, comm=comm) as mesh:
        trained = train(engine, mesh)
        expected = train_alone(mesh.rank("ep"), comm.size)
        for mine, theirs in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2, exactly=True)
def test_an_engine_that_is_gone_divides_no_more(comm: Communicator) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        module = experts_of(0)
        ddp = mpidl.DistributedDataParallel(module, mesh=mesh)
        module[0].bias.requires_grad_(False)  # which it must not forget
        del ddp
        optimizer = mpidl.ZeroOptimizer(module, torch.optim.SGD, 2, mesh=mesh, lr=0.1)
        optimizer.unwrap()
        module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert torch.equal(module[2].bias.grad, torch.ones(2, dtype=torch.float64))


def test_a_copy_of_a_parameter_has_its_placement() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    module[1].bias = module[0].weight
    place(module[0].weight, "tp", counted=False)
    for made in (copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module)), pickle.loads(pickle.dumps(module))):
        for each in (made, copy.deepcopy(made)):
            assert placement(each[0].weight) == placement(module[0].weight)
            assert placement(each[1].weight).axes == frozenset()
            assert each[1].bias is each[0].weight
            assert isinstance(each[0].weight, torch.nn.Parameter)
            assert each[0].weight.data_ptr() != module[0].weight.data_ptr()
            assert torch.equal(each[0].weight, module[0].weight)
