"""Memory of a rank under tensor parallelism: by the plan, by formula, and counted while a model trains."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.memory import activation_bytes, estimate, measure, measure_activations, slot_bytes
from mpidl.memory.__main__ import main
from mpidl.memory.activations import DTYPES
from mpidl.models.bert import BERT, BERTConfig
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.tensor import ColumnParallel, RowParallel

UNEVEN = GPT2Config(vocab_size=257, block_size=32, layers=3, heads=7, embd=112)
BATCH, TIME = 2, 24


def meta(config: GPT2Config) -> GPT2:
    with torch.device("meta"):
        return GPT2(config)


# ---- by the plan ----------------------------------------------------------------------------------------------------


def test_a_rank_has_its_heads_features_and_tokens_and_all_else_whole() -> None:
    """2 ranks have 4 and 3 of 7 heads of width 16, 224 of 448 features, 129 and 128 of 257 tokens."""
    for rank, (heads, tokens) in enumerate([(4, 129), (3, 128)]):
        attention = 3 * 16 * heads * (112 + 1) + 16 * heads * 112 + 112
        feed_forward = 224 * (112 + 1) + 224 * 112 + 112
        norms = 4 * 112
        count = tokens * 112 + 32 * 112 + 3 * (attention + feed_forward + norms) + 2 * 112
        found = estimate(meta(UNEVEN), 2, stage=0, tp=2, tp_rank=rank)
        assert (found.parameters, found.gradients, found.optimizer) == (4 * count, 4 * count, 8 * count)
    assert estimate(meta(UNEVEN), 2, stage=0, tp=2) == estimate(meta(UNEVEN), 2, stage=0, tp=2, tp_rank=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_cut_over_the_ranks_of_dp(stage: int) -> None:
    alone = estimate(meta(UNEVEN), 2, stage=0, tp=2)
    four = estimate(meta(UNEVEN), 8, stage=stage, tp=2)
    cut = [1 if stage < first else 4 for first in (3, 2, 1)]
    assert [four.parameters * cut[0], four.gradients * cut[1], four.optimizer * cut[2]] == pytest.approx(
        [alone.parameters, alone.gradients, alone.optimizer], abs=4
    )


def test_parameters_by_number_are_cut_evenly() -> None:
    """A tenth of a model on ten ranks, and a hundredth of its state."""
    whole, cut = (estimate(1e9, 100, stage=2, dtype="bf16", tp=tp) for tp in (1, 10))
    assert (10 * cut.parameters, cut.gradients, cut.optimizer) == (whole.parameters, whole.gradients, whole.optimizer)
    assert estimate(1e9, 100, stage=3, unit=1e8, tp=10).buckets == 3 * 4e7


def test_units_of_stage_3_are_whole_once_a_node_for_the_ranks_of_dp_there() -> None:
    """2 of 4 ranks a node are of dp; a tp group that is a node has no other one to share with."""
    own, block = 4 * (129 + 32 + 2) * 112, 4 * sum(p.numel() for p in _first_of_two().parameters())
    gradients = own + 2 * block
    assert estimate(meta(UNEVEN), 8, 1, tp=2).buckets == gradients
    assert estimate(meta(UNEVEN), 8, 2, tp=2).buckets == gradients + (own + 2 * block) // 2
    assert estimate(meta(UNEVEN), 4, 2, tp=2).buckets == gradients + (own + 2 * block)


def _first_of_two() -> torch.nn.Module:
    from mpidl.tensor.counting import cut_on_meta

    return cut_on_meta(meta(UNEVEN), 2, 0).transformer["h"][0]  # type: ignore[no-any-return, union-attr, index]


def test_the_model_that_is_counted_stays_whole_and_takes_a_plan() -> None:
    torch.manual_seed(0)
    model = BERT(BERTConfig(vocab_size=61, block_size=16, layers=1, heads=2, embd=32))
    before = {name: p.clone() for name, p in model.named_parameters()}
    names = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m.out_features == 128}
    plan = dict.fromkeys(names, ColumnParallel())
    count = sum(p.numel() for p in model.parameters())
    found = estimate(model, 2, stage=0, tp=2, plan=plan)
    assert found.parameters == 4 * (count - len(names) * 64 * (32 + 1))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert estimate(model, 2, stage=0).parameters == 4 * count
    ready, auto = (estimate(model, 2, stage=0, tp=2, plan=plan).parameters for plan in (None, "auto"))
    assert ready == auto < found.parameters


def test_a_model_whose_values_are_deferred_is_counted_as_another() -> None:
    deferred = mpidl.deferred_init(GPT2, UNEVEN)
    assert estimate(deferred, 4, tp=2) == estimate(meta(UNEVEN), 4, tp=2)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((1e6, 4), {"tp": 3}, "tp: got 3; needs a whole number that divides 4 ranks"),
        ((1e6, 4), {"tp": 0}, "tp: got 0"),
        ((1e6, 4), {"tp": True}, "tp: got True"),
        ((1e6, 12, 3), {"tp": 6}, "tp: got 6 with 4 ranks a node"),
        ((1e6, 4), {"tp": 2, "tp_rank": 2}, "tp_rank: got 2; needs 0 to 1"),
        ((1e6, 4), {"slots": -1}, "slots: got -1"),
        ((meta(UNEVEN), 8), {"tp": 8}, "has 7 heads, fewer than the 8 ranks"),
        ((torch.nn.Linear(2, 2), 2), {"tp": 2}, "no ready plan for Linear"),
        ((torch.nn.Sequential(torch.nn.Linear(2, 2)), 2), {"tp": 2, "plan": {"1": RowParallel()}}, "names no module"),
    ],
)
def test_wrong_arguments(arguments: Any, settings: Any, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        estimate(*arguments, **settings)


# ---- activations by formula -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({}, 34 + 5 * 16 * 1024 / 1536),
        ({"tp": 4}, 10 + 24 / 4 + 5 * 16 * 1024 / 1536 / 4),
        ({"tp": 4, "sequence_parallel": True}, (34 + 5 * 16 * 1024 / 1536) / 4),
        ({"tp": 4, "recompute": "selective", "dropout": False}, 8 + 24 / 4),
        ({"tp": 4, "recompute": "selective", "dropout": False, "dtype": "fp32"}, 2 * (8 + 24 / 4)),
        ({"tp": 4, "recompute": "full", "dropout": False}, 2 + (8 + 24 / 4 + 4 * 16 * 1024 / 1536 / 4) / 48),
        ({"tp": 4, "recompute": "full", "sequence_parallel": True}, (2 + (34 + 5 * 16 * 1024 / 1536) / 48) / 4),
    ],
)
def test_activations_of_a_layer(settings: Any, each: float) -> None:
    """Korthikanti et al. 2022, equations 1 to 4: s b h (10 + 24 / t + 5 a s / h t), with sequence parallelism 1 / t."""
    found = activation_bytes(8, 1024, 1536, 16, 48, **settings)
    assert found == pytest.approx(48 * 1024 * 8 * 1536 * each, rel=1e-12)


def test_uneven_heads_and_sequences_are_those_of_the_rank_with_most() -> None:
    """It has 4 of 7 heads, and 3 of 5 tokens."""
    found = activation_bytes(1, 5, 14, 7, 1, "fp32", "selective", tp=2, sequence_parallel=True, dropout=False)
    assert found == 4 * (4 * 3 * 14 + 5 * (4 * 4 * 2 + 2 * 28))


def test_wrong_sizes_of_activations() -> None:
    with pytest.raises(mpidl.ConfigurationError, match="tp: got 8 with 7 heads"):
        activation_bytes(1, 8, 14, 7, 2, tp=8)
    with pytest.raises(mpidl.ConfigurationError, match="tp: got 0"):
        activation_bytes(1, 8, 14, 7, 2, tp=0)
    with pytest.raises(mpidl.ConfigurationError, match="partition: got 2 with sequence_parallel"):
        activation_bytes(1, 8, 14, 7, 2, recompute="full", partition=2, tp=2, sequence_parallel=True)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_command_knows_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--model gpt2 --ranks 8 --tp 4 --sequence-parallel --batch 2 --sequence 128 --no-dropout"
    assert main(f"{sizes} --stage 3 --json".split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tp"] == 4
    kept = activation_bytes(2, 128, 768, 12, 12, "fp32", tp=4, sequence_parallel=True, dropout=False)
    assert row["activations"] == kept
    assert row["slots"] == 4 * 2 * 128 * 768 * (1 + 2 / 4)
    assert row["parameters"] == estimate(meta(GPT2Config()), 8, tp=4).parameters
    assert row["total"] == sum(row[name] for name in ("model_state", "buckets", "activations", "slots"))
    assert main(sizes.split()) == 0
    out = capsys.readouterr().out
    assert "8 ranks on 1 node, tp=4 with sequence parallelism, fp32" in out
    assert "slots" in out.splitlines()[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model 27m --ranks 8 --tp 8", "has 7 heads, fewer than the 8 ranks"),
        ("--model 27m --ranks 8 --tp 3", "tp: got 3"),
        ("--model resnet18 --ranks 2 --tp 2", "no ready plan for ResNet"),
        ("--params 1e9 --ranks 4 --sequence-parallel", "--sequence-parallel: got --tp 1"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert message in found.err


# ---- counted --------------------------------------------------------------------------------------------------------


def sizes(comm: Communicator) -> int:
    """The number of ranks of tp: all, but two of four."""
    return 2 if comm.size == 4 else comm.size


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_agree_with_the_estimate(
    comm: Communicator, stage: int, sequence_parallel: bool, dtype: str
) -> None:
    """Within 2 %, each category, on every rank; DDP's bf16 parameters have torch's AdamW, which keeps no masters."""
    model = GPT2(UNEVEN).to(DTYPES[dtype])
    tokens = torch.arange(TIME).expand(BATCH, TIME)
    with Mesh(tp=sizes(comm), comm=comm) as mesh:
        tp = mesh.size("tp")
        slots = slot_bytes(BATCH, TIME, 112, dtype, tp=tp, sequence_parallel=sequence_parallel)
        own = {"tp": tp, "tp_rank": mesh.rank("tp"), "slots": slots, "masters": stage > 0, "bucket_cap_mb": 0.2}
        expected = estimate(model, comm.size, comm.nodes, stage, **own)
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        if stage:
            call, optimizer = (
                model,
                mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=mesh, bucket_cap_mb=0.2),
            )
        else:
            call = mpidl.DistributedDataParallel(model, mesh=mesh, bucket_cap_mb=0.2)
            optimizer = torch.optim.AdamW(model.parameters())
        call(tokens, tokens).backward()
        optimizer.step()
        found = measure(call, optimizer)
        for category in ("parameters", "gradients", "optimizer", "model_state"):
            assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category
        if comm.nodes == 1:
            assert found.slots == slots
            assert found.buckets <= 1.02 * expected.buckets


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_counted_activations_of_a_block_follow_the_formula(
    comm: Communicator, sequence_parallel: bool, dtype: str
) -> None:
    """Within 2 % on the rank with most: what the norms and attention keep besides is small numbers a token."""
    kept = {}
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        for layers in (2, 4):
            config = GPT2Config(vocab_size=64, block_size=60, layers=layers, heads=6, embd=96)
            model, tokens = GPT2(config).to(DTYPES[dtype]), torch.zeros(2, 50, dtype=torch.int64)
            mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            with measure_activations(model) as saved:
                loss = model(tokens, tokens)
            kept[layers] = torch.tensor(saved.nbytes)
            loss.backward()
            assert saved.nbytes == 0
    each = (kept[4] - kept[2]) // 2
    comm.all_reduce(each, "max")
    over = {"tp": comm.size, "sequence_parallel": sequence_parallel and comm.size > 1}
    expected = activation_bytes(2, 50, 96, 6, 1, dtype, "selective", dropout=False, **over)
    assert each.item() == pytest.approx(expected, rel=0.02)
