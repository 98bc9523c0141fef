"""Sequence parallelism between its first block and its last module alone: what comes after has whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.mesh import Cut
from mpidl.tensor import ColumnParallel, RowParallel, SequenceBegins, SequenceEnds, SequenceParallel, VocabParallel
from mpidl.tensor import dropout as by_index
from tests.mpidl.tensor.reference import all_in_float64, build, part_of, tokens
from tests.mpidl.tensor.with_dropout import build as build_with_dropout

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks between an embedding and an output layer. takes: what the output layer computes on, of hidden states."""

    def __init__(self, takes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], checkpoint: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.takes, self.checkpoint = takes, checkpoint
        self.emb, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.emb(x)
        for block in self.blocks:
            if self.checkpoint == "none":
                hidden = block(hidden)
            else:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=self.checkpoint == "reentrant")
        return self.head(self.takes(hidden, x))


PLAN: Any = {
    "emb": VocabParallel(),
    "head": VocabParallel(),
    "blocks.*.up": ColumnParallel(),
    "blocks.*.down": RowParallel(),
    "blocks.0": SequenceBegins("x"),
    "blocks.*.norm": SequenceParallel(),
    "blocks.-1": SequenceEnds(),
}


@pytest.mark.ranks(2, 3)
def test_a_last_norm_on_pieces_whose_gradients_nothing_sums_is_refused(comm: Communicator) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.LayerNorm(4))
    plan = {"0.0": ColumnParallel(), "0.1": RowParallel(), "0": SequenceBegins("input"), "1": SequenceEnds()}
    with Mesh(tp=comm.size, comm=comm) as mesh, pytest.raises(ConfigurationError, match=r"1\.weight computes"):
        mpidl.parallelize(model, mesh, plan, sequence_parallel=True)


class ScaledBlock(Block):
    """A block with a parameter of its own, next to layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gamma * self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


@pytest.mark.ranks(2, 3)
def test_a_block_has_its_own_gradients_summed_and_not_those_of_what_is_in_it(comm: Communicator) -> None:
    def made() -> Model:
        model = Model(lambda hidden, x: hidden)
        torch.manual_seed(1)
        model.blocks = nn.ModuleList([ScaledBlock(), ScaledBlock()])
        return model.double()

    whole, model = made(), made()
    plan = {**PLAN, "blocks.*": SequenceParallel()}
    x = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(2))
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, plan, sequence_parallel=True)
        for each in (whole, model):
            each(x).square().sum().backward()
        expected = dict(whole.named_parameters())
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, part_of(expected[name].grad, p), rtol=1e-10, atol=1e-12)


TAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all": lambda hidden, x: hidden,
    "rows": lambda hidden, x: hidden.reshape(-1, WIDTH),
    "masked tokens": lambda hidden, x: hidden[x % 2 == 0],
    "the last token": lambda hidden, x: hidden[:, -1:],
    "as many tokens as a piece": lambda hidden, x: hidden[:, :3],
    "as many tokens as a piece of three ranks": lambda hidden, x: hidden[:, -2:],
}


def check_same(model: nn.Module, whole: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Compares outputs and the gradients of all weights."""
    y, expected = (run(each) for each in (model, whole))
    torch.testing.assert_close(y.whole(), expected, rtol=1e-10, atol=1e-12)
    for each in (y.whole(), expected):
        each.sin().sum().backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("takes", TAKES)
def test_an_output_layer_computes_on_any_tokens(comm: Communicator, takes: str, checkpoint: str) -> None:
    """Blocks that are computed again in backward have pieces again, also the last one, which ends them."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(Model(TAKES[takes], checkpoint), mesh, PLAN, sequence_parallel=True)
        for length in (6, 7):
            whole = Model(TAKES[takes])
            model.zero_grad()
            check_same(model, whole, lambda each, n=length: each(torch.arange(2 * n).view(2, n)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kept", [4, 5, 6])
def test_llama_gives_the_logits_of_the_last_tokens(comm: Communicator, kept: int) -> None:
    whole, model = build("llama, two key heads").train(), build("llama, two key heads").train()
    x = tokens(0)[:, :12]
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        check_same(model, whole, lambda each: each(x, logits_to_keep=kept).logits)


@pytest.mark.ranks(2, 3, exactly=True)
def test_replicated_embeddings_drop_elements_of_whole_sequences(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder of as many tokens as a piece of the encoder's, and a batch of as many as a piece of the last one."""
    drawn: list[Cut] = []
    plain = by_index.kept_elements
    monkeypatch.setattr(by_index, "kept_elements", lambda cut, *args: (drawn.append(cut), plain(cut, *args))[1])
    model = build_with_dropout("t5")
    x = tokens(0)[:, :12]
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout="by_index", sequence_parallel=True)
        short = x[:, : 12 // comm.size]
        for ids in (x, short):
            model(input_ids=ids, labels=short.contiguous()).loss.backward()
    embeddings = [cut for cut in drawn if len(cut.shape) == 3 and cut.shape[1] == short.shape[1]]
    assert any(cut.part_shape == cut.shape for cut in embeddings)
    assert {cut.shape[1] for cut in drawn if len(cut.shape) == 3} == {12, short.shape[1]}


@pytest.mark.ranks(2, 3)
def test_a_batch_of_no_sequences_passes(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(Model(TAKES["all"]), mesh, PLAN, sequence_parallel=True)
        y = model(torch.zeros(0, 6, dtype=torch.int64))
        y.whole().sum().backward()
        assert y.shape == (0, 6, 31)
