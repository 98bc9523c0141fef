"""Embeddings of which each rank has a part, judged by torch's whole one."""

from __future__ import annotations

import pytest
import torch

from collectives import Communicator
from mpidl import Mesh, TrainingError
from mpidl.mesh import placement
from mpidl.tensor import VocabParallelEmbedding

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


@pytest.mark.parametrize("tokens", [2, 13])
@pytest.mark.parametrize("padding_idx", [None, 0, -1, 1])
def test_an_embedding_is_that_of_one_process(comm: Communicator, tokens: int, padding_idx: int | None) -> None:
    torch.manual_seed(3)
    whole = torch.nn.Embedding(tokens, 4, padding_idx=padding_idx, dtype=torch.float64)
    x = torch.arange(24).view(2, 3, 4) % tokens
    with Mesh(tp=comm.size, comm=comm) as mesh:
        torch.manual_seed(3)
        model = VocabParallelEmbedding(tokens, 4, mesh=mesh, padding_idx=padding_idx, dtype=torch.float64)
        cut = placement(model.weight).cut
        assert cut is not None
        assert torch.equal(model.weight, cut.of(whole.weight.detach()))
        for each in (whole, model):
            (each(x) * torch.arange(24.0).view(2, 3, 4, 1)).sum().backward()
        assert torch.equal(model(x), whole(x))
        assert whole.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, cut.of(whole.weight.grad))
        with torch.no_grad():
            assert torch.equal(model(x[0, 0]), whole(x[0, 0]))
            assert model(x[:0]).shape == (0, 3, 4, 4)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrong", [13, -1])
def test_a_token_out_of_range_is_one_error_on_every_rank(comm: Communicator, wrong: int) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = VocabParallelEmbedding(13, 4, mesh=mesh)
        with pytest.raises(TrainingError, match=f"token {wrong} with a vocabulary of 13"):
            model(torch.tensor([3, wrong]))
        comm.barrier()
