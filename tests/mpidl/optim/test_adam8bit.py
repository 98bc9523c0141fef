"""8-bit Adam: the code books, Adam's formula, bits that do not depend on how states are cut, states, memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.errors import ConfigurationError
from mpidl.job.objects import broadcast_object
from mpidl.memory import estimate
from mpidl.memory.counted import model_state_bytes
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.optim import Adam8bit, AdamW8bit
from mpidl.optim.blockwise import BLOCK, blocks, code_book, decode, encode
from tests.mpidl.small_models import fresh
from tests.mpidl.zero.ways import WAYS, zero

CPU = torch.device("cpu")
SHAPES = ((70, 100), (4099,), (33, 3))  # the last one stays in 32 bits


def make_model() -> nn.Module:
    """GPT-2 with parameters on both sides of 4096 elements, some of which are no multiple of 256."""
    return GPT2(GPT2Config(vocab_size=171, block_size=8, layers=2, heads=2, embd=36))


# ---- codes ------------------------------------------------------------------------------------------------


def distances(quotients: np.ndarray, signed: bool) -> np.ndarray:
    """Distances to every value of the book: that of 0 is infinite to numbers above it, if all are non-negative."""
    found = np.abs(quotients[..., None] - code_book(signed, CPU).values.double().numpy())
    if not signed:
        found[..., 0][quotients > 0] = np.inf
    return found


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_the_book(signed: bool) -> None:
    values = code_book(signed, CPU).values.double().numpy()
    assert len(set(values)) == 256
    assert values.max() == 1
    assert values[values > 0].min() == pytest.approx(0.55e-6 if signed else 0.325e-6)
    random = np.random.default_rng(0)
    given = random.normal(size=(400, BLOCK)) * 10.0 ** random.uniform(-7, 0, size=(400, BLOCK))
    # On borders and next to them, where a look-up by the first bits alone would err.
    borders = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(borders, np.float32(side)) for side in (-2, 2)] + [borders]
    given = np.concatenate([given, np.resize(np.concatenate(near), (3, BLOCK))]).astype(np.float32)
    given = given if signed else np.abs(given)
    given[:, 0] = 1.0
    given[1, 1:4] = 0.0, 1e-44, 1e-12
    given = np.clip(given, -1, 1)
    codes, scales = torch.empty(given.size, dtype=torch.uint8), torch.empty(len(given), 1)
    encode(torch.from_numpy(given.copy()).view(-1), codes, scales, signed)
    assert (scales == 1).all()
    found = np.abs(values[codes.numpy()].reshape(given.shape) - given)
    nearest = distances(given, signed).min(-1)
    np.testing.assert_allclose(found, nearest, rtol=0, atol=1.2e-7)  # a border of fp32


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_decoded_is_encoded_to_the_same_bits(signed: bool) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(64, BLOCK, generator=random) * torch.logspace(-20, 6, 64)[:, None]
    values[5] = 0
    values[7] = -values[7].abs()
    values = (values if signed else values.abs()).view(-1)
    values[-100:] = 0
    size = values.numel() - 100
    codes, scales = torch.empty(size, dtype=torch.uint8), torch.empty(64, 1)
    encode(values.clone(), codes, scales, signed)
    wide = torch.empty_like(values)
    decode(codes, scales, signed, wide)
    again, scales_again = torch.empty_like(codes), torch.empty_like(scales)
    encode(wide.clone(), again, scales_again, signed)
    assert torch.equal(codes, again)
    assert torch.equal(scales, scales_again)
    relative = (
        (wide - values).abs().view(64, BLOCK) / values.view(64, BLOCK).abs().amax(1, keepdim=True).clamp_min(1e-30)
    ).max()
    assert relative < (0.0071 if signed else 0.0036)  # half a step of the coarsest power of ten


# ---- the formula ------------------------------------------------------------------------------------------


def through_8_bits(values: np.ndarray, signed: bool) -> np.ndarray:
    """Rounds as the paper does, but v above 0 never to 0, in float64, by a search of the whole book."""
    known = code_book(signed, CPU).values.double().numpy()
    padded = np.zeros(blocks(values.size) * BLOCK)
    padded[: values.size] = values.reshape(-1)
    rows = padded.reshape(-1, BLOCK)
    places = np.abs(rows).argmax(1)
    scales = np.take_along_axis(rows, places[:, None], 1)
    quotients = rows / np.where(scales == 0, 1, scales)
    codes = distances(quotients, signed).argmin(-1)
    return (known[codes] * scales).reshape(-1)[: values.size].reshape(values.shape)


def gradient(step: int, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([step, *shape])
    return random.normal(size=shape) * 10.0 ** random.uniform(-4, 0, size=shape)


@pytest.mark.parametrize(("kind", "decay", "maximize"), [(Adam8bit, 0.1, False), (AdamW8bit, 0.1, True)])
def test_weights_follow_the_formula(kind: Any, decay: float, maximize: bool) -> None:
    own = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    lr, (b1, b2), eps = 1e-2, (0.9, 0.99), 1e-8
    optimizer = kind(own, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, maximize=maximize)
    expected = [np.ones(shape) for shape in SHAPES]
    moments = [[np.zeros(shape), np.zeros(shape)] for shape in SHAPES]
    for step in range(1, 9):
        for n, (p, shape) in enumerate(zip(own, SHAPES, strict=True)):
            g = gradient(step, shape)
            p.grad = torch.from_numpy(g).float()
            g = -g if maximize else g
            if kind is AdamW8bit:
                expected[n] *= 1 - lr * decay
            else:
                g = g + decay * expected[n]
            m, v = moments[n]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            expected[n] -= lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
            wide = p.numel() < 4096
            moments[n] = [m, v] if wide else [through_8_bits(m, True), through_8_bits(v, False)]
        optimizer.step()
    for n, p in enumerate(own):
        off = np.abs(p.detach().numpy() - expected[n])
        # A quotient that single precision puts on the other side of a border takes the next code.
        assert np.quantile(off, 0.99) < 1e-5
        assert off.max() < 2e-2
        kept = optimizer.state[p]["exp_avg"].dtype
        assert kept == (torch.uint8 if n < 2 else torch.float32)


@pytest.mark.parametrize("small", [1e-2, 1e-3, 1e-4, 1e-6])
def test_steps_are_as_long_as_adam_s_where_gradients_in_a_block_differ_widely(small: float) -> None:
    """A second moment that is rounded to 0 next to a first one that is not makes a step of thousands of lr."""
    sizes = torch.full((4096,), small)
    sizes[::BLOCK] = 1.0

    def longest(kind: Any) -> float:
        p, random, found = nn.Parameter(torch.zeros(4096)), torch.Generator().manual_seed(0), 0.0
        optimizer = kind([p], lr=1e-3)
        for _ in range(200):
            before = p.detach().clone()
            p.grad = torch.randn(4096, generator=random) * sizes
            optimizer.step()
            found = max(found, float((p.detach() - before).abs().max()) / 1e-3)
        return found

    assert longest(Adam8bit) < 2.5 * longest(torch.optim.Adam)


def test_it_stays_near_adamw_and_takes_a_quarter_of_the_memory() -> None:
    def run(kind: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any, Any]:
        p = nn.Parameter(torch.zeros(128, 300, dtype=dtype))
        optimizer = kind([p], lr=1e-2)
        for step in range(30):
            p.grad = torch.from_numpy(gradient(step, (128, 300))).to(dtype) + 0.3
            optimizer.step()
        return p.detach(), optimizer, p

    whole, _, _ = run(torch.optim.AdamW)
    found, optimizer, p = run(AdamW8bit)
    assert (found - whole).norm() < 0.02 * whole.norm()
    module = nn.Module()
    module.w = p
    p.grad = None
    held = model_state_bytes(module, optimizer)
    elements = p.numel()
    assert held["optimizer"] == 2 * elements + 2 * 4 * (elements // BLOCK)
    assert estimate(module, 1, stage=0, optimizer="adamw8bit").optimizer == held["optimizer"]
    assert estimate(module, 1, stage=0, optimizer=AdamW8bit).optimizer == held["optimizer"]
    half, _, _ = run(AdamW8bit, torch.bfloat16)
    assert (half.float() - whole).norm() < 0.05 * whole.norm()


def test_a_layout_in_another_order_of_memory_is_stepped_on() -> None:
    first = torch.arange(8 * 16 * 6 * 6).float().view(8, 16, 6, 6)
    plain, turned = nn.Parameter(first.clone()), nn.Parameter(first.clone().to(memory_format=torch.channels_last))
    for p in (plain, turned):
        optimizer = AdamW8bit([p], lr=0.1)
        for step in range(3):
            p.grad = torch.from_numpy(gradient(step, (8, 16, 6, 6))).float()
            optimizer.step()
    assert torch.equal(plain, turned)
    assert not turned.is_contiguous()


def test_states_are_those_of_adamw_and_come_back_to_the_bit() -> None:
    def steps(own: list[nn.Parameter], optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            for p in own:
                p.grad = torch.from_numpy(gradient(step, tuple(p.shape))).float()
            optimizer.step()

    def start() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]

    own = start()
    optimizer = AdamW8bit(own)
    steps(own, optimizer, 0, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert {entry["exp_avg"].dtype for entry in state["state"].values()} == {torch.float32}
    again = [nn.Parameter(p.detach().clone()) for p in own]
    other = AdamW8bit(again)
    other.load_state_dict(state)
    wide = [nn.Parameter(p.detach().clone()) for p in own]
    adamw = torch.optim.AdamW(wide)
    adamw.load_state_dict(state)
    steps(own, optimizer, 3, 6)
    steps(again, other, 3, 6)
    steps(wide, adamw, 3, 4)
    for p, q in zip(own, again, strict=True):
        assert torch.equal(p, q)
    back = AdamW8bit(again)
    back.load_state_dict(adamw.state_dict())
    assert back.state[again[0]]["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: got -1.0; needs a number of at least 0"),
        ({"betas": (0.9, 1.0)}, "betas: got"),
        ({"eps": -1e-8}, "eps: got -1e-08; needs a number of at least 0"),
        ({"weight_decay": "some"}, "weight_decay: got 'some'; needs a number"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AdamW8bit([nn.Parameter(torch.ones(2))], **settings)


# ---- sharded ----------------------------------------------------------------------------------------------


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 171, (12, 8), generator=random)
    return tuple(part.chunk(ranks)[rank] for part in (tokens, (tokens * 3 + 1) % 171))  # type: ignore[return-value]


class Run:
    """Training by an engine, or in one process."""

    def __init__(self, kind: str, comm: Any, rank: int = 0, **settings: Any) -> None:
        self.model = self.call = fresh(make_model, rank)
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        if kind in WAYS:
            self.optimizer: Any = zero(self.model, comm, kind, AdamW8bit, lr=1e-3, **settings)
            return
        if kind == "ddp":
            self.call = mpidl.DistributedDataParallel(self.model, process_group=comm)
        self.optimizer = AdamW8bit(self.model.parameters(), lr=1e-3)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.call(*batch(step, self.rank, self.ranks)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and moments, whole, on rank 0."""
        zero = isinstance(self.optimizer, mpidl.ZeroOptimizer)
        whole = self.optimizer.model_state_dict() if zero else dict(self.model.state_dict())
        packed = self.optimizer.state_dict()
        if self.rank != 0:
            return {}
        states = {f"{n}.{key}": value for n, entry in packed["state"].items() for key, value in entry.items()}
        return {**{name: value.clone() for name, value in whole.items()}, **states}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.mpi
