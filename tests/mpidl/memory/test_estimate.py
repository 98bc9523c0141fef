"""Memory of a rank by formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import Compression
from mpidl.memory import MIB, activation_bytes, estimate
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.zero.parameters.units import cut_into_units
from tests.mpidl.small_models import MEMORY_GPT2

GB, MB = 1e9, 1e6


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    found = estimate(7.5e9, 64, stage=stage, dtype="bf16")
    assert round(found.model_state / GB, 1) == gigabytes


@pytest.mark.parametrize(("stage", "megabytes"), [(0, 1991), (1, 1244), (2, 871), (3, 498)])
def test_gpt2_in_fp32_over_four_ranks(stage: int, megabytes: int) -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.named("gpt2"))
    found = estimate(model, 4, stage=stage)
    assert round(found.model_state / MB) == megabytes
    assert found.total == found.model_state + found.buckets
    by_number = estimate(sum(p.numel() for p in model.parameters()), 4, stage=stage)
    assert by_number.model_state == found.model_state


@pytest.mark.parametrize(
    ("optimizer", "fp32", "mixed", "without_masters"),
    [
        ("sgd", 0, 4, 0),
        ("momentum", 4, 8, 2),
        ("AdamW", 8, 12, 4),
        (torch.optim.Adagrad, 4, 8, 2),
        (2, 2, 6, 2),
        (0.5, 0.5, 4.5, 0.5),
    ],
)
def test_state_of_other_optimizers(optimizer, fp32: float, mixed: float, without_masters: float) -> None:
    found = [
        estimate(1000, 1, stage=0, optimizer=optimizer, dtype=dtype, masters=masters).optimizer
        for dtype, masters in (("fp32", True), ("bf16", True), ("fp16", False))
    ]
    assert found == [1000 * fp32, 1000 * mixed, 1000 * without_masters]


@pytest.mark.parametrize(
    ("optimizer", "each"), [(mpidl.optim.OneBitAdam, 12), ("onebitlamb", 16), (mpidl.optim.ZeroOneAdam, 20)]
)
def test_state_of_optimizers_that_send_one_bit_is_whole_on_every_rank(optimizer: Any, each: int) -> None:
    """In fp32. Between nodes the ranks of a node have a part of the errors each."""
    for stage in (0, 1):
        for dtype in ("fp32", "bf16"):
            assert estimate(1000, 8, stage=stage, dtype=dtype, optimizer=optimizer).optimizer == 1000 * each
        assert estimate(1000, 8, 2, stage=stage, optimizer=optimizer).optimizer == 1000 * (each - 3)
    for wrong in ({"stage": 2}, {"stage": 1, "offload": "cpu"}, {"stage": 0, "step_in_backward": True}):
        with pytest.raises(mpidl.ConfigurationError, match="whole on every rank; needs stage 0"):
            estimate(1000, 8, optimizer=optimizer, **wrong)


def test_state_of_diloco_is_that_of_adamw_and_the_outer_weights_with_their_momentum_in_fp32() -> None:
    """AdamW's is of 16 bits for parameters of 16 bits without masters. Errors are there where it compresses."""
    cases = [("fp32", True, 16), ("bf16", True, 20), ("bf16", False, 12)]
    for dtype, masters, each in cases:
        settings: dict[str, Any] = {"stage": 0, "dtype": dtype, "masters": masters, "optimizer": "diloco"}
        assert estimate(1000, 8, **settings).optimizer == 1000 * each
        found = estimate(1000, 8, compress="int8", **settings)
        assert (found.optimizer, found.compression) == (1000 * (each + 4), 0)
    assert estimate(1000, 8, 2, 1, shard_ranks=4, optimizer=mpidl.optim.DiLoCo).optimizer == 1000 * 16 / 4
    wrong = {
        "needs shard_ranks, those of a node, or stage 0": {"stage": 2},
        "needs no offload": {"stage": 1, "shard_ranks": 4, "offload": "cpu"},
        "compress: got 'powersgd:4' with diloco; needs one of bf16, int8, int4": {"stage": 0, "compress": "powersgd:4"},
    }
    for message, settings in wrong.items():
        with pytest.raises(mpidl.ConfigurationError, match=message):
            estimate(1000, 8, 2, optimizer="diloco", **settings)


