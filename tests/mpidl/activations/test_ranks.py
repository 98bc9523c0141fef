"""Checkpoints under DDP and every stage of ZeRO, and checkpoints that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mpidl
from collectives.base.partition import even_counts
from mpidl.activations import CheckpointStore, checkpoint, checkpoint_modules
from mpidl.errors import ConfigurationError, ModelMismatch, TrainingError
from mpidl.memory import measure_activations
from mpidl.models.gpt2 import GPT2, Block, GPT2Config
from tests.mpidl.small_models import Gaps, Images, Mixture, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

DROPPING = GPT2Config(vocab_size=37, block_size=8, layers=3, heads=2, embd=18, dropout=0.2)


# Each engine's name for `train`, and its settings.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"find_unused_parameters": True}),
    **{way: (way, {}) for way in WAYS},
    "stage 3 gathered, small units": ("stage 3 gathered", {"units": nn.Linear}),
}


def dropping() -> nn.Module:
    return GPT2(DROPPING)


# ---- engines -----------------------------------------------------------------------------------------------


# Random numbers with every engine; tied, frozen and unused parameters, and running statistics, where engines differ.
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        *((dropping, engine) for engine in ENGINES),
        *((Mixture, engine) for engine in ("ddp", "stage 2", "stage 3 gathered", "stage 3 gathered, small units")),
        *((Images, engine) for engine in ("ddp", "stage 1", "stage 3 gathered")),
    ],
)
def test_engines_train_the_same_with_checkpoints(comm, tmp_path: Path, make: Callable[[], nn.Module], engine) -> None:
    name, settings = ENGINES[engine]
    if make is Mixture and engine == "stage 3 gathered, small units":
        settings = {**settings, "units": nn.Tanh}  # the blocks have parameters alone that are tied or frozen in part
    recipe = Recipe(steps=2, micro=2, clip=1.0, engine=settings)
    trained = []
    for store in (None, CheckpointStore(offload=tmp_path, smallest=64)):
        model = fresh(make, comm.rank)
        if store is not None:
            checkpoint_modules(model, store=store)
        torch.manual_seed(comm.rank)
        trained.append(train(model, recipe, name, comm))
    plain, checkpointed = trained
    assert np.array_equal(plain.losses, checkpointed.losses)
    if comm.rank == 0 or engine == "ddp":
        assert largest_difference(plain.weights, checkpointed.weights) == 0
    assert store.bytes_on_disk == 0 < store.file_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_after_the_engine_and_taken_off_again(comm, engine) -> None:
    name, settings = ENGINES[engine]
    model = fresh(dropping, comm.rank)
    if name == "ddp":
        call: Any = mpidl.DistributedDataParallel(model, process_group=comm, **settings)
        optimizer: Any = torch.optim.AdamW(call.parameters(), lr=1e-3)
    else:
        given: dict[str, Any] = {"process_group": comm, "lr": 1e-3, **WAYS[name]}
        call, optimizer = model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, **given, **settings)
    plain = fresh(dropping)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(4):
        handle = checkpoint_modules(call, Block) if step % 2 else None
        for run, stepped in ((call, optimizer), (plain, reference)):
            torch.manual_seed(step)
            run(*sequences(step, 0)).backward()  # the same on every rank, so that one process has the same mean
            stepped.step()
            stepped.zero_grad()
        if handle is not None:
            handle.remove()
    whole = optimizer.model_state_dict() if name != "ddp" else model.state_dict()
    if comm.rank == 0:
        assert largest_difference(dict(whole), dict(plain.state_dict())) < 2e-5


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "stage 1"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_in_both_modes(comm, engine, reentrant: bool) -> None:
    class Calling(nn.Module):
        """Blocks in torch's checkpoints, of which the second model has none."""

        def __init__(self, on: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, 6)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)]
            )
            self.head, self.on = nn.Linear(6, 37), on

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + (torch_checkpoint(block, x, use_reentrant=reentrant) if self.on else block(x))
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    name, settings = ENGINES[engine]
    if name == "ddp":
        settings = {}
    found = []
    for on in (False, True):
        torch.manual_seed(comm.rank)
        model = fresh(lambda on=on: Calling(on), comm.rank)
        torch.manual_seed(comm.rank)
        found.append(train(model, Recipe(steps=2, micro=2, engine=settings), name, comm))
    assert np.array_equal(found[0].losses, found[1].losses)
    if comm.rank == 0 or engine == "ddp":
        assert largest_difference(found[0].weights, found[1].weights) == 0


# ---- cut over ranks ----------------------------------------------------------------------------------------


