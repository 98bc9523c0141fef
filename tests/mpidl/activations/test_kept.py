"""Memory that checkpoints keep until the backward pass, and its release."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from mpidl.activations import CheckpointStore, checkpoint, checkpoint_modules
from mpidl.activations.first_fit import Space
from mpidl.memory import activation_bytes, measure_activations
from mpidl.models.gpt2 import GPT2, Block, GPT2Config
from tests.mpidl.activations.checkpointed import DROPPING, INPUT, KINDS, assert_same, dropping, made
from tests.mpidl.small_models import sequences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_blocks_keep_their_inputs_alone(kind: str, every: int, tmp_path: Path) -> None:
    model, store = dropping(), made(kind, tmp_path)
    with measure_activations(model) as plain:
        loss = model(*sequences(0, 0))
    del loss
    checkpoint_modules(model, every=every, store=store)
    with measure_activations(model) as saved:
        loss = model(*sequences(0, 0))
    chosen = len(range(0, 4, every))
    of_a_block = block_bytes()
    in_store = chosen * INPUT if store else 0
    if store:
        assert (store.nbytes, store.bytes_on_disk) == ((in_store, 0) if kind == "arena" else (0, in_store))
        assert saved.nbytes == plain.peak - chosen * of_a_block
    else:
        assert saved.nbytes == plain.peak - chosen * (of_a_block - INPUT)
    loss.backward()
    assert saved.nbytes == 0
    if store:
        assert store.nbytes == store.bytes_on_disk == 0
        assert (store.peak, store.file_bytes) == ((in_store, 0) if kind == "arena" else (0, in_store))


def block_bytes() -> int:
    """Counts the bytes that a block without a checkpoint keeps: its input and its activations."""
    block = Block(DROPPING)
    with measure_activations(block) as saved:
        y = block(torch.randn(12, 8, 16, requires_grad=True) * 1)
    assert y.requires_grad
    return saved.nbytes


def test_the_formula_for_full_recomputation() -> None:
    """Layers' inputs, and one layer whole while it runs again, of which fused attention keeps no scores."""
    config = GPT2Config(vocab_size=64, block_size=64, layers=8, heads=4, embd=128)
    model, tokens = GPT2(config), torch.zeros(4, 64, dtype=torch.int64)
    checkpoint_modules(model)
    with measure_activations(model) as saved:
        loss = model(tokens, tokens)
    assert loss.requires_grad
    layer = activation_bytes(4, 64, 128, 4, 1, "fp32")
    inputs = activation_bytes(4, 64, 128, 4, 8, "fp32", recompute="full") - layer
    outside = 4 * 4 * 64 * (2 * 128 + 64)  # the last norm's and the output layer's inputs, log-probabilities
    assert saved.nbytes == pytest.approx(inputs + outside, rel=0.02)


@pytest.mark.parametrize("kind", ["arena", "disk"])
def test_an_input_of_several_checkpoints_is_kept_once(kind: str, tmp_path: Path) -> None:
    """An encoder gives one to every layer of a decoder."""
    store = made(kind, tmp_path)
    assert store is not None
    leaves = [torch.randn(2, 32, requires_grad=True), torch.randn(32, requires_grad=True)]

    def run(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        encoded, y = leaves[0] * 2, leaves[1] * 1
        for _ in range(3):
            y = call(lambda a, b: a.sum() * b, encoded, y)
        return y.sum()

    loss = run(lambda f, *a: checkpoint(f, *a, store=store))
    assert store.nbytes + store.bytes_on_disk == 2 * 32 * 4 + 3 * 32 * 4
    assert_same(torch.autograd.grad(loss, leaves), torch.autograd.grad(run(lambda f, *a: f(*a)), leaves))
    assert store.nbytes + store.bytes_on_disk == 0


def test_small_tensors_parameters_and_constants_stay_where_they_are() -> None:
    store = CheckpointStore(smallest=400)
    w, big = nn.Parameter(torch.randn(20, 20)), torch.randn(20, 20, requires_grad=True) * 1
    out = checkpoint(
        lambda a, b, c, d, e: a @ b * c + d + e, big, w, w.t(), big[0] * 1, torch.randn(20, 20), store=store
    )
    assert store.nbytes == 20 * 20 * 4
    out.sum().backward()
    assert w.grad is not None


def test_without_gradients_nothing_is_kept_and_evaluation_may_have_gradients(store) -> None:
    model = dropping()
    x, y = sequences(0, 0)
    model.eval()
    expected = model(x, y)
    checkpoint_modules(model, store=store)
    with torch.no_grad(), measure_activations() as saved:
        assert_same(model(x, y), expected.detach())
        assert model.generate(x[:, :2], 4).shape == (12, 6)
    with torch.inference_mode():
        model(x, y)
    assert saved.peak == 0
    assert store is None or store.peak == store.file_bytes == 0
    loss = model(x, y)
    assert_same(torch.autograd.grad(loss, model.lm_head.weight), torch.autograd.grad(expected, model.lm_head.weight))


def test_fifty_steps_leave_nothing_behind(store, tmp_path: Path) -> None:
    model = dropping()
    checkpoint_modules(model, store=store)
    counts, files, memory = set(), set(), set()
    for step in range(50):
        loss = model(*sequences(step, 0))
        if step % 5:
            loss.backward()
        model.zero_grad()
        del loss
        assert store is None or store.nbytes == store.bytes_on_disk == 0
        if step in (4, 26, 49):
            gc.collect()
            counts.add(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            files.add(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
            memory.add((store.reserved, store.file_bytes) if store else 0)
    assert [len(counts), len(files), len(memory)] == [1, 1, 1]
    assert store is None or max(memory) in ((4 * INPUT, 0), (0, 4 * INPUT))
    assert os.listdir(tmp_path) == []


def test_the_arena_grows_between_steps_when_they_do(tmp_path: Path) -> None:
    store = made("arena", tmp_path)
    assert store is not None
    reserved = []
    for size in (100, 100, 300, 50, 300):
        x = torch.randn(size, requires_grad=True)
        y = x * 1
        for _ in range(3):
            y = checkpoint(torch.sin, y, store=store)
        reserved.append(store.reserved)
        y.sum().backward()
        assert_same(x.grad, torch.autograd.grad(x.sin().sin().sin().sum(), x)[0])
    small, large = 3 * 448, 3 * 1216  # in whole cache lines
    assert reserved == [0, small, small, large, large]


def test_places_never_overlap_and_are_used_again() -> None:
    space, taken, order = Space(64 * 40), {}, random.Random(0)
    for _ in range(500):
        if taken and order.random() < 0.5:
            start = order.choice(list(taken))
            space.give_back(start)
            del taken[start]
        else:
            nbytes = order.randrange(1, 500)
            start = space.take(nbytes)
            size = -(-nbytes // 64) * 64
            if start is None:
                free = sorted([*taken.items(), (64 * 40, 0)])
                ends = [0, *(s + n for s, n in sorted(taken.items()))]
                assert all(s - end < size for (s, _), end in zip(free, ends, strict=True))
            else:
                taken[start] = size
        spans = sorted(taken.items())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert space.used == sum(taken.values())
