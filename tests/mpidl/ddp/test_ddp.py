"""DistributedDataParallel beyond following single-process training."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import pickle
import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from collectives import PartitionedAllReduce
from mpidl.gradients.buckets import MIB
from tests.mpidl.small_models import MODELS, fresh, sequences

pytestmark = pytest.mark.mpi


class Branches(nn.Module):
    """Uses the first branch on rank 0 and the second on the others; the third never."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.first, self.second, self.never = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first if self.rank == 0 else self.second)(x).sum()


def test_states_of_rank_0_are_broadcast(comm) -> None:
    torch.manual_seed(comm.rank)
    model = nn.BatchNorm1d(4)
    with torch.no_grad():
        model.weight.fill_(comm.rank + 1)
        model.running_mean.fill_(comm.rank + 1)
    mpidl.DistributedDataParallel(model, process_group=comm)
    assert (model.weight == 1).all()
    assert (model.running_mean == 1).all()


def test_gradients_are_the_mean_and_views_of_the_buckets(comm) -> None:
    model = nn.Linear(2, 3)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((3, 2), (comm.size - 1) / 2))
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1


def test_no_sync_keeps_each_ranks_gradients_until_the_next_pass(comm) -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    with wrapped.no_sync():
        wrapped(torch.tensor([[float(comm.rank)]])).backward()
    assert model.weight.grad.item() == comm.rank
    wrapped(torch.tensor([[1.0]])).backward()
    assert model.weight.grad.item() == pytest.approx((comm.size - 1) / 2 + 1)


def test_parameters_used_on_some_ranks_only(comm) -> None:
    model = Branches(comm.rank)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        wrapped(torch.ones(1, 3)).backward()
        assert torch.allclose(model.first.weight.grad, torch.full((1, 3), 1 / comm.size))
        if comm.size > 1:
            others = (comm.size - 1) / comm.size
            assert torch.allclose(model.second.weight.grad, torch.full((1, 3), others))
        assert model.never.weight.grad is None


def test_an_unused_parameter_is_named_unless_asked_for(comm) -> None:
    model = Branches(0)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    with pytest.raises(mpidl.TrainingError, match=r"no gradient to .*never\.weight.*find_unused_parameters=True"):
        wrapped(torch.ones(1, 3)).backward()


def test_buffers_follow_rank_0_after_each_training_pass(comm) -> None:
    model = nn.BatchNorm1d(2)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for _ in range(2):
        wrapped(torch.randn(4, 2) + comm.rank).sum().backward()
    rank_0s = model.running_mean.clone()
    comm.broadcast(rank_0s)
    wrapped.eval()
    wrapped(torch.ones(1, 2)).sum()
    assert torch.equal(model.running_mean, rank_0s)


def events_of_a_pass(comm, wrapped: Any, x: torch.Tensor, y: torch.Tensor) -> list[tuple[str, int]]:
    """In their order: ("launch", how many before) and ("gradient", parameter)."""
    events: list[tuple[str, int]] = []
    order = {p: number for number, p in enumerate(wrapped.module.parameters())}
    handles = [
        p.register_hook(lambda _, number=number: events.append(("gradient", number))) for p, number in order.items()
    ]
    hand_in = PartitionedAllReduce.hand_in  # which refuses a bucket before its turn

    def launched(self: PartitionedAllReduce, part: torch.Tensor) -> None:
        events.append(("launch", sum(kind == "launch" for kind, _ in events)))
        hand_in(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionedAllReduce, "hand_in", launched)
        wrapped(x, y).backward()
    for handle in handles:
        handle.remove()
    return events


@pytest.mark.ranks(2, 3, 4)
def test_buckets_are_launched_in_order_while_gradients_still_come(comm) -> None:
    """Overlap, seen in the order of events rather than on a clock; before and after buckets are cut anew."""
    wrapped = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm, bucket_cap_mb=0.004)
    for _ in range(2):
        events = events_of_a_pass(comm, wrapped, *sequences(0, 0))
        launches = [number for kind, number in events if kind == "launch"]
        assert len(launches) == len(wrapped.stats()["buckets"]) > 2
        last_gradient = max(place for place, (kind, _) in enumerate(events) if kind == "gradient")
        assert events.index(("launch", 0)) < last_gradient


def test_a_wrapper_tells_how_it_reduces(comm) -> None:
    model = fresh(MODELS["gpt2"])
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.004)
    stats = wrapped.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert sorted(name for names in stats["buckets"] for name in names) == sorted(dict(model.named_parameters()))
    assert sum(stats["bucket_bytes"]) >= 4 * sum(p.numel() for p in model.parameters())
    fills_node = comm.size > 1 and comm.nodes == 1 and comm.size >= comm.node_cores
    assert stats["reduces_at_end"] == fills_node
    assert copy.deepcopy(wrapped).stats() == {"buckets": [], "bucket_bytes": [], "reduces_at_end": False}


