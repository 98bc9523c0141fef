"""Stage 3 where ranks gather: what is moved and when, what is whole at a time, and parameters that are touched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.memory import measure
from mpidl.zero.parameters.forecast import Forecast
from tests.mpidl.zero.reference import Late, strategy, wait_for_rounds

pytestmark = pytest.mark.mpi

WIDTH, BLOCKS, STEPS = 40, 5, 4
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Block(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)
        self.scale = None if trains else nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * (1 if self.scale is None else self.scale))


class Stack(nn.Module):
    """Blocks, and a small head of the model's own. adapted: a block is frozen but for one element."""

    def __init__(self, adapted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(trains=not adapted) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def trained(
    comm,
    adapted: bool = False,
    steps: int = STEPS,
    model: Stack | None = None,
    before_backward: Callable[[mpidl.ZeroOptimizer], None] = lambda _: None,
    **settings: Any,
):
    """After some steps: the model, the optimizer, and of each step what it added to the traffic."""
    model = Stack(adapted) if model is None else model
    settings = {"share_in_node": False, "lr": 0.1, "process_group": comm, **settings}
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=3, **settings)
    seen: list[dict[str, int]] = []
    for step in range(steps):
        before = vars(optimizer.traffic())
        torch.manual_seed(comm.rank + step)
        loss = model(torch.randn(3, WIDTH).requires_grad_())
        before_backward(optimizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_rounds(optimizer)  # with prefetch=2 a step leaves some under way
        seen.append({name: value - before[name] for name, value in vars(optimizer.traffic()).items()})
    return model, optimizer, seen


@pytest.fixture
def ranks_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the ranks in step, so that none has to help another out before its turn, however busy the machine is."""
    monkeypatch.setattr("mpidl.zero.parameters.sharded.FIRST_POLL_S", 60.0)


def padded(sizes: Sequence[int], ranks: int) -> int:
    """Bytes of fp32 parameters, each of which begins with a cache line of 64 bytes, in equal shards of whole lines."""
    lines = sum(-(-size // 16) for size in sizes)
    return -(-lines // ranks) * ranks * 64


@pytest.mark.parametrize("prefetch", [0, 1, 2, BLOCKS])
def test_each_unit_is_gathered_once_forward_and_once_backward(comm, ranks_in_step, prefetch: int) -> None:
    """The last blocks stay from forward to backward, as many as may be whole, as they are what backward needs first."""
    _, optimizer, seen = trained(comm, prefetch=prefetch)
    if comm.size == 1:
        return
    block, head = padded([WIDTH * WIDTH, WIDTH], comm.size), padded([WIDTH, 1], comm.size)
    assert seen[0]["gathers"] == (BLOCKS + 1) + (BLOCKS - 1)  # the order is not known yet
    whole = min(prefetch + 1, BLOCKS)
    for step in seen[2:]:  # from 2 ahead on, a step gathers for the one after it
        assert step["gathers"] == (BLOCKS + 1) + (BLOCKS - whole)
        assert step["gathered_bytes"] == (2 * BLOCKS - whole) * block + head
    assert optimizer.traffic().peak_bytes == whole * block + head
    if prefetch == 1:
        assert seen[0]["ahead"] < BLOCKS
    if prefetch:  # all but the model's own; the last block is asked for in backward when it is there already
        assert seen[-1]["ahead"] >= 2 * BLOCKS - 1


@pytest.mark.parametrize("adapted", [False, True])
def test_no_more_than_three_units_are_whole_at_a_time(comm, ranks_in_step, adapted: bool) -> None:
    """The one that computes, the next, and the model's own; frozen ones are released in backward as well."""
    model, optimizer, _ = trained(comm, adapted)
    if comm.size > 1:
        block, scale = padded([WIDTH * WIDTH, WIDTH], comm.size), padded([1], comm.size) * adapted
        head = padded([WIDTH, 1], comm.size)
        assert optimizer.traffic().peak_bytes == 2 * (block + scale) + head
        shards = (BLOCKS * (block + scale) + head) // comm.size
        assert measure(model, optimizer).parameters == pytest.approx(shards, rel=0.05)  # and none is whole now


def test_units_may_stay_whole_from_forward_to_backward(comm, ranks_in_step) -> None:
    _, optimizer, seen = trained(comm, reshard_after_forward=False)
    if comm.size > 1:
        assert all(step["gathers"] == BLOCKS + 1 for step in seen)
        assert optimizer.traffic().peak_bytes > BLOCKS * BLOCK_BYTES


class Normed(Stack):
    """Blocks with batch norms, in which the ranks wait for each other in the middle of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(block, nn.BatchNorm1d(WIDTH)) for block in self.blocks])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_rank_with_more_rounds_than_others_uses_what_these_have_gathered(comm, ranks_in_step, prefetch: int) -> None:
    """Rank 0 starts a round as a wait for a reduction does; its next one then follows the next one of the others."""

    def help_others(optimizer: mpidl.ZeroOptimizer) -> None:
        if comm.rank == 0:
            wait_for_rounds(optimizer)
            strategy(optimizer).wait_for_reduction(Late())

    weights = []
    for before_backward in (help_others, lambda _: None):
        model = mpidl.SyncBatchNorm.convert_sync_batchnorm(Normed(), comm)
        _, optimizer, _ = trained(comm, model=model, before_backward=before_backward, prefetch=prefetch)
        weights.append(optimizer.model_state_dict())
    assert comm.rank or all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_memory_goes_back_when_a_step_is_over(comm, pages_made: list[Any]) -> None:
    """Shared by the ranks of a node, as over several nodes."""
    from mpidl.gradients.backward import BackwardWatch
    from mpidl.zero.parameters.sharded import ShardedParameters
    from mpidl.zero.parameters.units import cut_into_units, lay_out

    if comm.local_size == 1:
        return
    model, watch = Stack(), BackwardWatch()
    watch.attach(model)
    sharded = ShardedParameters(model, lay_out(cut_into_units(model), comm.size), comm, watch, share_in_node=True)
    sharded.start()
    (pages,) = pages_made
    assert pages.shared
    used = lambda: os.fstat(pages.file).st_blocks * 512  # noqa: E731
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    with sharded.gathered(writable=False):
        comm.barrier()
        assert used() >= BLOCKS * BLOCK_BYTES
    sharded.release()
    comm.barrier()
    assert used() == 0


def test_a_parameter_that_is_not_whole_is_refused_by_name_or_gathered(comm) -> None:
    model, optimizer, _ = trained(comm, steps=1)
    if comm.size == 1:
        return
    weight = model.blocks[1].inner.weight
    for wrong in (
        weight.norm,
        lambda: weight.mul_(2),
        lambda: nn.init.zeros_(weight),
        lambda: weight[0],
        lambda: torch.cat([torch.ones(1, WIDTH), weight]),
        lambda: weight.data.add_(1),
    ):
        refused = pytest.raises(mpidl.TrainingError, match=r"blocks\.1\.inner\.weight: .* `with optimizer\.gathered")
        with refused, torch.no_grad():
            wrong()
    with pytest.raises(mpidl.TrainingError, match=r"blocks\.1\.inner\.weight: data "):
        weight.data.add_(1)
    # What is known without its values is known.
    assert weight.shape == (WIDTH, WIDTH)
    assert (weight.numel(), weight.requires_grad, weight.grad, weight.is_leaf) == (WIDTH**2, True, None, True)
    assert isinstance(weight, nn.Parameter)
    with optimizer.gathered(writable=False):
        expected = weight.detach().clone()
        assert type(weight) is nn.Parameter
    assert type(weight) is not nn.Parameter
    with pytest.raises(mpidl.TrainingError, match=r"blocks\.1\.inner\.weight: square "):
        weight.square()  # the other ranks may not do the same
    model(torch.ones(2, WIDTH))
    assert torch.equal(weight.square(), expected.square())  # a part of the loss
    optimizer.step()
    assert type(weight) is not nn.Parameter


def test_shards_that_change_after_the_next_pass_was_prefetched_are_gathered_anew(comm) -> None:
    """By a block, by loading, by a step with the gradients of two passes, and after an evaluation."""
    models, optimizers = [], []
    for settings in ({}, {"prefetch": 3}):
        model, optimizer, _ = trained(comm, **settings)
        models.append(model)
        optimizers.append(optimizer)
    found = []
    for model, optimizer in zip(models, optimizers, strict=True):
        with optimizer.gathered(), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        losses = [model(torch.ones(2, WIDTH)).item()]
        optimizer.step()
        kept = optimizer.state_dict(), optimizer.model_state_dict()
        for _ in range(2):
            for scale in (1.0, 2.0):
                loss = model(torch.full((2, WIDTH), scale))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(torch.ones(2, WIDTH)).item())
        optimizer.load_model_state_dict(kept[1])
        losses.append(model(torch.ones(2, WIDTH)).item())
        optimizer.step()
        found.append((losses, optimizer.model_state_dict()))
    (first, weights), (second, others) = found
    assert first == second
    assert comm.rank or all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.parametrize("wrong", [-1, 1.0, True])
def test_a_prefetch_that_is_no_number_of_units_is_refused(comm, wrong: Any) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=re.escape(f"prefetch: got {wrong!r}; needs how many units")):
        trained(comm, steps=0, prefetch=wrong)


def test_inside_gathered_no_gradient_can_be_used(comm) -> None:
    model, optimizer, _ = trained(comm, steps=1)
    if comm.size == 1:
        return
    refused = pytest.raises(mpidl.TrainingError, match=r"gathered.*of blocks\.2")
    with optimizer.gathered(model.blocks[2]), refused:
        optimizer.step()


class Shared(Stack):
    """A block's weight is used twice outside the block, and a unit returns a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([Table() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].inner.weight
        for block in self.blocks:
            x = block(x)
        x = nn.functional.linear(torch.tanh(nn.functional.linear(x, weight)), weight)
        return self.head(x * self.tables[0]() * self.tables[1]()).square().mean()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Linear(1, 1)

    def forward(self) -> torch.Tensor:
        return self.row


def test_backward_passes_after_several_forward_passes_find_what_was_touched(comm) -> None:
    """The first one lets all go; the second has it gathered again, also for the later of two uses."""
    torch.manual_seed(2)
    model, plain = Shared(), Shared()
    plain.load_state_dict(model.state_dict())
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.SGD, stage=3, share_in_node=False, lr=0.1, process_group=comm, broadcast_buffers=False
    )
    with optimizer.gathered():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.copy_(q)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = [torch.full((2, WIDTH), 0.1), torch.full((2, WIDTH), -0.2)]
    for _ in range(2):
        for m, o in ((plain, reference), (model, optimizer)):
            losses = [m(x) for x in inputs]
            for loss in losses:
                loss.backward()
            o.step()
            o.zero_grad()
    found = optimizer.model_state_dict()
    if comm.rank == 0:
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(found[name], p, rtol=1e-5, atol=1e-6, msg=name)


