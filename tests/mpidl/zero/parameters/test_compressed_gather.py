"""`compress_parameters=`: stage 3 gathers rounded parameters, and steps on those of full precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.small_models import MODELS, fresh, sequences

pytestmark = pytest.mark.mpi

STEPS = 3
GATHERED: dict[str, Any] = {"stage": 3, "share_in_node": False, "compress_parameters": "int8"}
SGD = {"lr": 0.1, "momentum": 0.9}


class Block(nn.Module):
    """Odd sizes: matrices that shards' edges cut, a norm, biases. seen: weights as its last forward pass had them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(19)
        self.up, self.down = nn.Linear(19, 37), nn.Linear(37, 19, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: p.detach().clone() for name, p in self.named_parameters()}
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Blocks, one of them frozen in part, and layers of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[1].up.requires_grad_(False)
        self.head = nn.Linear(19, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()

    def seen(self) -> dict[str, torch.Tensor]:
        """The blocks' weights in the last forward pass."""
        return {f"blocks.{n}.{name}": p for n, block in enumerate(self.blocks) for name, p in block.seen.items()}


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 19, generator=torch.Generator().manual_seed(100 * step + rank))


def int8(values: torch.Tensor) -> torch.Tensor:
    """The multiple of its block's scale that is nearest to each value, in fp32."""
    blocks = nn.functional.pad(values.float().flatten(), (0, -values.numel() % 256)).view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    rounded = (blocks * torch.where(scales == 0, scales, 1 / scales)).round() * scales
    return rounded.flatten()[: values.numel()].view(values.shape).to(values.dtype)


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": int8,
    "bf16": lambda values: values.bfloat16().to(values.dtype),
    "fp16": lambda values: values.half().to(values.dtype),
}


def made(comm: Communicator, **settings: Any) -> tuple[Odd, mpidl.ZeroOptimizer]:
    model = Odd()
    return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **{**SGD, **GATHERED, **settings})


def train(comm: Communicator, model: Odd, optimizer: mpidl.ZeroOptimizer, steps: int = STEPS, first: int = 0) -> None:
    for step in range(first, first + steps):
        model(data(comm.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module, optimizer: mpidl.ZeroOptimizer) -> dict[str, torch.Tensor]:
    """The whole weights, on every rank."""
    with optimizer.gathered(writable=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_alone(ranks: int, rounded: Callable[[torch.Tensor], torch.Tensor], steps: int = STEPS) -> Odd:
    """One process: passes of all ranks with rounded weights, and steps on those of full precision."""
    model = Odd()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **SGD)
    for step in range(steps):
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(rounded(p))
        for rank in range(ranks):
            (model(data(rank, step)) / ranks).backward()
        with torch.no_grad():
            for p, values in zip(model.parameters(), kept, strict=True):
                p.copy_(values)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_equal_on_all_ranks(comm: Communicator, tensors: dict[str, torch.Tensor]) -> None:
    for name, values in tensors.items():
        theirs = values.clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs.nan_to_num(123.0), values.nan_to_num(123.0)), name


@pytest.mark.parametrize("method", ROUNDED)
def test_passes_see_rounded_weights_and_steps_those_of_full_precision(comm: Communicator, method: str) -> None:
    model, optimizer = made(comm, compress_parameters=method)
    train(comm, model, optimizer)
    masters = weights_of(model, optimizer)
    check_equal_on_all_ranks(comm, masters)
    rounded = ROUNDED[method] if comm.size > 1 else torch.clone
    alone = trained_alone(comm.size, rounded)
    for name, p in alone.named_parameters():
        torch.testing.assert_close(masters[name], p.detach(), rtol=1e-5, atol=1e-6, msg=name)
    with torch.no_grad():
        model(data(comm.rank, STEPS))
    check_equal_on_all_ranks(comm, model.seen())
    for name, values in model.seen().items():  # the same bits on any number of ranks
        assert torch.equal(values, rounded(masters[name])), name
    if comm.size > 1:
        exact = trained_alone(comm.size, torch.clone)
        assert any(not torch.allclose(masters[n], p, rtol=1e-4, atol=1e-5) for n, p in exact.named_parameters())


def test_values_are_the_nearest_multiples_of_their_blocks_scale(comm: Communicator) -> None:
    """In float64, of each parameter by itself: neither a shard's edge nor another parameter cuts or scales a block."""
    model, optimizer = made(comm)
    masters = weights_of(model, optimizer)
    with torch.no_grad():
        model(data(0, 0))
    if comm.size == 1:
        return
    for name, values in model.seen().items():
        master, found = masters[name].double().numpy().ravel(), values.double().numpy().ravel()
        for start in range(0, master.size, 256):
            block, seen = master[start : start + 256], found[start : start + 256]
            scale = np.abs(block).max() / 127
            if scale:
                assert np.abs(seen - block).max() <= scale * (0.5 + 1e-4), name
                assert np.abs(seen / scale - np.rint(seen / scale)).max() < 1e-4, name


