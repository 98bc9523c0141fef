"""Dropout by index: the same elements are dropped for every tp, with sequences whole or in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, TrainingError
from mpidl.mesh import Cut
from mpidl.tensor import dropout as by_index
from mpidl.tensor.dropout import IndexedDropout, kept_elements
from mpidl.tensor.tensor_parallel import TensorParallel
from tests.mpidl.tensor.reference import all_in_float64, largest_difference, loss_of, tokens, train
from tests.mpidl.tensor.test_lora import LLAMA, adapted
from tests.mpidl.tensor.with_dropout import MODELS, REGIONS_OF_LAYERS, build, seeded

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Cut, torch.Tensor]]:
    """Kept elements of each dropout, and its cut, in the order of the calls."""
    drawn: list[tuple[Cut, torch.Tensor]] = []

    def recorded(cut: Cut, *args: Any) -> torch.Tensor:
        kept = kept_elements(cut, *args)
        drawn.append((cut, kept))
        return kept

    monkeypatch.setattr(by_index, "kept_elements", recorded)
    return drawn


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_trains_as_a_whole_one_with_dropout_on(
    comm: Communicator,
    name: str,
    sequence_parallel: bool,
    masks: list[tuple[Cut, torch.Tensor]],
    fewer: Callable[[int], int],
) -> None:
    whole, model, steps = build(name), build(name), fewer(20)
    with all_in_float64(), Mesh(tp=1, comm=comm) as one, Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(whole, one, dropout="by_index")
        mpidl.parallelize(model, mesh, dropout="by_index", sequence_parallel=sequence_parallel)
        losses = seeded(lambda: train(whole, steps))
        expected = masks[:]
        masks.clear()
        assert seeded(lambda: train(model, steps)) == pytest.approx(losses, abs=1e-10)
        assert largest_difference(model, whole) < 1e-10
    assert len(masks) == len(expected) > steps
    for (cut, kept), (of_whole, kept_of_whole) in zip(masks, expected, strict=True):
        assert cut.shape == of_whole.shape == of_whole.part_shape
        assert torch.equal(kept, cut.of(kept_of_whole))
    assert all(0.5 < kept.double().mean() < 0.99 for _, kept in expected)
    cut_dims = {dim for cut, _ in masks for dim, runs in enumerate(cut.runs) if runs != ((0, cut.shape[dim]),)}
    features = {2} if name == "t5" else set()  # T5 drops features of its feed-forward networks
    assert cut_dims == (set() if comm.size == 1 else {1} | features)  # heads, and with pieces sequences


@pytest.mark.mpi
def test_features_of_a_feed_forward_network_are_dropped_the_same(comm: Communicator) -> None:
    with Mesh(tp=1, comm=comm) as one, Mesh(tp=comm.size, comm=comm) as mesh:
        plans = [
            {"0": mpidl.tensor.ColumnParallel(), "3": mpidl.tensor.RowParallel()},
            {"": mpidl.tensor.FeedForwardParallel(inputs=("0",), output="3", input="input")},
        ]
        models = [_feed_forward() for _ in range(3)]
        mpidl.parallelize(models[0], one, plans[0], dropout="by_index")
        for model, plan in zip(models[1:], plans, strict=True):
            mpidl.parallelize(model, mesh, plan, dropout="by_index")
        x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected, *found = (seeded(lambda model=model: model(x)) for model in models)
        for y in found:
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.parametrize("region", REGIONS_OF_LAYERS)
def test_a_region_that_begins_at_a_layer_drops_alike_up_to_its_end(comm: Communicator, region: type[nn.Module]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(region(), nn.Dropout(0.5)).double()
    model = copy.deepcopy(whole)
    with Mesh(tp=1, comm=comm) as one, Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(whole, one, "auto", dropout="by_index")
        mpidl.parallelize(model, mesh, "auto", dropout="by_index")
        x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected, found = (seeded(lambda each=each: each(x)) for each in (whole, model))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _feed_forward() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 6), nn.Dropout(0.2)).double()


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("name", "targets"), [("gpt2", ("c_attn", "c_fc", "c_proj")), ("llama, two key heads", LLAMA)])
def test_adapters_drop_the_same_elements(
    comm: Communicator, name: str, targets: tuple[str, ...], sequence_parallel: bool
) -> None:
    whole, model = adapted(name, targets, 0.3), adapted(name, targets, 0.3)
    with all_in_float64(), Mesh(tp=1, comm=comm) as one, Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(whole, one, dropout="by_index")
        mpidl.parallelize(model, mesh, dropout="by_index", sequence_parallel=sequence_parallel)
        assert seeded(lambda: train(model, 5)) == pytest.approx(seeded(lambda: train(whole, 5)), abs=1e-10)
        assert largest_difference(model, whole) < 1e-10


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("checkpoints", ["reentrant", "not reentrant", "mpidl's", "mpidl's of attentions"])
def test_activation_checkpoints_drop_the_same_elements_again(
    comm: Communicator, checkpoints: str, sequence_parallel: bool
) -> None:
    kept, model = build("hf gpt2"), build("hf gpt2")
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(kept, mesh, dropout="by_index", sequence_parallel=sequence_parallel)
        if checkpoints == "mpidl's":
            mpidl.activations.checkpoint_modules(model)  # before the cut, and below after it
        mpidl.parallelize(model, mesh, dropout="by_index", sequence_parallel=sequence_parallel)
        if checkpoints == "mpidl's of attentions":
            mpidl.activations.checkpoint_modules(model, type(model.transformer.h[0].attn))
        elif checkpoints != "mpidl's":
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        for each in (kept, model):
            seeded(lambda each=each: loss_of(each, tokens(0)).backward())
        for (name, p), q in zip(model.named_parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_a_checkpoint_within_a_region_is_refused(comm: Communicator) -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x.relu(), 0.5)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.inner, self.down = nn.Linear(4, 8), Inner(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.utils.checkpoint.checkpoint(self.inner, self.up(x), use_reentrant=False))

    with Mesh(tp=2, comm=comm) as mesh:
        plan = {"0": mpidl.tensor.FeedForwardParallel(inputs=("up",), output="down", input="x")}
        model = mpidl.parallelize(nn.Sequential(Outer()), mesh, plan, dropout="by_index")
        with pytest.raises(TrainingError, match="part of 0 runs by itself"):
            model(torch.ones(2, 3, 4)).sum().backward()


@pytest.mark.mpi
def test_a_model_made_whole_again_drops_as_torch_does(comm: Communicator) -> None:
    whole, model = build("gpt2"), build("gpt2")
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout="by_index")
        mpidl.unparallelize(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in whole.modules()]
    assert [set(vars(module)) for module in model.modules()][1:] == [set(vars(m)) for m in whole.modules()][1:]
    assert seeded(lambda: loss_of(model, tokens(0)).item()) == seeded(lambda: loss_of(whole, tokens(0)).item())


@pytest.mark.mpi
def test_outside_the_model_and_in_eval_mode_nothing_changes(comm: Communicator) -> None:
    whole, model = build("gpt2").eval(), build("gpt2")
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout="by_index")
        drawn = seeded(lambda: loss_of(model, tokens(0)).item())
        assert drawn != pytest.approx(loss_of(whole, tokens(0)).item(), rel=1e-6)
        before = torch.get_rng_state()
        model.eval()
        assert loss_of(model, tokens(0)).item() == pytest.approx(loss_of(whole, tokens(0)).item())
        assert torch.equal(torch.get_rng_state(), before)
    x = torch.ones(1000)
    assert torch.equal(seeded(lambda: F.dropout(x, 0.5)), seeded(lambda: torch.ops.aten.dropout(x, 0.5, True)))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_a_failed_forward_pass_ends_the_mode(comm: Communicator) -> None:
    model = build("gpt2")
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout="by_index")
        with pytest.raises(IndexError):
            model(torch.zeros(1, 40, dtype=torch.int64))
        x = torch.ones(1000)
        assert torch.equal(seeded(lambda: F.dropout(x, 0.5)), seeded(lambda: torch.ops.aten.dropout(x, 0.5, True)))


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_a_copy_drops_by_index(comm: Communicator) -> None:
    model = build("gpt2")
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout="by_index")
        copied = copy.deepcopy(model)
        assert seeded(lambda: loss_of(copied, tokens(0)).item()) == seeded(lambda: loss_of(model, tokens(0)).item())


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_an_unknown_dropout_is_refused(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh, pytest.raises(ConfigurationError, match="'by index'"):
        mpidl.parallelize(build("gpt2"), mesh, dropout="by index")


# ---- one dropout ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mode() -> Iterator[IndexedDropout]:
    """The mode of a model that is not cut, which runs."""
    comm = Communicator()
    with Mesh(tp=1, comm=comm) as mesh, IndexedDropout(TensorParallel(mesh, by_index=True)) as mode:
        yield mode
    comm.close()


def test_dropout_scales_what_it_keeps_and_has_its_gradient(mode: IndexedDropout) -> None:
    x = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    y = seeded(lambda: F.dropout(x, 0.25))
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept.double() / 0.75)
    z = x.detach().clone()
    assert seeded(lambda: F.dropout(z, 0.25, inplace=True)) is z
    torch.testing.assert_close(z, y.detach())
    torch.testing.assert_close(seeded(lambda: torch.dropout(x, 0.25, True)), y)
    torch.testing.assert_close(seeded(lambda: nn.Dropout(0.25)(x)), y)
    assert not F.dropout(x, 1.0).any()
    before = torch.get_rng_state()
    assert torch.equal(F.dropout(x, 0.0), x)
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"1\.5"):
        F.dropout(x, 1.5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
        lambda x: F.dropout2d(x, 0.5),
        nn.RReLU(),
        lambda x: F.rrelu(x, 0.1, 0.3, True),
        lambda x: nn.MultiheadAttention(4, 2, dropout=0.5)(x[0], x[0], x[0]),
    ],
)
def test_other_kinds_of_dropout_are_refused(mode: IndexedDropout, function: Any) -> None:
    with pytest.raises(TrainingError, match=r"needs torch\.nn\.functional\.dropout"):
        function(torch.ones(2, 3, 4, 4))


_ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "mask of booleans": {"attn_mask": torch.tensor([[True, False, True], [False, False, False], [True, True, True]])},
    "mask of numbers": {"attn_mask": torch.tensor([[0.0, -1e9, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, -torch.inf]])},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("kind", _ATTENTIONS)
def test_attention_with_dropout_is_torchs_but_for_what_is_dropped(
    mode: IndexedDropout, kind: str, dims: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    q, k, v = (torch.randn(2, n, 3, 8, generator=random, dtype=torch.float32).to(dtype) for n in (4, heads, heads))
    if dims == 3:
        q, k, v = q[0], k[0], v[0]
    given = dict(_ATTENTIONS[kind])
    mask = given.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        given["attn_mask"] = mask.to(dtype)
    expected = F.scaled_dot_product_attention(q, k, v, **given)  # without dropout, by torch
    monkeypatch.setattr(mode, "drop", lambda x, p, dim: x)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, **given)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # torch rounds the shares
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- the random numbers --------------------------------------------------------------------------------------------

_SHAPE = (3, 7, 10, 20)


@pytest.mark.parametrize(
    "cut",
    [
        Cut.along(_SHAPE, 1, [(4, 7)]),
        Cut.along(_SHAPE, 3, [(0, 5), (10, 15)]),
        Cut(_SHAPE, (((0, 3),), ((2, 3),), ((5, 10),), ((0, 20),))),
        Cut.along(_SHAPE, 0, [(1, 1)]),
    ],
)
def test_a_part_keeps_what_the_whole_keeps(cut: Cut) -> None:
    whole = kept_elements(Cut.along(_SHAPE, 0, [(0, 3)]), 0.3, 1234, torch.device("cpu"))
    part = kept_elements(cut, 0.3, 1234, torch.device("cpu"))
    assert part.shape == cut.part_shape
    assert torch.equal(part, cut.of(whole))


@pytest.mark.parametrize("seed", [0, 1, 2**61 + 12345])
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_right_everywhere(p: float, seed: int) -> None:
    kept = _kept(p, seed)
    sigma = (p * (1 - p)) ** 0.5
    for dims in ((), (0,), (1,)):  # all, by column, by row
        means = kept.double().mean(dims) if dims else kept.double().mean()
        count = kept.numel() / means.numel()
        assert ((means - (1 - p)).abs() < 6.5 * sigma / count**0.5).all()
    in_row = kept.double().mean(0).sub(1 - p).mul(1024**0.5 / sigma)
    assert 0.8 < in_row.var() < 1.25  # as of independent numbers


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_not_correlated(p: float) -> None:
    first = (_kept(p, 7).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    bound = 5 / first.numel() ** 0.5
    for seed in (8, 7 + 2**32, 7 + 1024, int(torch.randint(0, 1 << 62, ()))):
        other = (_kept(p, seed).double() - (1 - p)) / (p * (1 - p)) ** 0.5
        assert abs((first * other).mean()) < bound
    for shifts in [(0, 1), (1, 0), (1, 1), (0, 7), (3, -1), (0, 512), (512, 0)]:
        assert abs((first * first.roll(shifts, (0, 1))).mean()) < bound


def _kept(p: float, seed: int) -> torch.Tensor:
    return kept_elements(Cut.along((1024, 1024), 0, [(0, 1024)]), p, seed, torch.device("cpu"))


def test_the_numbers_are_those_of_splitmix64() -> None:
    def number(seed: int, index: int) -> int:
        z = (seed + index * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert number(1234567, 1) == 6457827717110365317  # the first published number of this seed
    cut = Cut.along((2, 100), 0, [(0, 2)])
    for p in (0.1, 0.5, 0.875):
        kept = kept_elements(cut, p, 1234567, torch.device("cpu")).view(-1).tolist()
        # a signed number is compared
        assert kept == [(number(1234567, n) + 2**63) % 2**64 >= int(p * 2**64) for n in range(200)]