def test_every_engine_gives_the_bits_of_ddp(comm) -> None:
    """So that blocks, and the parameters that stay in 32 bits, do not depend on how the state is cut."""
    expected = Run("ddp", comm)
    expected.steps(0, 4)
    reference = expected.state()
    single = Run("single", comm.split_self())
    single.steps(0, 4)
    for name, p in single.model.named_parameters():
        off = (p.detach() - expected.model.get_parameter(name).detach()).abs()
        assert off.max() < 1e-3, name  # of 4 steps of 1e-3
        assert off.mean() < 1e-5, name
    for settings in (
        {"kind": "stage 1"},
        {"kind": "stage 2"},
        {"kind": "stage 2", "step_in_backward": True},
        {"kind": "stage 2", "offload": "cpu"},
        {"kind": "stage 3"},
        {"kind": "stage 3", "offload": mpidl.Offload("disk", buffer_mb=0.05)},
        {"kind": "stage 3 gathered"},
    ):
        run = Run(comm=comm, **settings)
        run.steps(0, 4)
        same(run.state(), reference)


@pytest.mark.mpi
def test_a_rank_holds_two_bytes_a_parameter_of_its_share(comm) -> None:
    run = Run("stage 2", comm)
    run.steps(0, 1)
    held = torch.tensor([sum(t.numel() * t.element_size() for t in run.optimizer.held_tensors()["optimizer"])])
    comm.all_reduce(held)
    large = sum(p.numel() for p in run.model.parameters() if p.numel() >= 4096)
    small = sum(p.numel() for p in run.model.parameters() if p.numel() < 4096)
    counted = sum(blocks(p.numel()) for p in run.model.parameters() if p.numel() >= 4096)
    assert int(held) == 2 * large + 8 * counted + 8 * small
    assert estimate(run.model, 1, stage=1, optimizer="adamw8bit").optimizer == pytest.approx(int(held), abs=8 * 20)


