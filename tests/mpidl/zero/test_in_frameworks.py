"""Uses of a model and its optimizer by frameworks besides training: they move it, and save its state_dict()."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import broadcast_object
from mpidl.errors import ConfigurationError
from tests.mpidl.zero.reference import Plain, check, data, engine
from tests.mpidl.zero.ways import every_way

pytestmark = pytest.mark.mpi


class Tied(nn.Module):
    """Three small layers, two of which have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x).square().mean()


def train(comm: Communicator, model: nn.Module, optimizer: mpidl.ZeroOptimizer) -> None:
    model(data(comm.rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


@every_way
def test_a_model_may_be_moved_to_where_it_is(comm: Communicator, way: str) -> None:
    model, optimizer = engine(comm, Tied, way)
    assert model.to("cpu") is model.float() is model.to(torch.device("cpu"), torch.float32) is model
    train(comm, model, optimizer)
    plain = Plain(Tied, comm.size)
    plain.step(lambda m, rank: m(data(rank)).backward())
    check(model, optimizer, plain.model)


@every_way
def test_tensors_of_a_state_dict_have_storages_of_their_own(comm: Communicator, way: str) -> None:
    model, optimizer = engine(comm, Tied, way)
    train(comm, model, optimizer)
    with optimizer.gathered(writable=False):
        given = model.state_dict()
        for name, p in model.named_parameters():
            assert given[name].untyped_storage().nbytes() == p.nbytes, name
            assert torch.equal(given[name], p.detach())
            assert given[name].data_ptr() == p.data_ptr(), f"{name} was copied"
        storages = {name: t.untyped_storage().data_ptr() for name, t in given.items()}
        assert storages["layers.0.weight"] == storages["layers.2.weight"]
        assert len(set(storages.values())) == len(given) - 1
        kept = model.state_dict(keep_vars=True)
        assert all(kept[name] is p for name, p in model.named_parameters())


def read_back(state: dict[str, Any]) -> Any:
    """State after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.mpi(min_size=2)
@every_way
@pytest.mark.parametrize("of", ["optimizer", "average"])
def test_ranks_without_the_state_say_so(comm: Communicator, way: str, of: str) -> None:
    model, optimizer = engine(comm, Tied, way)
    holder = optimizer if of == "optimizer" else mpidl.optim.EMA(model)
    train(comm, model, optimizer)
    given = read_back(holder.state_dict())
    assert len(given) > 1 if comm.rank == 0 else list(given.values()) == [comm.rank]
    holder.load_state_dict(given)
    of_last = broadcast_object(comm, given, comm.size - 1)
    with pytest.raises(ConfigurationError, match=rf"on rank 0 what state_dict.* on rank {comm.size - 1}"):
        holder.load_state_dict(of_last)
    with pytest.raises(KeyError):
        torch.optim.SGD(nn.Linear(1, 1).parameters()).load_state_dict(of_last)
    train(comm, model, optimizer)
