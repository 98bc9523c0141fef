"""All-gathers of pieces of sequences that go on while the ranks compute: the numbers are those without."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator, even_counts
from mpidl import ConfigurationError, Mesh
from mpidl.tensor import traffic
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.parallelize import gains_by_overlap
from tests.mpidl.tensor.reference import all_in_float64, build, largest_difference, loss_of, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


@pytest.mark.mpi
@pytest.mark.each("name")
@pytest.mark.parametrize("name", ["gpt2", "llama, two key heads"])
def test_training_is_that_of_one_process_with_and_without(comm: Communicator, name: str) -> None:
    whole = build(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        expected, sent = train(whole, 5), []
        for overlap in (False, True):
            model = build(name)
            mpidl.parallelize(model, mesh, sequence_parallel=True, overlap=overlap)
            assert train(model, 5) == pytest.approx(expected, abs=1e-10)
            assert largest_difference(model, whole) < 1e-10
            sent.append(traffic(model).gathered)
        assert sent[0] == sent[1]


@pytest.mark.mpi
def test_sequences_as_short_as_the_ranks_are_many(comm: Communicator) -> None:
    """A chunk is then a token, and there is one."""
    whole, model = build("gpt2"), build("gpt2")
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True, overlap=True)
        for length in (comm.size, comm.size + 1, 5 * comm.size + 1):
            x = tokens(length, batch=3).repeat(1, 2)[:, : length + 1]
            losses = [loss_of(each, x) for each in (whole, model)]
            for loss in losses:
                loss.backward()
            assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-12)
        for each in (whole, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert largest_difference(model, whole) < 1e-12


@pytest.mark.mpi
@pytest.mark.parametrize("overlaps", [False, True])
def test_chunks_are_all_tokens_once(comm: Communicator, overlaps: bool) -> None:
    group = TensorGroup(comm, overlaps=overlaps)
    for length in (comm.size, 4 * comm.size + 3, 37):
        whole = torch.arange(2.0 * length * 3).view(2, length, 3)
        counts = even_counts(length, comm.size)
        first = sum(counts[: comm.rank])
        own = whole[:, first : first + counts[comm.rank]].contiguous()
        for _ in range(3):  # the memory takes turns
            found, seen = torch.zeros_like(whole), torch.zeros(length)
            for number, (start, some) in enumerate(group.all_gather_by_chunks(own, length)):
                found[:, start : start + some.shape[1]] = some
                seen[start : start + some.shape[1]] += 1
                assert number > 0 or start == first  # no rank waits before it has computed with its own
            assert torch.equal(found, whole)
            assert (seen == 1).all()
            assert torch.equal(group.begin_all_gather(own, length)(), whole)


@pytest.mark.mpi
def test_other_values_are_refused(comm: Communicator) -> None:
    bad: Any = "always"
    refused = pytest.raises(ConfigurationError, match="overlap: got 'always'; needs True, False or 'auto'")
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh, refused:
        mpidl.parallelize(build("gpt2"), mesh, overlap=bad)


@pytest.mark.parametrize(
    ("nodes", "ranks", "cores", "threads", "expected"),
    [(1, 2, 2, 1, False), (1, 2, 3, 1, True), (1, 2, 4, 2, False), (1, 4, 2, 1, False), (2, 2, 2, 1, True)],
)
def test_auto_wants_a_wire_or_a_core(
    nodes: int, ranks: int, cores: int, threads: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[gains_by_overlap.__module__], "all_gather_object", lambda comm, fact: [fact])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    world: Any = SimpleNamespace(node_ranks=tuple(range(ranks)), node_cores=cores)
    mesh: Any = type("Mesh", (), {"comm": world, "__getitem__": lambda *_: SimpleNamespace(nodes=nodes)})()
    assert gains_by_overlap(mesh) == expected
