"""Checkpoints change no loss, gradient, random number or statistic."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mpidl.activations import checkpoint, checkpoint_modules
from mpidl.memory import measure_activations
from tests.mpidl.activations.checkpointed import INPUT, assert_same, dropping, made, passed
from tests.mpidl.small_models import Gaps, Images, SmoothImages, fresh, sequences, small_gpt2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_losses_gradients_and_random_numbers_of_gpt2_with_dropout(store, every: int, autocast: bool) -> None:
    model = dropping()
    expected = passed(model, autocast)
    checkpoint_modules(model, every=every, store=store)
    for _ in range(3):  # the first sizes the arena
        assert_same(passed(model, autocast), expected)


@pytest.mark.parametrize("make", [Gaps, Images, SmoothImages, small_gpt2])
def test_other_models(store, make: Callable[[], nn.Module]) -> None:
    """Masks, normalization with running statistics, convolutions, residual connections around blocks."""
    model, plain = fresh(make), fresh(make)
    modules = None if make is not SmoothImages else (nn.Conv2d, nn.BatchNorm2d)
    checkpoint_modules(model, modules, store=store)
    for _ in range(2):
        assert_same(passed(model), passed(plain))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


class Everything(nn.Module):
    """Tensors in keywords, lists and dictionaries, of odd layouts; several results; a list that is extended."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, a, pair, *, scale, table, seen, flag="yes"):
        assert flag == "no"
        assert [len(seen), seen[0].shape[0]] == [1, 4]
        seen.append(a)
        first, (second, count) = pair
        y = torch.tanh(self.layer(a * scale + first.transpose(0, 1) * second))
        y = nn.functional.dropout(y, 0.3) + table["x"][0] + seen[0].sum() + a.stride(0)
        return {"y": y, "rest": (y.sin(), count + 1, None)}


def test_any_arguments_and_results(store) -> None:
    layer, whole = fresh(Everything), torch.randn(6, 4)

    def run(call: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [torch.linspace(-1, n, 24).reshape(4, 6).requires_grad_() for n in range(5)]
        a, b, c, d, e = (t * 1 for t in leaves)
        expanded, sliced = c[:1].expand(4, 6), torch.stack([d, d])[:, ::2][1].repeat(2, 1)[::1]
        seen = [e]
        torch.manual_seed(5)
        found = call(
            whole.t() * 1 + a,
            (b.reshape(6, 4), [expanded, torch.tensor(4)]),
            scale=a,
            table={"x": [sliced[:, :]]},
            seen=seen,
            flag="no",
        )
        assert len(seen) == 2
        assert found["rest"][1:] == (torch.tensor(5), None)
        gradients = torch.autograd.grad(found["y"].sum() + found["rest"][0].prod(), [*leaves, *layer.parameters()])
        return [found["y"], *gradients]

    expected = run(layer)
    assert_same(run(lambda *a, **k: checkpoint(layer, *a, store=store, **k)), expected)
    checkpoint_modules(nn.ModuleList([layer]), Everything, store=store)
    assert_same(run(layer), expected)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "expanded", "conjugated", "leaf"])
def test_the_second_run_sees_inputs_as_the_first_did(store, layout: str) -> None:
    x = torch.randn(2, 8, 4, 6, requires_grad=True)
    conj = torch.complex(x, x).conj()
    y = {
        "transposed": lambda: (x * 1).transpose(1, 3),
        "channels_last": lambda: (x * 1).to(memory_format=torch.channels_last),
        "sliced": lambda: (x * 1)[:, 1::2, 1:],
        "expanded": lambda: (x * 1)[:1].expand(3, -1, -1, -1),
        "conjugated": lambda: conj,
        "leaf": lambda: x,
    }[layout]()
    seen: list[torch.Tensor] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.detach().clone(memory_format=torch.preserve_format))
        return (t * t).abs().sin()

    (expected,) = torch.autograd.grad(function(y).sum(), x, retain_graph=True)
    checkpoint(function, y, store=store).sum().backward()
    assert_same(x.grad, expected)
    assert_same(seen[2], seen[0])
    if layout in ("transposed", "channels_last"):
        assert seen[2].stride() == seen[0].stride()


