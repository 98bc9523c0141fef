"""What the ranks of tp send in a step is what docs/parallelism.md says, by formula."""

from __future__ import annotations

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.tensor import Traffic, traffic

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

BATCH, TIME, WIDTH = 2, 13, 28
VALUES = BATCH * TIME * WIDTH
LOSS = 3 * BATCH * TIME  # in two all-reduces: the largest logit; the sum of exp, and the picked logit


def step_of(comm: Communicator, layers: int, *, sequence_parallel: bool = False, again: bool = False) -> Traffic:
    """Counts a forward and a backward pass. again: blocks are computed again in backward."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=61, block_size=TIME, layers=layers, heads=7, embd=WIDTH))
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        if again:
            mpidl.activations.checkpoint_modules(model)
        tokens = torch.zeros(BATCH, TIME, dtype=torch.int64)
        model(tokens, tokens).backward()
        return traffic(model)


def test_a_model_that_is_not_cut_sends_nothing(comm: Communicator) -> None:
    assert traffic(torch.nn.Linear(2, 2)) == Traffic()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_has_four_all_reduces(comm: Communicator, layers: int) -> None:
    """Two forward, two backward; embedding and output layer one each, and the loss two small ones."""
    found = step_of(comm, layers)
    assert found == Traffic(all_reduces=4 * layers + 4, reduced=(4 * layers + 2) * VALUES + LOSS)
    assert found.sent(comm.size) == ((8 * layers + 4) * VALUES + 2 * LOSS) * (comm.size - 1) / comm.size


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_with_sequences_in_pieces_has_six_gathers_and_four_reduce_scatters(
    comm: Communicator, layers: int
) -> None:
    """Two of the gathers bring back the inputs of cut layers in backward. Gradients of norms are summed besides, and
    the ends gather once forward, once backward.
    """
    found = step_of(comm, layers, sequence_parallel=True)
    assert (found.all_gathers, found.gathered) == (6 * layers + 2, (6 * layers + 2) * VALUES)
    assert (found.reduce_scatters, found.scattered) == (4 * layers, 4 * layers * VALUES)
    norms = 2 * layers + 1
    assert (found.all_reduces, found.reduced) == (4 + norms, 2 * VALUES + LOSS + norms * 2 * WIDTH)
    elements = (10 * layers + 6) * VALUES + 2 * LOSS + 4 * WIDTH * norms
    assert found.sent(comm.size) == elements * (comm.size - 1) / comm.size


@pytest.mark.ranks(2, 3)
def test_computing_again_sends_what_the_forward_pass_of_the_blocks_sent(comm: Communicator) -> None:
    once, again = (step_of(comm, 3, again=flag) for flag in (False, True))
    assert (again.all_reduces, again.reduced) == (once.all_reduces + 6, once.reduced + 6 * VALUES)
    once, again = (step_of(comm, 3, sequence_parallel=True, again=flag) for flag in (False, True))
    assert (again.gathered, again.scattered) == (once.gathered + 6 * VALUES, once.scattered + 6 * VALUES)
