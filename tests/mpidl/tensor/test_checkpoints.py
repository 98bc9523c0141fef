"""Checkpoints of activations in models that are cut over tp: the same bits, random numbers and sums not twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mpidl
from collectives import Communicator
from mpidl import Mesh, TrainingError
from mpidl.activations import CheckpointStore, checkpoint_modules
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.tensor import traffic
from tests.mpidl.tensor.engines import ENGINES, MESHES, Recipe, engine_of
from tests.mpidl.tensor.reference import VOCABULARY, loss_of, tokens

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Mesh"),
    pytest.mark.filterwarnings("ignore:units"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable"),
]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=VOCABULARY, block_size=32, layers=3, heads=7, embd=28, dropout=0.2))


def hf_gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 3, "n_head": 7, "n_embd": 28}
    config = transformers.GPT2Config(
        **sizes,
        use_cache=False,  # with which checkpoints do not go, and without which attention takes another way
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        attn_pdrop=0.2,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def by_torch(model: nn.Module, mesh: Mesh, path: Path, *, reentrant: bool = False) -> None:
    for block in model.transformer["h"]:  # type: ignore[index, union-attr]
        block.forward = partial(torch_checkpoint, block.forward, use_reentrant=reentrant)


def by_transformers(model: Any, mesh: Mesh, path: Path, *, reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def over_tp(model: nn.Module, mesh: Mesh, path: Path) -> None:
    checkpoint_modules(model, store=CheckpointStore(group=mesh["tp"], smallest=64))


Way = Callable[[nn.Module, Mesh, Path], Any]
WAYS: dict[str, tuple[Callable[[], nn.Module], Way]] = {
    "torch": (gpt2, by_torch),
    "torch, re-entrant": (gpt2, partial(by_torch, reentrant=True)),
    "transformers": (hf_gpt2, by_transformers),
    "transformers, re-entrant": (hf_gpt2, partial(by_transformers, reentrant=True)),
    "mpidl": (gpt2, lambda model, *_: checkpoint_modules(model)),
    "mpidl, sums kept": (gpt2, lambda model, *_: checkpoint_modules(model, keep_sums=True)),
    "mpidl, sums kept, transformers": (hf_gpt2, lambda model, *_: checkpoint_modules(model, keep_sums=True)),
    "cut over tp": (gpt2, over_tp),
    "on disk": (gpt2, lambda model, mesh, path: checkpoint_modules(model, store=CheckpointStore(offload=path))),
}


def train(model: nn.Module, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the gradients of the last step."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.each("way")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_change_no_bit(comm: Communicator, tmp_path: Path, way: str, sequence_parallel: bool) -> None:
    """With dropout inside regions, outside and on pieces of sequences, after which random numbers go on the same."""
    make, take = WAYS[way]
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        found = []
        for on in (False, True):
            model = mpidl.parallelize(make(), mesh, sequence_parallel=sequence_parallel)
            if on:
                take(model, mesh, tmp_path)
            if on and way == "cut over tp" and sequence_parallel and comm.size > 1:
                with pytest.raises(TrainingError, match="checkpoint: the inputs differ over the group"):
                    train(model)
                return
            found.append((*train(model), torch.randn(3)))
        (losses, gradients, after), (again, others, later) = found
        assert again == losses
        assert torch.equal(after, later)
        assert len(gradients) == len(others)
        wrong = [n for n, (a, b) in enumerate(zip(gradients, others, strict=True)) if not torch.equal(a, b)]
        assert not wrong, [(gradients[n] - others[n]).abs().max().item() for n in wrong]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sums_that_are_kept_are_not_made_again(comm: Communicator, sequence_parallel: bool) -> None:
    def in_backward(**settings: Any) -> tuple[int, int, int]:
        """Counts of the operations of one backward pass."""
        model = mpidl.parallelize(gpt2(), mesh, sequence_parallel=sequence_parallel)
        if settings:
            checkpoint_modules(model, **settings)
        loss = loss_of(model, tokens(0))
        before = traffic(model)
        loss.backward()
        after = traffic(model)
        names = ("all_reduces", "reduce_scatters", "all_gathers")
        return tuple(getattr(after, name) - getattr(before, name) for name in names)  # type: ignore[return-value]

    with Mesh(tp=comm.size, comm=comm) as mesh:
        plain, again, kept = in_backward(), in_backward(every=1), in_backward(keep_sums=True)
    layers = 3
    if sequence_parallel:
        assert [b - a for a, b in zip(plain, again, strict=True)] == [0, 2 * layers, 2 * layers]
        assert [b - a for a, b in zip(plain, kept, strict=True)] == [0, 0, 2 * layers]
    else:
        assert [b - a for a, b in zip(plain, again, strict=True)] == [2 * layers, 0, 0]
        assert kept == plain


@pytest.mark.parametrize("way", ["torch", "torch, re-entrant", "mpidl, sums kept"])
def test_an_evaluation_between_forward_and_backward(comm: Communicator, tmp_path: Path, way: str) -> None:
    """Its sequences are whole, and those of the blocks that run again are in pieces."""
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        found = []
        for between in (False, True):
            model = mpidl.parallelize(gpt2(), mesh, sequence_parallel=True)
            WAYS[way][1](model, mesh, tmp_path)
            torch.manual_seed(5)
            loss = loss_of(model, tokens(0))
            if between:
                model.eval()
                with torch.no_grad():
                    loss_of(model, tokens(1)[:, :6])
                model.train()
            loss.backward()
            found.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_output_that_was_written_into_is_computed_again(comm: Communicator) -> None:
    class Writing(nn.Module):
        """Writes into what the row-parallel layer gives."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.tanh(self.inner(x))).add_(x).tanh()

    plan = {"*": mpidl.tensor.FeedForwardParallel(inputs=("inner",), output="outer", input="x")}
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        gradients = []
        for on in (False, True):
            torch.manual_seed(0)
            model = mpidl.parallelize(nn.Sequential(Writing(), Writing()), mesh, plan)
            if on:
                checkpoint_modules(model, Writing, keep_sums=True)
            model(torch.ones(3, 6)).sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.ranks(2, 3, 4)
def test_each_rank_of_tp_keeps_a_piece_of_a_checkpoint(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        held = {}
        for group in (None, mesh["tp"]):
            store = CheckpointStore(group=group, smallest=64)
            model = mpidl.parallelize(gpt2(), mesh)
            checkpoint_modules(model, store=store)
            loss = loss_of(model, tokens(0, batch=4))
            held[group is None] = store.nbytes
            loss.backward()
            assert store.nbytes == 0
        assert held[False] <= held[True] / comm.size + 3 * 64


@pytest.mark.at_most(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_in_every_engine(comm: Communicator, engine: str, sequence_parallel: bool) -> None:
    for dp, tp in MESHES[comm.size]:
        if engine == "torch" and dp > 1:
            continue
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            found = []
            for on in (False, True):
                model = mpidl.parallelize(gpt2(), mesh, sequence_parallel=sequence_parallel)
                if on:
                    store = None if sequence_parallel else CheckpointStore(group=mesh["tp"], smallest=64)
                    checkpoint_modules(model, store=store, keep_sums=True)
                losses = []
                with engine_of(engine, model, mesh, Recipe()) as (call, optimizer):
                    torch.manual_seed(mesh.rank("dp"))
                    for step in range(3):
                        loss = loss_of(call, tokens(10 * step + mesh.rank("dp")))
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        losses.append(loss.item())
                found.append((losses, [p.detach().clone() for p in model.parameters()]))
            (losses, weights), (again, others) = found
            assert losses == again
            assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