@pytest.mark.parametrize("method", [None, "int8"])
def test_ways_to_gather_change_no_bit(comm: Communicator, method: str | None) -> None:
    found = []
    for settings in (
        {},
        {"reshard_after_forward": False},
        {"prefetch": 0},
        {"prefetch": 0, "reshard_after_forward": False},
        {"prefetch": 3},
        {"prefetch": 3, "reshard_after_forward": False},
        {"step_in_backward": True},
        {"offload": "cpu"},
    ):
        model, optimizer = made(comm, compress_parameters=method, **settings)
        train(comm, model, optimizer)
        found.append(weights_of(model, optimizer))
    for other in found[1:]:
        assert all(torch.equal(values, other[name]) for name, values in found[0].items())


def test_ranks_of_a_node_share_what_each_decompresses_a_part_of(comm: Communicator, pages_made: list[Any]) -> None:
    """They do so over several nodes. The rounds of many passes follow each other without a step between."""
    from mpidl.gradients.backward import BackwardWatch
    from mpidl.gradients.compression.settings import parameter_compressor
    from mpidl.zero.parameters.sharded import ShardedParameters
    from mpidl.zero.parameters.units import cut_into_units, lay_out

    if comm.size == 1:
        return
    model, plain, watch = Odd(), Odd(), BackwardWatch()
    watch.attach(model)
    compressor = parameter_compressor("int8")
    layouts = lay_out(cut_into_units(model), comm.size, compressor.block)
    sharded = ShardedParameters(model, layouts, comm, watch, share_in_node=True, compressor=compressor)
    sharded.start()
    assert [pages.shared for pages in pages_made] == [True]
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(int8(p))
        for step in range(10):
            assert torch.equal(model(data(comm.rank, step)), plain(data(comm.rank, step)))
            if step == 5:
                with sharded.gathered(writable=False):
                    exact = dict(Odd().named_parameters())
                    assert all(torch.equal(p, exact[name]) for name, p in model.named_parameters())
                    comm.barrier()
    sharded.release()


def test_gathered_has_full_precision_and_passes_after_it_do_not(comm: Communicator) -> None:
    """Between forward and backward too, and for blocks inside others."""
    model, optimizer = made(comm, prefetch=2, reshard_after_forward=False)
    train(comm, model, optimizer)
    masters = weights_of(model, optimizer)
    rounded = int8 if comm.size > 1 else torch.clone
    for _ in range(2):
        loss = model(data(comm.rank, 7))
        with optimizer.gathered(writable=False):
            assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())
            assert not torch.is_grad_enabled()
            model(data(comm.rank, 8))
            assert all(torch.equal(values, masters[name]) for name, values in model.seen().items())
            with optimizer.gathered(model.blocks[2]):
                model.blocks[2].up.weight.mul_(1.25)
            assert torch.equal(model.blocks[2].up.weight, masters["blocks.2.up.weight"] * 1.25)
        masters["blocks.2.up.weight"].mul_(1.25)
        with torch.no_grad():
            model(data(comm.rank, 8))
        for name, values in model.seen().items():
            assert torch.equal(values, rounded(masters[name])), name
        del loss
    assert all(torch.equal(values, masters[name]) for name, values in weights_of(model, optimizer).items())


def test_states_and_checkpoints_have_full_precision(comm: Communicator, tmp_path_factory: Any) -> None:
    model, optimizer = made(comm)
    train(comm, model, optimizer)
    masters = weights_of(model, optimizer)
    state = optimizer.model_state_dict()
    assert comm.rank or all(torch.equal(values, state[name]) for name, values in masters.items())
    where = [str(tmp_path_factory.mktemp("saved")) if comm.rank == 0 else None]
    folder = Path(mpidl.job.objects.broadcast_object(comm, where)[0])
    mpidl.checkpoint.save(folder, model, optimizer, step=STEPS)
    train(comm, model, optimizer, first=STEPS)
    other, again = made(comm)
    mpidl.checkpoint.load(folder, other, again)
    assert all(torch.equal(values, masters[name]) for name, values in weights_of(other, again).items())
    train(comm, other, again, first=STEPS)
    expected = weights_of(model, optimizer)
    assert all(torch.equal(values, expected[name]) for name, values in weights_of(other, again).items())
    whole = again.unwrap()
    assert all(torch.equal(p, expected[name]) for name, p in whole.named_parameters())


def test_values_that_are_not_finite_are_seen_on_every_rank(comm: Communicator) -> None:
    model, optimizer = made(comm)
    with optimizer.gathered():
        model.blocks[2].up.weight.view(-1)[300] = float("inf")
        model.blocks[3].norm.bias[4] = float("nan")
    loss = model(data(comm.rank, 0))
    assert not torch.isfinite(loss)
    check_equal_on_all_ranks(comm, model.seen())
    wrong = {name: int(p.isfinite().logical_not().sum()) for name, p in model.seen().items()}
    whole_blocks = comm.size > 1
    expected = {"blocks.2.up.weight": 256 if whole_blocks else 1, "blocks.3.norm.bias": 19 if whole_blocks else 1}
    assert {name: count for name, count in wrong.items() if count} == expected