class Prompted(nn.Module):
    """A trained prompt is an argument of units that are frozen but for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList([PromptedBlock() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.prompt)
        return x.square().mean()


class PromptedBlock(Block):
    def __init__(self) -> None:
        super().__init__(trains=False)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x + prompt)


def test_parameters_that_are_arguments_gather_no_hooks(comm) -> None:
    torch.manual_seed(3)
    model, plain = Prompted(), Prompted()
    plain.load_state_dict(model.state_dict())
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=3, share_in_node=False, lr=0.1, process_group=comm)
    trained = [p for p in plain.parameters() if p.requires_grad]
    reference = torch.optim.SGD(trained, lr=0.1)
    counts = []
    for _ in range(4):
        for m, o in ((plain, reference), (model, optimizer)):
            m(torch.full((2, WIDTH), 0.3)).backward()
            o.step()
            o.zero_grad()
        counts.append(len(model.prompt._backward_hooks or ()))
    assert counts == [0] * 4
    found = optimizer.model_state_dict()
    if comm.rank == 0:
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(found[name], p, rtol=1e-5, atol=1e-6, msg=name)


def test_parts_of_a_model_may_be_called_without_it(comm) -> None:
    """An encoder is called so before a decoder generates."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH)
            self.encoder, self.decoder = Stack(), Stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.table(x)) + self.decoder(self.table(x))

    torch.manual_seed(2)
    model = Two()
    plain = Two()
    plain.load_state_dict(model.state_dict())
    mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=3, share_in_node=False, lr=0.1, process_group=comm)
    tokens = torch.tensor([1, 2])
    with torch.no_grad():
        torch.testing.assert_close(model.encoder(model.table(tokens)), plain.encoder(plain.table(tokens)))
        torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.parametrize("share", [False, True])