class Partly(nn.Module):
    """The last layer is not used; the second may be in a re-entrant checkpoint, which the graph does not show."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.hidden = hidden

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        x = checkpoint(self.layers[1], x, use_reentrant=True) if self.hidden else self.layers[1](x)
        return (x - y).square().sum()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("hidden", [False, True])
def test_no_bucket_waits_for_what_the_graph_does_not_reach(comm, hidden: bool) -> None:
    model = fresh(lambda: Partly(hidden))
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6, find_unused_parameters=True)
    x, y = torch.ones(2, 4) + comm.rank, torch.zeros(2, 4)
    for _ in range(2):
        model.zero_grad()
        events = events_of_a_pass(comm, wrapped, x, y)
        unused = [("launch", 0), ("launch", 1)]  # the last layer's bias and weight
        assert (events[-6:-4] if hidden else events[:2]) == unused, events
    alone = fresh(lambda: Partly(False))
    sum(alone(torch.ones(2, 4) + rank, y) for rank in range(comm.size)).div(comm.size).backward()
    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)


class Backwards(nn.Module):
    """Uses its parameters in the reverse of the usual order, so that their gradients arrive in that of parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.parametrize(
    ("settings", "rebuilt"),
    [({}, True), ({"find_unused_parameters": True}, False), ({"static_graph": True}, True)],
    ids=["plain", "unused", "static"],
)
def test_buckets_are_cut_anew_once_by_the_order_of_arrival(comm, settings: dict, rebuilt: bool) -> None:
    model = Backwards()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)

    def order() -> list[int]:
        """The layers, in the order in which their weights and biases are reduced."""
        return [int(name.split(".")[1]) for names in wrapped.stats()["buckets"] for name in names][::2]

    assert order() == [3, 2, 1, 0]
    with wrapped.no_sync():
        wrapped(torch.ones(1, 4)).backward()
    for _ in range(3):
        before = order()
        wrapped(torch.ones(1, 4)).backward()
    assert before == order() == ([0, 1, 2, 3] if rebuilt else [3, 2, 1, 0])


def gradient_bits(comm, cap: float, delay: float = 0.0, steps: int = 3) -> list[torch.Tensor]:
    """All gradients of some steps, each rank pausing at random moments of its passes for up to `delay` seconds."""
    pause = random.Random(comm.rank)
    model = fresh(MODELS["gpt2"], comm.rank)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=cap)
    if delay:
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(delay * pause.random()))
    found = []
    for step in range(steps):
        model.zero_grad()
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        wrapped(x, y).backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


def test_gradients_are_the_same_bits_whatever_the_buckets_and_delays(comm) -> None:
    expected = gradient_bits(comm, 25)
    theirs = torch.cat([g.flatten() for g in expected])
    comm.broadcast(theirs)
    assert torch.equal(theirs, torch.cat([g.flatten() for g in expected]))
    for cap, delay in ((1 / MIB, 0.0), (0.01, 0.004), (1024, 0.002)):
        for a, b in zip(expected, gradient_bits(comm, cap, delay), strict=True):
            assert torch.equal(a, b), (cap, delay)