def test_checkpoints_in_checkpoints(store) -> None:
    """The outer one's input alone is kept."""
    model = dropping()
    expected = passed(model)
    halves = nn.ModuleList([nn.Sequential(*model.transformer["h"][n : n + 2]) for n in (0, 2)])
    checkpoint_modules(model, store=store)
    for outer in (torch_checkpoint, checkpoint):
        x = torch.randn(12, 8, 16, requires_grad=True)
        kept: dict[str, Any] = {} if outer is torch_checkpoint else {"store": store}
        with measure_activations(model) as saved:
            y = x
            for half in halves:
                y = outer(half, y, use_reentrant=False, **kept)
        held = saved.nbytes + (store.nbytes + store.bytes_on_disk if store else 0)
        assert held == 2 * INPUT
        y.sum().backward()
    assert_same(passed(model), expected)


@pytest.mark.parametrize("kind", ["arena", "disk"])
def test_a_store_has_its_own_copy_of_what_changes_later(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Also where the disk is slow."""
    store, write, changed = made(kind, tmp_path), os.pwrite, threading.Event()

    def late(*arguments: Any) -> int:
        assert changed.wait(30)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", late)
    x = torch.randn(50, requires_grad=True)
    y = x * 1
    z = checkpoint(torch.sin, y, store=store)
    y.detach().zero_()
    changed.set()
    z.sum().backward()
    assert_same(x.grad, x.detach().cos())


@pytest.mark.parametrize("kind", ["arena", "disk"])
def test_what_the_second_run_was_given_outlives_the_checkpoint(kind: str, tmp_path: Path) -> None:
    store, seen = made(kind, tmp_path), []
    for step in range(4):
        x = torch.full((50,), float(step), requires_grad=True)
        checkpoint(lambda t: (seen.append(t.detach()), t.sin())[1], x * 1, store=store).sum().backward()
    assert [float(t.max()) for t in seen[1::2]] == [float(t.min()) for t in seen[1::2]] == [0, 1, 2, 3]


def test_a_graph_that_is_kept_can_be_used_again(store) -> None:
    model = dropping()
    checkpoint_modules(model, store=store)
    torch.manual_seed(3)
    loss = model(*sequences(0, 0))
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    some = torch.autograd.grad(loss, model.transformer["h"][2].ln_1.weight, retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert_same(second, first)
    assert_same(some[0], first[[n for n, _ in model.named_parameters()].index("transformer.h.2.ln_1.weight")])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_running_statistics_are_updated_once(store) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(2)))

    plain, model = fresh(make), fresh(make)
    checkpoint_modules(model, store=store)
    x = torch.randn(20, 9)
    for m in (plain, model):
        m(x).sin().sum().backward()
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert int(model[1][1].num_batches_tracked) == 1


def by_partial(block: nn.Module) -> Callable[..., Any]:
    return partial(type(block).forward, block)


def by_closure(block: nn.Module) -> Callable[..., Any]:
    before = block.forward
    return lambda x: before(x)


@pytest.mark.parametrize("patched", [by_partial, by_closure])
def test_running_statistics_of_blocks_with_a_patched_forward_are_updated_once(store, patched: Any) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(2)))

    plain, model = fresh(make), fresh(make)
    for block in (*plain, *model):
        block.forward = patched(block)
    checkpoint_modules(model, store=store)
    x = torch.randn(20, 9)
    for m in (plain, model):
        m(x).sin().sum().backward()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("of", [partial, lambda block: partial(block.forward), lambda block: partial(partial(block))])
def test_running_statistics_in_a_partial_of_a_module_are_updated_once(store, of: Callable[..., Any]) -> None:
    block = nn.BatchNorm1d(9)
    checkpoint(of(block), torch.randn(20, 9, requires_grad=True), store=store).sin().sum().backward()
    assert int(block.num_batches_tracked) == 1


def test_running_statistics_of_scripted_modules_are_updated_once(store) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(9), nn.Linear(9, 9)) for _ in range(2)))

    plain, model = fresh(make), fresh(make)
    for block in model:
        block[0] = torch.jit.script(block[0])
    checkpoint_modules(model, store=store)
    for count in (1, 2):
        for m in (plain, model):
            x = torch.linspace(-1, count, 180).reshape(20, 9)
            m(x).sin().sum().backward()
        assert int(model[1][0].num_batches_tracked) == count
        assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
