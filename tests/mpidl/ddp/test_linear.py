"""Weight gradients that are computed in the buckets: where they are, and where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from mpidl.ddp import linear
from tests.mpidl.ddp.linear_layers import LAYERS, WIDTH, Two, Watched, data, made, steps

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 1, 5), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_they_are_written_to_their_places_with_the_bits_of_the_layer_alone(comm, layer: str, shape: tuple) -> None:
    alone, watched = made(LAYERS[layer]), Watched(comm, made(LAYERS[layer]))
    for step in range(3):
        x, theirs = (data(*shape, seed=step).requires_grad_() for _ in range(2))
        y = alone(theirs)
        out = watched.wrapped(x)
        assert torch.equal(out, y)
        factors = data(*y.shape, seed=7)
        alone.zero_grad()
        watched.model.zero_grad()
        (y * factors).sum().backward()
        (out * factors).sum().backward()
        assert torch.equal(x.grad, theirs.grad)
        for name, p in alone.named_parameters():
            assert torch.equal(watched.found[name][1], p.grad), name
        for p, own in zip(watched.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, own.grad)
        assert watched.in_place() == {"weight": True}


def test_weights_of_any_size_have_places_with_the_bits_of_new_memory(comm) -> None:
    """Each begins with a cache line, behind one of 77 elements, too."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 11, bias=False), nn.Linear(11, 7, bias=False), nn.Linear(7, 16, bias=False))

    for rows in (1, 12):
        alone, watched = made(make), Watched(comm, made(make))
        for _ in range(3):
            alone.zero_grad()
            watched.model.zero_grad()
            alone(data(rows, 7)).square().sum().backward()
            watched.wrapped(data(rows, 7)).square().sum().backward()
            for name, p in alone.named_parameters():
                assert torch.equal(watched.found[name][1], p.grad), name
            assert watched.in_place() == {"2.weight": True, "1.weight": True, "0.weight": True}


def test_small_weights_are_left_as_they_were(comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """To call Python for them takes longer than the copy."""
    monkeypatch.setattr(linear, "SMALLEST_WEIGHT", WIDTH * 2 * WIDTH * 4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
    watched = Watched(comm, model)
    assert ["forward" in layer.__dict__ for layer in model] == [False, True]
    watched.wrapped(data(4, WIDTH)).sum().backward()
    assert watched.in_place() == {"0.weight": False, "1.weight": True}


@pytest.mark.parametrize(
    "x", [data(5), data(0, 5), data(5, 3).t(), data(3, 2, 5).transpose(0, 1)], ids=["1-D", "empty", "2-D", "3-D"]
)
def test_inputs_of_other_forms(comm, x: torch.Tensor) -> None:
    """One sample, none, and some that are not contiguous."""
    alone, watched = made(LAYERS["linear"]), Watched(comm, made(LAYERS["linear"]))
    alone(x).square().sum().backward()
    watched.wrapped(x).square().sum().backward()
    for p, own in zip(watched.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, own.grad)


class InCheckpoint(Two):
    """The first layer is computed once more in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.hidden, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.second(hidden).square().sum()


@pytest.mark.parametrize(
    ("make", "passes", "settings", "first"),
    [
        (Two, 1, {}, True),
        (Two, 2, {}, False),  # the second pass adds to what the first has left
        (lambda: Two(2), 1, {}, False),
        (Two, 1, {"gradient_as_bucket_view": False}, False),
        (lambda: InCheckpoint(False), 1, {}, True),
        (lambda: InCheckpoint(True), 1, {"static_graph": True}, True),
    ],
    ids=["once", "two passes", "called twice", "own memory", "checkpoint", "re-entrant checkpoint"],
)
def test_ways_through_a_model(comm, make: Any, passes: int, settings: dict, first: bool) -> None:
    watched = Watched(comm, made(make), **settings)
    alone = made(make)
    for _ in range(3):
        expected = steps(alone, alone, passes)
        found = steps(watched.wrapped, watched.model, passes)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        if passes == 1:
            assert watched.in_place()["first.weight"] == first


def test_under_no_sync_they_gather_in_memory_of_their_own(comm) -> None:
    watched = Watched(comm, made(Two))
    with watched.wrapped.no_sync():
        steps(watched.wrapped, watched.model)
    assert watched.in_place() == {"first.weight": False, "second.weight": False}


def test_tensors_that_a_program_sees_keep_their_values(comm) -> None:
    """A hook of the user's, and torch.autograd.grad, get this rank's own gradient, and may keep it."""
    watched = Watched(comm, made(Two))
    seen: list[torch.Tensor] = []
    handle = watched.model.first.weight.register_hook(seen.append)
    watched.wrapped(data(4, WIDTH, seed=comm.rank)).backward()
    assert watched.in_place() == {"first.weight": False, "second.weight": True}
    handle.remove()
    seen += torch.autograd.grad(watched.wrapped(data(4, WIDTH, seed=comm.rank)), [watched.model.first.weight])
    alone = made(Two)
    alone(data(4, WIDTH, seed=comm.rank)).backward()
    watched.model.zero_grad()
    watched.wrapped(torch.zeros(4, WIDTH)).backward()
    for values in seen:
        assert torch.equal(values, alone.first.weight.grad)


def test_a_gradient_taken_within_the_pass_is_not_the_buckets(comm) -> None:
    watched = Watched(comm, made(Two))
    taken: list[torch.Tensor] = []

    def take(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner = watched.model.first(data(4, WIDTH)).sum()
        taken.extend(torch.autograd.grad(inner, [watched.model.first.weight]))

    hidden = watched.model.second.register_full_backward_hook(lambda *_: take(data(1)))
    watched.wrapped(data(4, WIDTH, seed=comm.rank)).backward()
    hidden.remove()
    alone = made(Two)
    alone.first(data(4, WIDTH)).sum().backward()
    assert torch.equal(taken[0], alone.first.weight.grad)
    assert watched.in_place()["first.weight"]


def test_a_weight_that_others_use_too(comm) -> None:
    """An embedding whose weight a linear layer shares gets the sum of both."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x)).square().sum()

    watched, alone = Watched(comm, made(Tied)), made(Tied)
    for _ in range(3):
        for model, call in ((alone, alone), (watched.model, watched.wrapped)):
            model.zero_grad()
            call(torch.tensor([1, 2, 2])).backward()
        torch.testing.assert_close(watched.model.head.weight.grad, alone.head.weight.grad)


def test_only_the_gradients_that_are_wanted_are_computed(comm) -> None:
    """A pass to the inputs alone computes no weight's."""
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    x = data(4, WIDTH).requires_grad_()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    loss = wrapped(x)
    with profiler:
        torch.autograd.grad(loss, [x])
    products = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    assert products == 2  # dx of each layer