@pytest.mark.mpi
@pytest.mark.parametrize("saved", ["stage 2", "disk"])
def test_a_checkpoint_of_two_ranks_goes_to_three_and_to_one(comm, tmp_path: Path, saved: str) -> None:
    path = Path(broadcast_object(comm, str(tmp_path))) / "ckpt"
    offload = {"offload": mpidl.Offload("disk", buffer_mb=0.05)}
    two = comm.split(0 if comm.rank < 2 else None)
    reference: dict[str, torch.Tensor] = {}
    if two is not None:
        run = Run("stage 2", two, **(offload if saved == "disk" else {}))
        run.steps(0, 3)
        mpidl.checkpoint.save(path, run.model, run.optimizer)
        reference = run.state()
    comm.barrier()
    for kind, settings in (("stage 1", {}), ("stage 3", {}), ("stage 2", offload)):
        run = Run(kind, comm, rank=1, **settings)
        mpidl.checkpoint.load(path, run.model, run.optimizer)
        same(run.state(), reference)
        whole = run.optimizer.state_dict()
        again = Run(kind, comm, rank=1, **settings)
        again.optimizer.load_model_state_dict(run.optimizer.model_state_dict())
        again.optimizer.load_state_dict(whole)
        same(again.state(), reference)
    alone = comm.split_self()
    if comm.rank == 0:
        single = Run("single", alone, rank=1)
        mpidl.checkpoint.load(path, single.model, single.optimizer, process_group=alone)
        same(single.state(), reference)
    alone.close()
    if two is not None:
        two.close()