def test_changes_made_in_gathered_are_seen_inside_an_outer_one(comm, share: bool) -> None:
    model, optimizer, _ = trained(comm, steps=1, share_in_node=share)
    with optimizer.gathered(writable=False):
        with optimizer.gathered(model.head), torch.no_grad():
            model.head.weight.fill_(comm.size)
        assert (model.head.weight == comm.size).all()
    assert (optimizer.model_state_dict().get("head.weight", torch.tensor(comm.size)) == comm.size).all()


def test_engines_one_after_the_other_use_the_same_communicators(comm, duplicated: list[str]) -> None:
    for _ in range(3):
        trained(comm, steps=1)
    assert len(duplicated) <= 6


def test_the_next_uses_are_those_that_followed_the_same_two_uses() -> None:
    forecast, one, two, after = Forecast(own=9), [], [], []
    for _ in range(2):
        for use in ((9, False), (0, False), (1, False), (1, True), (0, True)):
            forecast.note(*use)
            one.append(forecast.ahead(1))
            two.append(forecast.ahead(2))
            after.append(forecast.ahead(1, next_pass=True))
    assert one[5:] == [[], [1], [1], [0], []]  # what began the first pass is not what begins those after others
    assert two[5:] == [[], [1, 0], [1, 0], [0], []]
    assert after[-1] == [9, 0]