def test_state_of_dion_is_a_momentum_and_a_factor_of_matrices_and_adams_of_others() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 256, bias=False))
    matrices, factors, others = 64 * 32 + 32 * 256, 64 * 8 + 32 * 8, 32
    for dtype in ("fp32", "bf16"):
        found = estimate(model, 1, stage=0, dtype=dtype, masters=False, optimizer="dion").optimizer
        assert found == 4 * (matrices + factors) + 8 * others
    assert estimate(1000, 4, stage=1, optimizer=mpidl.optim.Dion).optimizer == 1000 * 4 / 4


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 5, bias=False).bfloat16(), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    found = estimate(model, 1, stage=0)
    assert found.parameters == 4 * 100 + 2 * 50 + 4 * 6 + (4 * 6 + 8)  # the last: running statistics, a count
    assert found.gradients == 2 * 50 + 4 * 6
    assert found.optimizer == 12 * 50 + 8 * 6
    as_bf16 = estimate(model, 1, stage=0, dtype="bf16")
    assert (as_bf16.gradients, as_bf16.optimizer) == (2 * 56, 12 * 56)


@pytest.mark.parametrize(("stage", "cut"), [(1, 1), (2, 64), (3, 64)])
def test_gradients_reduced_in_fp32_have_four_bytes(stage: int, cut: int) -> None:
    plain, wide = (
        estimate(7.5e9, 64, stage=stage, dtype="bf16", unit=1e8, reduce_dtype=reduce) for reduce in (None, "fp32")
    )
    assert (plain.gradients, wide.gradients) == (-(-15_000_000_000 // cut), -(-30_000_000_000 // cut))
    assert (wide.parameters, wide.optimizer) == (plain.parameters, plain.optimizer)
    assert (plain.buckets, wide.buckets) == {1: (0, 0), 2: (75 * MIB,) * 2, 3: (3 * 2e8, 3 * 4e8)}[stage]


def test_buckets_of_stage_2_keep_to_the_cap_of_the_dtype_that_zero_optimizer_goes_by() -> None:
    """Without a 16-bit `dtype`, it is the parameters'."""
    settings = [{"dtype": "fp16", "reduce_dtype": "bf16"}, {"reduce_dtype": "bf16"}, {"reduce_dtype": "fp32"}]
    assert [estimate(7.5e9, 64, stage=2, **each).buckets for each in settings] == [75 * MIB, 37.5 * MIB, 75 * MIB]


def test_gradients_pass_by_buckets_where_the_backward_pass_steps() -> None:
    """Those of stages 2 and 3; of DDP one that fills besides the two largest of a dtype."""
    for stage, buckets in {0: 75 * MIB, 1: 75 * MIB, 2: 75 * MIB, 3: 3 * 4e8}.items():
        after, within = (estimate(7.5e9, 64, stage=stage, unit=1e8, step_in_backward=flag) for flag in (False, True))
        assert (within.gradients, within.buckets) == (0, buckets)
        assert (within.parameters, within.optimizer) == (after.parameters, after.optimizer)
    model = nn.Sequential(*(nn.Linear(1, n, bias=False) for n in (10, 20, 30)), nn.Linear(1, 5, False).double())
    found = [estimate(model, 2, stage=0, bucket_cap_mb=cap, step_in_backward=True).buckets for cap in (1e-6, 1)]
    assert found == [4 * 30 + 4 * (20 + 30) + 8 * 5, 4 * 60 + 4 * 60 + 8 * 5]
    with pytest.raises(mpidl.ConfigurationError, match="step_in_backward: got offload"):
        estimate(1e6, 4, offload="cpu", step_in_backward=True)


def test_offloaded_state_lies_elsewhere() -> None:
    here, away = (estimate(1e6, 4, stage=2, dtype="bf16", offload=offload) for offload in (False, "cpu"))
    assert (away.optimizer, away.offloaded) == (0, here.optimizer) == (0, 3_000_000)
    assert away.total == here.total - here.optimizer


def test_units_are_whole_once_a_node_and_not_at_all_on_one() -> None:
    model = GPT2(MEMORY_GPT2)
    one, two = (estimate(model, 8, nodes) for nodes in (1, 2))
    own = 4 * (256 + 32 + 2) * 96
    block = 4 * (12 * 96 * 96 + 13 * 96)
    gradients = own + 2 * block
    assert one.buckets == gradients
    assert two.buckets == gradients + (own + 2 * block) // 4
    assert two.node_total == 4 * two.total
    assert estimate(1e6, 8, 2, unit=1e4).buckets == 3 * 4e4 + 3 * 4e4 // 4
    for ahead in (0, 3):
        assert estimate(1e6, 8, 2, unit=1e4, prefetch=ahead).buckets == 3 * 4e4 + (2 + ahead) * 4e4 // 4
    assert estimate(model, 8, 2, prefetch=100).buckets == gradients + one.parameters * 8 // 4, "no more than there are"


def test_hybrid_sharding_cuts_over_the_group_and_gathers_inside_it() -> None:
    model = GPT2(MEMORY_GPT2)
    for stage in (1, 2, 3):
        whole, hybrid = estimate(model, 4, 1, stage), estimate(model, 16, 4, stage, shard_ranks=4)
        assert hybrid.model_state == whole.model_state
        assert hybrid.buckets == whole.buckets, "a node has all parameters"
    pairs, half = estimate(model, 16, 4, shard_ranks=8), estimate(model, 8, 2)
    assert (pairs.model_state, pairs.buckets) == (half.model_state, half.buckets)
    assert pairs.buckets > estimate(model, 16, 4, shard_ranks=2).buckets
    assert estimate(model, 16, 4, shard_ranks=16) == estimate(model, 16, 4)


@pytest.mark.parametrize(
    ("settings", "each"), [({}, 34 + 5 * 16 * 1024 / 1536), ({"recompute": "selective"}, 34), ({"dtype": "fp32"}, None)]
)
def test_activations_of_a_transformer(settings, each: float | None) -> None:
    """s b h (34 + 5 a s / h) a layer in half precision; of 4 bytes: 16 * 4 + 2 and 2 * 4 + 1 instead."""
    each = 66 + 9 * 16 * 1024 / 1536 if each is None else each
    found = activation_bytes(8, 1024, 1536, 16, 48, **settings)
    assert found == pytest.approx(48 * 1024 * 8 * 1536 * each, rel=1e-12)


def test_whole_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    one, whole = (activation_bytes(32, 1024, 1600, 25, layers) for layers in (1, 48))
    kept = activation_bytes(32, 1024, 1600, 25, 48, recompute="full")
    assert whole == 48 * one
    assert kept == one + 48 * 2 * 32 * 1024 * 1600
    cut = activation_bytes(32, 1024, 1600, 25, 48, recompute="full", partition=16)
    assert cut == one + 48 * 2 * 32 * 1024 * 1600 // 16
    assert activation_bytes(1, 1, 7, 1, 2, recompute="full", partition=4) == 34 * 7 + 5 + 2 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((0, 2), {}, "model: got 0"),
        (("gpt2", 2), {}, "model: got 'gpt2'"),
        ((1e6, 0), {}, "ranks: got 0; needs a whole number"),
        ((1e6, 4, 3), {}, "ranks: got 4 on 3 nodes"),
        ((1e6, 4), {"stage": 4}, "stage: got 4; needs 0"),
        ((1e6, 4), {"dtype": "int8"}, "^dtype: got 'int8'"),
        ((1e6, 4), {"reduce_dtype": torch.float32}, "^reduce_dtype: got torch.float32; needs one of fp32, bf16, fp16$"),
        ((1e6, 4), {"reduce_dtype": "fp32", "stage": 0}, "DDP reduces gradients in the parameters' dtype"),
        ((1e6, 4), {"offload": "gpu"}, "offload: got 'gpu'"),
        ((1e6, 4), {"optimizer": "sgdd"}, "optimizer: got 'sgdd'"),
        ((1e6, 4), {"optimizer": -1}, "optimizer: got -1"),
        ((1e6, 4), {"unit": 1e7}, "needs no more than all"),
        ((1e6, 4), {"activations": -1}, "activations: got -1"),
        ((1e6, 4), {"bucket_cap_mb": 0}, "bucket_cap_mb: got 0"),
        ((1e6, 4), {"prefetch": -1}, "prefetch: got -1; needs how many units"),
        ((1e6, 4), {"shard_ranks": 3}, "shard_ranks: got 3; needs a whole number that cuts 4 ranks"),
        ((1e6, 12, 3), {"shard_ranks": 6}, "shard_ranks: got 6 with 4 ranks a node"),
        ((1e6, 4), {"shard_ranks": 2, "stage": 0}, "DDP cuts nothing"),
    ],
)
def test_wrong_arguments(arguments, settings, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        estimate(*arguments, **settings)


def test_wrong_sizes_of_a_transformer() -> None:
    with pytest.raises(mpidl.ConfigurationError, match="heads: got 0"):
        activation_bytes(1, 8, 16, 0, 2)
    with pytest.raises(mpidl.ConfigurationError, match="recompute: got 'all'"):
        activation_bytes(1, 8, 16, 2, 2, recompute="all")


@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        ({"nodes": 1}, 4),
        ({"nodes": 2}, 4 / 4),
        ({"nodes": 2, "compress": Compression("int8", where="everywhere")}, 4),
        ({"nodes": 1, "compress": Compression("int8", where="between_nodes")}, 0),
        ({"nodes": 2, "compress": Compression("int8", undo=True)}, 8 / 4),
        ({"nodes": 2, "stage": 3, "shard_ranks": 2}, 4 / 2),
        ({"nodes": 2, "compress": "bf16"}, 0),
        ({"nodes": 2, "compress": "dgc:0.01"}, 8 / 4),
        ({"nodes": 2, "compress": Compression("dgc:0.01,momentum=0", where="everywhere")}, 4),
        ({"nodes": 2, "compress": Compression("bf16", error_feedback=True)}, 4 / 4),
    ],
)
def test_remainders_are_where_gradients_are_compressed(settings: dict[str, Any], bytes_each: float) -> None:
    found = estimate(1e6, 8, **{"stage": 2, "compress": "int8", **settings})
    assert found.compression == bytes_each * 1e6
    assert found.total == estimate(1e6, 8, **{"stage": 2, **settings, "compress": None}).total + found.compression