def test_gradients_can_keep_memory_of_their_own(comm) -> None:
    views, own = (fresh(MODELS["gpt2"]) for _ in range(2))
    for model, as_view in ((views, True), (own, False)):
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, gradient_as_bucket_view=as_view)
        for micro in range(2):  # the second adds to what the first has left
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, micro))
            wrapped(x, y).backward()
    for a, b in zip(views.parameters(), own.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert len({p.grad.untyped_storage().data_ptr() for p in own.parameters()}) == len(list(own.parameters()))


def test_ignored_parameters_and_buffers_are_left_alone(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].bias.fill_(comm.rank)
        model[1].running_mean.fill_(comm.rank)
    wrapped = mpidl.DistributedDataParallel(
        model, process_group=comm, parameters_to_ignore=["0.bias", "1.running_mean"]
    )
    wrapped.eval()
    wrapped(torch.full((1, 2), float(comm.rank))).sum().backward()
    alone = model[0].bias.grad.clone()
    model[0].bias.grad = None
    wrapped.module(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert torch.equal(model[0].bias.grad, alone)
    assert (model[0].bias == comm.rank).all()
    assert (model[1].running_mean == comm.rank).all()


def test_the_mean_is_exact_for_ragged_batches_and_micro_batches(comm) -> None:
    """Over the tokens of all ranks and micro-batches, as one process computes it for the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    parts = [[torch.randn(1 + rank + 2 * micro, 3) for micro in range(3)] for rank in range(comm.size)]
    whole = torch.cat([x for own in parts for x in own])
    expected = torch.autograd.grad(model(whole).square().mean(), list(model.parameters()))
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    mine = parts[comm.rank]
    count = sum(map(len, mine))
    value = 0.0
    for number, x in enumerate(mine):
        with contextlib.nullcontext() if number == len(mine) - 1 else wrapped.no_sync():
            loss = mpidl.global_mean(wrapped(x).square().sum(), count, comm)
            loss.backward()
            value += loss.item()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-6)
    total = np.array([value])
    comm.all_reduce(total, "avg")
    assert total[0] == pytest.approx(float(model(whole).square().mean()), rel=1e-5)
    with pytest.raises(mpidl.TrainingError, match="needs at least one"):
        mpidl.global_mean(torch.ones(()), 0, comm)


def test_micro_steps_by_the_attribute_that_some_loops_set(comm) -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    for micro in range(3):
        wrapped.require_backward_grad_sync = micro == 2
        wrapped(torch.tensor([[float(comm.rank)]])).backward()
        assert model.weight.grad.item() == pytest.approx(
            (comm.size - 1) / 2 * 3 if micro == 2 else comm.rank * (micro + 1)
        )


def test_a_pickled_wrapper_begins_anew(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm, bucket_cap_mb=0.01)
    wrapped(*sequences(0, 0)).backward()
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.bucket_bytes_cap == wrapped.bucket_bytes_cap
    again.zero_grad()
    again(*sequences(0, 0)).backward()
    for a, b in zip(wrapped.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_wrapper_that_is_gone_leaves_nothing_behind(comm) -> None:
    for _ in range(2):
        model = fresh(MODELS["gpt2"])
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
        for _ in range(2):
            wrapped(*sequences(0, 0)).backward()
        alive = weakref.ref(wrapped), weakref.ref(wrapped.held_tensors()["gradients"][0])
        model.zero_grad()  # gradients are views of the buckets
        del wrapped
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
        second = mpidl.DistributedDataParallel(model, process_group=comm)  # and the module can be wrapped again
        second(*sequences(0, 0)).backward()


def test_bfloat16_models_are_averaged(comm) -> None:
    model = nn.Linear(4, 4).bfloat16()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped(torch.full((2, 4), float(comm.rank), dtype=torch.bfloat16)).sum().backward()
    expected = torch.tensor(comm.size - 1.0).bfloat16()
    assert torch.equal(model.weight.grad, expected.expand(4, 4))


@pytest.mark.parametrize(
    ("settings", "at_first", "later"),
    [
        ({}, True, True),
        ({"broadcast_buffers": None, "device_ids": []}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"init_sync": False}, False, True),
    ],
    ids=str,
)
def test_when_buffers_are_rank_0s(comm, settings: dict[str, Any], at_first: bool, later: bool) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("own", torch.tensor(float(comm.rank)))
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)
    assert wrapped.broadcast_buffers is later
    assert model.own == (0 if at_first else comm.rank)
    model.own.fill_(comm.rank)
    wrapped(torch.ones(1, 1)).sum().backward()
    assert model.own == (0 if later else comm.rank)
    model.own.fill_(comm.rank)
    with wrapped.join():
        pass
    assert model.own == (0 if later else comm.rank)
    model.own.fill_(comm.rank)
    again = copy.deepcopy(wrapped)
    with again.no_sync():  # which begins with its first synchronised pass
        again(torch.ones(1, 1))
    assert again.module.own == comm.rank


def test_a_copy_of_what_was_made_differently_keeps_each_ranks_weights(comm) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, comm.rank)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, init_sync=False)
    again = copy.deepcopy(wrapped)
    again(torch.ones(1, 1)).sum().backward()
    assert again.module.weight == comm.rank


def test_what_is_ignored_may_differ(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + comm.rank))
    ignored = ["1.weight", "1.bias"]
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, parameters_to_ignore=ignored)
    wrapped(torch.full((1, 2), float(comm.rank))).sum().backward()
    gathered = torch.empty(comm.size, 2)
    comm.all_gather(gathered, model[0].bias.grad)
    assert (gathered == gathered[0]).all()
    assert model[1].weight.grad.shape == (2 + comm.rank, 2)


def test_a_static_graph_can_be_set_after(comm) -> None:
    model = Branches(0)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped._set_static_graph()
    wrapped(torch.ones(1, 3)).backward()  # without an error for what is unused
    assert wrapped.static_graph
    model.rank = 1
    with pytest.raises(mpidl.TrainingError, match="static_graph=True, but the graph changed"):
        wrapped(torch.ones(1, 3)).backward()
    begun = mpidl.DistributedDataParallel(nn.Linear(3, 1), process_group=comm)
    begun(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="training has begun"):
        begun._set_static_graph()
    if comm.size > 1:
        differs = mpidl.DistributedDataParallel(nn.Linear(3, 1), process_group=comm)
        if comm.rank == 0:
            differs._set_static_graph()
        loss = differs(torch.ones(1, 3)).sum()
        with pytest.raises(mpidl.ModelMismatch, match=r"rank 0 .*static_graph=True, rank 1 .*static_graph=False"):
            loss.backward()
