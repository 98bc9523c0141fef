"""Elements sent over tp in a step, by the formulas of docs/parallelism.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.tensor import Traffic, traffic
from tests.mpidl.tensor import layered

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

BATCH, TIME, WIDTH = 2, 13, 28
VALUES = BATCH * TIME * WIDTH
OF_A_LAYER = layered.BATCH * layered.TOKENS * layered.WIDTH
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


def added_by_a_layer(comm: Communicator, build: Callable[[int], nn.Module], **cuts: Any) -> Traffic:
    """Counts what the third layer adds to a forward and a backward pass."""
    found = []
    with Mesh(tp=comm.size, comm=comm) as mesh:
        for layers in (2, 3):
            model = mpidl.parallelize(build(layers).double(), mesh=mesh, **cuts)
            layered.loss(model).backward()
            found.append(dict(vars(traffic(model))))
    return Traffic(**{name: found[1][name] - found[0][name] for name in found[0]})


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.each("name")
@pytest.mark.parametrize("name", layered.BUILDERS)
def test_a_layer_has_four_all_reduces(comm: Communicator, name: str) -> None:
    """Two forward, two backward. Of Llama one serves three projections, and one a gate and its values."""
    found = added_by_a_layer(comm, layered.BUILDERS[name])
    assert found == Traffic(all_reduces=4, reduced=4 * OF_A_LAYER)
    assert found.sent(comm.size) == pytest.approx(8 * OF_A_LAYER * (comm.size - 1) / comm.size)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.each("name")
@pytest.mark.parametrize("name", layered.BUILDERS)
def test_a_layer_with_sequences_in_pieces_has_six_gathers_and_four_reduce_scatters(
    comm: Communicator, name: str
) -> None:
    """Two of the gathers bring back the inputs of cut layers in backward. Gradients of norms are summed besides."""
    found = added_by_a_layer(comm, layered.BUILDERS[name], sequence_parallel=True)
    assert (found.all_gathers, found.gathered) == (6, 6 * OF_A_LAYER)
    assert (found.reduce_scatters, found.scattered) == (4, 4 * OF_A_LAYER)
    assert found.reduced <= 6 * layered.WIDTH  # of two norms, and of biases
    assert name != "gpt2" or (found.all_reduces, found.reduced) == (2, 4 * layered.WIDTH)
    of_activations = replace(found, reduced=0)
    assert of_activations.sent(comm.size) == pytest.approx(10 * OF_A_LAYER * (comm.size - 1) / comm.size)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.each("sequence_parallel")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "in pieces"])
def test_a_model_of_one_layer(comm: Communicator, sequence_parallel: bool) -> None:
    """Embedding and output layer have an all-reduce each, and the loss two small ones. With sequences in pieces the
    ends gather once forward, once backward.
    """
    found = step_of(comm, 1, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        assert found == Traffic(all_reduces=4 + 4, reduced=(4 + 2) * VALUES + LOSS)
        assert found.sent(comm.size) == (12 * VALUES + 2 * LOSS) * (comm.size - 1) / comm.size
        return
    norms = 3
    assert (found.all_gathers, found.gathered) == (6 + 2, (6 + 2) * VALUES)
    assert (found.reduce_scatters, found.scattered) == (4, 4 * VALUES)
    assert (found.all_reduces, found.reduced) == (4 + norms, 2 * VALUES + LOSS + norms * 2 * WIDTH)
    elements = (10 + 6) * VALUES + 2 * LOSS + 4 * WIDTH * norms
    assert found.sent(comm.size) == elements * (comm.size - 1) / comm.size


@pytest.mark.ranks(2, 3, 4)
def test_the_embedding_sends_2_bsh_and_the_loss_3_numbers_a_token(comm: Communicator) -> None:
    model = layered.gpt2(1).double()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        model.transformer["wte"](layered.batch()[:, : layered.TOKENS]).sum().backward()
        assert traffic(model) == Traffic(all_reduces=1, reduced=OF_A_LAYER)
        logits = model.lm_head(torch.ones(layered.BATCH * layered.TOKENS, layered.WIDTH, dtype=torch.float64))
        loss = nn.functional.cross_entropy(logits, layered.batch()[:, : layered.TOKENS].flatten())
        assert traffic(model) == Traffic(all_reduces=3, reduced=OF_A_LAYER + 3 * layered.BATCH * layered.TOKENS)
        torch.autograd.grad(loss, logits)
        sent = Traffic(all_reduces=3, reduced=OF_A_LAYER + 3 * layered.BATCH * layered.TOKENS)
        assert traffic(model) == sent
        probabilities = logits.softmax(-1)  # of all tokens' logits, which are gathered for it
        assert traffic(model) == replace(sent, all_gathers=1, gathered=probabilities.numel())


@pytest.mark.ranks(2, 3)
def test_computing_again_sends_what_the_forward_pass_of_the_blocks_sent(comm: Communicator) -> None:
    once, again = (step_of(comm, 3, again=flag) for flag in (False, True))
    assert (again.all_reduces, again.reduced) == (once.all_reduces + 6, once.reduced + 6 * VALUES)
    once, again = (step_of(comm, 3, sequence_parallel=True, again=flag) for flag in (False, True))
    assert (again.gathered, again.scattered) == (once.gathered + 6 * VALUES, once.scattered + 6 * VALUES)