@pytest.mark.parametrize(("method", "each"), [("int8", 1 + 4 / 256), ("bf16", 2)])
def test_messages_of_parameters_take_those_of_one_unit_a_node(method: str, each: float) -> None:
    settings: dict[str, Any] = {"nodes": 2, "unit": 1e5, "compress_parameters": method}
    found = estimate(1e6, 8, **settings)
    assert found.compression == pytest.approx(each * 1e5 / 4, rel=1e-3)
    assert found.total == estimate(1e6, 8, **{**settings, "compress_parameters": None}).total + found.compression
    of_model = estimate(GPT2(MEMORY_GPT2), 8, **{**settings, "unit": 0})
    largest = max(sum(p.numel() for p in unit.parameters) for unit in cut_into_units(GPT2(MEMORY_GPT2)))
    assert of_model.compression == pytest.approx(each * largest / 4, rel=1e-2)
    for other in ({"nodes": 1}, {"stage": 2}, {"shard_ranks": 4}):  # where nothing is gathered
        assert not estimate(1e6, 8, **{**settings, **other}).compression
    with pytest.raises(mpidl.ConfigurationError, match="compress_parameters: got 'int4'; needs one of bf16, fp16"):
        estimate(1e6, 8, **{**settings, "compress_parameters": "int4"})
