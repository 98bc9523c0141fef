"""Gradients of experts are means over all losses, as one process computes them, whatever engine averages them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, TrainingError
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


class Mixed(torch.nn.Module):
    """A layer of all ranks, and one of this rank of ep."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(3, 3).double()
        self.expert = experts_of(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x))


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_engines_have_experts_alone_or_none_frozen_ones_too(engine: str, comm: Communicator) -> None:
    def make(model: torch.nn.Module, **given: Any) -> Any:
        if engine == "ddp":
            return mpidl.DistributedDataParallel(model, mesh=mesh, **given)
        return mpidl.ZeroOptimizer(model, torch.optim.SGD, 2, mesh=mesh, lr=0.1)

    with Mesh(ep=2, comm=comm) as mesh:
        mixed = Mixed(mesh.rank("ep"))
        mixed.expert.requires_grad_(False)
        before = copy.deepcopy(mixed.expert.state_dict())
        with pytest.raises(ConfigurationError, match="placed on ep, so each rank of ep has another one"):
            make(mixed)
        if engine == "ddp":
            make(mixed, parameters_to_ignore=[f"expert.{name}" for name, _ in mixed.expert.named_parameters()])
        assert all(torch.equal(value, before[name]) for name, value in mixed.expert.state_dict().items())
        mixed.expert.requires_grad_(True)
        mixed.dense.requires_grad_(False)
        made = make(mixed)
        mixed.dense.requires_grad_(True)
        if engine == "ddp":
            with pytest.raises(TrainingError, match=r"dense.weight is not placed on ep"):
                made(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        else:
            with pytest.raises(ConfigurationError, match=r"dense.weight is not placed on ep"):
                made.add_param_group({"params": list(mixed.dense.parameters())})


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize(
    "make",
    [
        lambda model, mesh: mpidl.DistributedDataParallel(model, mesh=mesh),
        lambda model, mesh: mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, mesh=mesh, lr=0.1),
    ],
    ids=["ddp", "zero"],
)
def test_experts_on_some_ranks_alone_are_an_error_on_all(make: Any, comm: Communicator) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        model = experts_of(0)
        if comm.rank == 1:
            for p in model.parameters():
                place(p)
        with pytest.raises(ConfigurationError, match=r"model: on rank 0.* of dp x cp all .* placed on ep"):
            make(model, mesh)


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", [mpidl.DistributedDataParallel, mpidl.ZeroOptimizer])
def test_what_is_no_module_on_one_rank_is_an_error_on_all(engine: Any, comm: Communicator) -> None:
    more = (torch.optim.SGD, 2) if engine is mpidl.ZeroOptimizer else ()
    with Mesh(ep=2, comm=comm) as mesh, pytest.raises(ConfigurationError, match=r"model: |module: "):
        engine("no module" if comm.rank == 0 else experts_of(0), *more, mesh=mesh)


@pytest.mark.ranks(2, 4, exactly=True)
def test_the_norm_of_two_engines_is_taken_over_both(comm: Communicator) -> None:
    with Mesh(ep=2, comm=comm) as mesh:
        mixed, x = Mixed(mesh.rank("ep")), torch.ones(1, 3, dtype=torch.float64)
        experts = mpidl.ZeroOptimizer(mixed.expert, torch.optim.SGD, 2, mesh=mesh, lr=0.1)
        mixed.expert(x).sum().backward()
        assert experts.clip_grad_norm_(1e9) == pytest.approx(mpidl.clip_grad_norm_(mixed.expert, 1e9, mesh=mesh))
        dense = mpidl.ZeroOptimizer(mixed.dense, torch.optim.SGD, 2, mesh=mesh, lr=0.1)
        mixed.dense(x).sum().backward()
        for each in (dense, experts):
            with pytest.raises(
                ConfigurationError, match=r"needs mpidl.clip_grad_norm_\(parameters, max_norm, mesh=mesh"
            ):
                each.clip_grad_norm_(1.0)
        assert mpidl.clip_grad_norm_(mixed, 1.0, mesh=mesh) > 1.0