def test_rounded_bf16_parameters_have_exact_fp32_masters(comm: Communicator) -> None:
    precision = mpidl.Precision(torch.bfloat16, torch.float32)
    model, optimizer = made(comm, precision=precision)
    train(comm, model, optimizer)
    masters = optimizer.model_state_dict()
    with torch.no_grad():
        model(data(comm.rank, 0).bfloat16())
    check_equal_on_all_ranks(comm, model.seen())
    rounded = int8 if comm.size > 1 else torch.clone
    for name, values in model.seen().items() if comm.rank == 0 else ():
        assert torch.equal(values, rounded(masters[name].bfloat16())), name
    plain, other = made(comm, precision=precision, compress_parameters=None)
    train(comm, plain, other)
    exact = other.model_state_dict()
    assert comm.rank or any(not torch.equal(values, exact[name]) for name, values in masters.items()) == (comm.size > 1)


@pytest.mark.parametrize("method", ["int8", "bf16"])
def test_a_small_gpt2_learns_with_gradients_and_parameters_compressed(comm: Communicator, method: str) -> None:
    def losses(**settings: Any) -> list[float]:
        model = fresh(MODELS["gpt2"], comm.rank)
        given = {"stage": 3, "share_in_node": False, "process_group": comm, "lr": 0.1, "momentum": 0.9, **settings}
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, **given)
        found = []
        for step in range(12):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step % 3, 0))
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            comm.all_reduce(mean, "avg")
            found.append(mean.item())
        return found

    exact, found = losses(), losses(compress=method, compress_parameters=method)
    assert found == pytest.approx(exact, abs=0.05)
    assert found[-1] < found[0] - 0.3


def test_bytes_are_those_of_the_messages(comm: Communicator) -> None:
    model, optimizer = made(comm, reshard_after_forward=False)
    before = optimizer.traffic().gathered_bytes
    model(data(comm.rank, 0)).backward()
    found = optimizer.traffic().gathered_bytes - before
    if comm.size == 1:
        return
    blocks = [[-(-p.numel() // 256) for p in unit] for unit in _flat_groups(model)]
    each = [-(-sum(unit) // comm.size) for unit in blocks]
    assert found == comm.size * sum((260 * count + 7) // 8 * 8 for count in each)
    place = optimizer.held_tensors()["compression"]
    assert sum(t.nbytes for t in place) == comm.size * max((260 * count + 7) // 8 * 8 for count in each)


def _flat_groups(model: Odd) -> list[list[torch.Tensor]]:
    """Parameters of each unit that all train, or all do not."""
    units = [[*block.parameters()] for block in model.blocks] + [[*model.head.parameters()]]
    groups = [[[p for p in unit if p.requires_grad is trains] for trains in (True, False)] for unit in units]
    return [group for pair in groups for group in pair if group]


def _complex() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    return model


def _integers() -> nn.Module:
    model = nn.Linear(3, 3)
    model.table = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Odd, {"compress_parameters": "int9"}, "got 'int9'; needs one of bf16, fp16, int8, or None"),
        (Odd, {"compress_parameters": "powersgd:4"}, "got 'powersgd:4'; needs one of bf16"),
        (Odd, {"compress_parameters": 8}, "got 8; needs one of bf16"),
        (Odd, {"stage": 1}, "got 'int8' with stage=1, in which every rank keeps its parameters whole; needs stage=3"),
        (Odd, {"stage": 2}, "got 'int8' with stage=2"),
        (_complex, {}, "turn is torch.complex64; needs floating-point parameters"),
        (_integers, {}, "table is torch.int32; needs floating-point parameters"),
    ],
)
def test_what_cannot_be_rounded_is_one_error_on_every_rank(
    comm: Communicator, make: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=f"compress_parameters: {message}"):
        mpidl.ZeroOptimizer(make(), torch.optim.SGD, process_group=comm, **{**SGD, **GATHERED, **settings})


def test_a_method_that_differs_over_the_ranks_is_refused(comm: Communicator) -> None:
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match="compress_parameters"):
            made(comm, compress_parameters="int8" if comm.rank else None)


@pytest.mark.thorough
def test_parameters_that_are_whole_on_all_ranks_of_tp_are_rounded_the_same(comm: Communicator) -> None:
    """Norms lie next to other parts of the cut weights on each rank of tp."""
    if comm.size % 2:
        return
    with mpidl.Mesh(comm=comm, tp=2) as mesh:
        model = fresh(MODELS["gpt2"], 0)
        mpidl.parallelize(model, mesh)
        optimizer = mpidl.ZeroOptimizer(
            model, torch.optim.SGD, stage=3, mesh=mesh, lr=0.1, share_in_node=False, compress_parameters="int8"
        )
        for step in range(3):
            x, y = (part.chunk(mesh.size("dp"))[mesh.rank("dp")] for part in sequences(step, 0))
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm):
                keep = lambda m, _, name=name: seen.update({name: m.weight.detach().clone()})  # noqa: E731
                module.register_forward_pre_hook(keep)
        with torch.no_grad():
            model(x, y)
        assert seen
        check_equal_on_all_ranks(mesh["tp"], seen)