def passed(model: nn.Module, batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(*sequences(batch, 0))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("disk", [False, True])
def test_a_rank_keeps_its_part_of_each_checkpoint(comm, tmp_path: Path, disk: bool, dtype: torch.dtype) -> None:
    store = CheckpointStore(comm, tmp_path if disk else None, smallest=64, buffer_mb=500 / 2**20)
    model = fresh(dropping).to(dtype)
    expected = passed(model, 0)
    part = even_counts(12 * 8 * 18, comm.size)[comm.rank] * dtype.itemsize
    part = -(-part // 64) * 64
    checkpoint_modules(model, store=store)
    for _ in range(3):
        assert_same(passed(model, 0), expected)
        assert (store.peak, store.file_bytes) == ((0, store.file_bytes) if disk else (3 * part, 0))
        assert store.nbytes == store.bytes_on_disk == 0
    with measure_activations(model):
        loss = model(*sequences(0, 0))
    assert store.nbytes + store.bytes_on_disk == 3 * part
    loss.backward()


@pytest.mark.parametrize("make", [Gaps, Images])
def test_other_models_cut_over_ranks(comm, make: Callable[[], nn.Module]) -> None:
    model, plain = fresh(make), fresh(make)
    checkpoint_modules(model, store=CheckpointStore(comm, smallest=1))
    assert_same(passed(model, 0), passed(plain, 0))


@pytest.mark.parametrize("engine", WAYS)
def test_groups_of_ranks_in_addition_to_data_parallel_ones(comm, engine) -> None:
    """Pairs of ranks hold the same activations, and each pair has sequences of its own."""
    group = comm.split(comm.rank // 2, comm.rank)
    found = []
    for cut in (False, True):
        model = fresh(dropping, comm.rank)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=comm, lr=1e-3, **WAYS[engine])
        store = CheckpointStore(group, smallest=64) if cut else None
        checkpoint_modules(model, store=store)
        losses = []
        for step in range(3):
            torch.manual_seed(10 * step + comm.rank // 2)
            loss = model(*sequences(step, comm.rank // 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, dict(optimizer.model_state_dict())))
    assert found[0][0] == found[1][0]
    if comm.rank == 0:
        assert largest_difference(found[0][1], found[1][1]) == 0
    group.close()


def test_a_few_elements_over_more_ranks(comm) -> None:
    store = CheckpointStore(comm, smallest=1)
    for size in (0, 1, 2, 3):
        x = torch.linspace(0, 1, size, requires_grad=True)
        checkpoint(torch.sin, x * 1, store=store).sum().backward()
        assert_same(x.grad, x.detach().cos())


def test_evaluation_exceptions_and_kept_graphs_leave_the_ranks_in_step(comm) -> None:
    store, model = CheckpointStore(comm, smallest=64), fresh(dropping)
    expected = passed(model, 0)
    checkpoint_modules(model, store=store)
    with torch.no_grad():
        model(*sequences(1, 0))
    if comm.rank == 0:  # one rank alone may do what keeps nothing
        with torch.no_grad():
            model(*sequences(2, 0))
    runs = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("on purpose")

    handle = model.transformer["h"][1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        passed(model, 0)
    handle.remove()
    loss = model(*sequences(0, 0))
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert_same(torch.autograd.grad(loss, list(model.parameters())), first)
    del loss
    assert_same(passed(model, 0), expected)
    assert store.nbytes == 0


# ---- what does not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_last", "message"),
    [
        (
            lambda x: x[:7],
            r"differ over the group: rank 0 has \[8, 50\] torch.float32, strides \[50, 1\], rank ",
        ),
        (lambda x: x.double(), r"rank 0 has .* rank \d has \[8, 50\] torch.float64"),
        (lambda x: x.t().contiguous().t(), r"has \[8, 50\] torch.float32, strides \[1, 8\]"),
        (lambda x: x.detach(), r"rank \d has none"),
        (lambda x: x + (torch.arange(50) == 30) * 1e-6, r"the values on ranks 0 and \d are not the same, in \[8, 50\]"),
    ],
    ids=["shape", "dtype", "layout", "no gradient", "values"],
)
def test_inputs_that_differ_are_named_on_every_rank(comm, of_last, message: str) -> None:
    store, x = CheckpointStore(comm), torch.ones(8, 50, requires_grad=True) * 1
    given = of_last(x) if comm.rank == comm.size - 1 > 0 else x
    if comm.size == 1:
        checkpoint(torch.sin, given, store=store)
        return
    with pytest.raises(TrainingError, match=message):
        checkpoint(torch.sin, given, store=store)
    checkpoint(torch.sin, x, store=store).sum().backward()
    assert store.nbytes == 0


def test_wrong_settings_are_refused_on_every_rank(comm, tmp_path: Path) -> None:
    last = comm.rank == comm.size - 1
    with pytest.raises(ConfigurationError, match="offload: got '/nowhere', where no file can be made"):
        CheckpointStore(comm, "/nowhere" if last else tmp_path)
    with pytest.raises(ConfigurationError, match="smallest: got 0"):
        CheckpointStore(comm, smallest=0 if last else 1)
    if comm.size > 1:
        with pytest.raises(ModelMismatch, match=r"CheckpointStore: rank 0 has smallest=64, rank \d has smallest=65"):
            CheckpointStore(comm, smallest=65 if last else 64)
        with pytest.raises(ModelMismatch, match="has offload='disk'"):
            CheckpointStore(comm, tmp_path if last else None)
