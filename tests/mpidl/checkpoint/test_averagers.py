"""Nodes whose ranks train together, and whose weights an averager brings together now and then, are one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl.checkpoint import load, save
from mpidl.errors import ConfigurationError
from mpidl.optim import DiLoCo, PeriodicAverager, PostLocalSGDOptimizer
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import STAGES, WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]
IN_FLIGHT: dict[str, Any] = {"period": 4, "fragments": 2, "overlap": 1}  # after 5 steps a fragment is


class Nodes(NamedTuple):
    """Two nodes of two ranks; on fewer ranks nodes of one."""

    comm: Communicator
    node: Communicator
    peers: Communicator

    @property
    def number(self) -> int:
        """Number of this rank's node."""
        return self.comm.rank // self.node.size


@pytest.fixture
def nodes(comm: Communicator) -> Nodes:
    of = 2 if comm.size == 4 else 1
    node, peers = comm.split(comm.rank // of), comm.split(comm.rank % of)
    assert node is not None
    assert peers is not None
    return Nodes(comm, node, peers)  # not closed: the last step of an engine may still gather parameters


def backward(nodes: Nodes, call: Any, step: int) -> None:
    call(*(part.tensor_split(nodes.comm.size)[nodes.comm.rank] for part in sequences(step, 0))).backward()


def train(nodes: Nodes, call: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        backward(nodes, call, step)
        optimizer.step()
        optimizer.zero_grad()


def made(nodes: Nodes, seed: int, way: str, **of_ddp: Any) -> tuple[Any, Any]:
    """DistributedDataParallel over the node, and an averager over all ranks, or over those of this number in nodes."""
    call = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"], seed), process_group=nodes.node, **of_ddp)
    beta = 0.0 if call.compressed is not None else 0.9  # dgc has a momentum of its own
    inner = torch.optim.AdamW(call.parameters(), lr=1e-3, betas=(beta, 0.99))
    if way == "diloco":
        return call, DiLoCo(inner, process_group=nodes.comm, node_group=nodes.node, **IN_FLIGHT)
    return call, PostLocalSGDOptimizer(inner, PeriodicAverager(call.parameters(), nodes.peers, period=3))


def check_equal(found: Any, expected: Any) -> None:
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(("way", "background"), [("diloco", False), ("over peers", True)])
def test_nodes_saved_within_a_period_go_on_to_the_bit(nodes: Nodes, shared: Path, way: str, background: bool) -> None:
    over = {} if way == "diloco" else {"process_group": nodes.comm}  # which the averager does not know
    call, optimizer = made(nodes, 0, way)
    train(nodes, call, optimizer, 0, 5)
    save(shared, call, optimizer, step=5, background=background, **over)
    mpidl.checkpoint.wait(call)
    train(nodes, call, optimizer, 5, 9)
    again, optimizer_again = made(nodes, 1, way)
    loaded = load(shared, again, optimizer_again, **over)
    assert (loaded.ranks, loaded.step) == (nodes.comm.size, 5)
    train(nodes, again, optimizer_again, 5, 9)
    check_equal(again, call)


def test_a_process_group_that_lacks_ranks_is_refused(nodes: Nodes, shared: Path) -> None:
    for way in ("diloco", "over peers"):
        call, optimizer = made(nodes, 0, way)
        for function in (save, load):
            with pytest.raises(ConfigurationError, match=r"process_group: got \d ranks.*needs all over which"):
                function(shared, call, optimizer, process_group=nodes.node)


def test_gradients_of_micro_steps_before_the_first_step_are_the_node_s(nodes: Nodes, shared: Path) -> None:
    call, optimizer = made(nodes, 0, "diloco")
    backward(nodes, call, 0)
    save(shared, call, optimizer, micro_step=1)
    again, optimizer_again = made(nodes, 1, "diloco")
    load(shared, again, optimizer_again)
    for p, q in zip(again.parameters(), call.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("method", ["int4", "dgc:0.1"])
def test_what_nodes_have_not_sent_comes_back_as_the_mean_of_all(nodes: Nodes, shared: Path, method: str) -> None:
    def state(call: Any) -> dict[str, torch.Tensor]:
        found = call.compressed.state_dict()
        velocities = {f"{name}.momentum": kept["momentum"] for name, kept in found["states"].items()}
        return {**found["remainders"], **velocities}

    call, optimizer = made(nodes, 0, "diloco", compress=mpidl.Compression(method, start_step=0))
    train(nodes, call, optimizer, 0, 5)
    expected = {name: values.clone() for name, values in state(call).items()}
    assert any(values.any() for values in expected.values()) or nodes.node.size == 1
    save(shared, call, optimizer)
    for values in expected.values():
        nodes.comm.all_reduce(values, "avg")
    again, optimizer_again = made(nodes, 1, "diloco", compress=mpidl.Compression(method, start_step=0))
    load(shared, again, optimizer_again)
    found = state(again)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, msg=name)


@pytest.mark.parametrize("way", STAGES)
def test_zero_in_nodes_is_saved_by_node_and_goes_on_to_the_bit(nodes: Nodes, shared: Path, way: str) -> None:
    def run(seed: int) -> tuple[Any, DiLoCo]:
        model = fresh(MODELS["gpt2"], seed)
        inner = mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=nodes.node, **WAYS[way], lr=1e-3)
        return model, DiLoCo(inner, process_group=nodes.comm, **IN_FLIGHT)

    def weights(optimizer: Any) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = optimizer.optimizer.model_state_dict()
        return whole if nodes.node.rank == 0 else {}

    model, optimizer = run(0)
    train(nodes, model, optimizer, 0, 5)
    for function in (save, load):
        with pytest.raises(ConfigurationError, match=r"a DiLoCo over a ZeroOptimizer.*in a directory of each node"):
            function(shared, model, optimizer)
    own, outer = shared / f"node{nodes.number}", shared / f"outer{nodes.comm.rank}.pt"
    save(own, model, optimizer.optimizer, step=5)
    torch.save(optimizer.averager.state_dict(), outer)
    train(nodes, model, optimizer, 5, 9)
    again, optimizer_again = run(1)
    load(own, again, optimizer_again.optimizer)
    optimizer_again.averager.load_state_dict(torch.load(outer))
    train(nodes, again, optimizer_again, 5, 9)
    found, expected = weights(optimizer_again), weights(optimizer)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
