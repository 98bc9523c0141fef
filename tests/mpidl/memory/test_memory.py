"""Memory of a rank: by formula, on the command line, and counted while models train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from mpidl import Compression
from mpidl.memory import (
    MIB,
    activation_bytes,
    data_mib,
    estimate,
    measure,
    measure_activations,
    peak_rss_mib,
    pss_mib,
    rss_mib,
    storage_bytes,
)
from mpidl.memory.__main__ import estimates, main, parse, table
from mpidl.memory.estimate import DTYPES
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.zero.parameters.units import cut
from tests.harness import launch
from tests.mpidl.small_models import Mixture, sequences

GB, MB = 1e9, 1e6
COUNTED = GPT2Config(vocab_size=256, block_size=32, layers=6, heads=4, embd=96)

# ---- by formula -----------------------------------------------------------------------------------------------------


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
    model = GPT2(COUNTED)
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
    model = GPT2(COUNTED)
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


# ---- the command line -----------------------------------------------------------------------------------------------


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return launch.run([sys.executable, "-m", "mpidl.memory", *arguments], 60, launch.ROOT, launch.environment(**env))


def test_the_command_prints_a_table_and_leaves_mpi_alone() -> None:
    """In the environment of a rank whose launcher is gone, where initialising MPICH fails."""
    done = command("--params", "7.5e9", "--ranks", "64", "--dtype", "bf16", PMI_FD="77", PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "7.5 B parameters, 64 ranks on 1 node" in lines[0]
    states = [line[len("0 (DDP)") :].split()[3] for line in lines[3:7]]
    assert states == ["120.0", "31.4", "16.6", "1.9"]
    assert len({len(line) for line in lines[2:7]}) == 1, "aligned"


def test_the_command_imports_mpi_without_initialising_it() -> None:
    program = (
        "import runpy, sys\n"
        "sys.orig_argv, sys.argv = [sys.executable, '-m', 'mpidl.memory'], ['-m', '--params=1e9', '--ranks=2']\n"
        "try:\n    runpy.run_module('mpidl.memory', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code)\n"
        "from mpi4py import MPI\nprint(MPI.Is_initialized())\n"
    )
    done = launch.run([sys.executable, "-c", program], 60, launch.ROOT, launch.environment())
    assert done.stdout.splitlines()[-2:] == ["0", "False"], done.stderr


def test_the_command_knows_hybrid_sharding(capsys) -> None:
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 128 --nodes 2 --shard-ranks 64 --dtype bf16")
    assert status == 0
    assert "128 ranks on 2 nodes, state cut over 64, bf16" in out
    assert [line[len("0 (DDP)") :].split()[3] for line in out.splitlines()[3:7]] == ["120.0", "31.4", "16.6", "1.9"]
    assert run_here(capsys, "--params 1e9 --ranks 4 --shard-ranks 3")[0] == 2


def test_the_command_knows_the_dtype_of_the_reduction(capsys) -> None:
    """The ZeRO paper's table with two more bytes a parameter for gradients, but DDP's."""
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 64 --dtype bf16 --reduce-dtype fp32")
    assert status == 0
    assert "bf16 with fp32 masters, gradients of ZeRO in fp32, adam" in out
    assert [line[len("0 (DDP)") :].split()[3] for line in out.splitlines()[3:7]] == ["120.0", "46.4", "16.9", "2.1"]


def test_the_command_knows_the_step_in_backward(capsys) -> None:
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 64 --unit 1e8 --step-in-backward")
    assert status == 0
    assert "fp32, adam, stepped in backward" in out
    rows = [line[len("0 (DDP)") :].split() for line in out.splitlines()[3:7]]
    assert [(row[1], row[4]) for row in rows] == [("0.0", "0.1"), ("0.0", "0.1"), ("0.0", "0.1"), ("0.0", "1.2")]


def run_here(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """The command in this process."""
    from mpidl.memory.__main__ import main

    status = main(line.split())
    found = capsys.readouterr()
    return status, found.out, found.err


def test_the_command_gives_json_of_a_model_by_name(capsys) -> None:
    line = "--model gpt2 --ranks 4 --stage 3 --batch 2 --sequence 128 --offload disk --json"
    status, out, _ = run_here(capsys, line)
    (row,) = json.loads(out)
    assert status == 0
    assert row["parameters"] == row["gradients"] == 124439808
    assert row["offloaded"] == 2 * 124439808
    assert row["activations"] == activation_bytes(2, 128, 768, 12, 12, "fp32")
    assert row["total"] == row["model_state"] + row["buckets"] + row["activations"]


@pytest.mark.parametrize("model", ["resnet50", "bert-base", "27m"])
def test_other_models_by_name(capsys, model: str) -> None:
    status, out, _ = run_here(capsys, f"--model {model} --ranks 2")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["0", "1", "2", "3"]


def test_gpt2_on_the_command_line(capsys) -> None:
    _, out, _ = run_here(capsys, "--params 124.44M --ranks 4")
    assert all(f" {megabytes} " in out for megabytes in ("1991.0", "1244.4", "871.1", "497.8"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 2", "--params --model is required"),
        ("--params 0 --ranks 2", "--params: got 0; needs at least 1"),
        ("--params many --ranks 2", "invalid number value: 'many'"),
        ("--params 1e9 --ranks 0", "ranks: got 0"),
        ("--params 1e9 --ranks 4 --nodes 3", "ranks: got 4 on 3 nodes"),
        ("--params 1e9 --ranks 4 --stage 4", "invalid choice: '4'"),
        ("--params 1e9 --ranks 4 --optimizer sgdd", "optimizer: got 'sgdd'"),
        ("--params 1e9 --ranks 4 --reduce-dtype int8", "--reduce-dtype: invalid choice: 'int8'"),
        ("--params 1e9 --ranks 4 --batch 2", "need --layers, --hidden, --heads, --sequence too"),
        ("--model lenet --ranks 4", "--model: got 'lenet'"),
        ("--model gpt2 --ranks 4 --heads 3", "--model gpt2 has its own"),
        ("--model resnet18 --ranks 4 --unit 3", "unit: got one together with a model"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(capsys, line: str, message: str) -> None:
    status, out, err = run_here(capsys, line)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


# ---- counted --------------------------------------------------------------------------------------------------------


def test_the_process_is_as_large_as_the_system_says() -> None:
    assert 0 < data_mib() <= pss_mib() <= rss_mib() + 1
    assert rss_mib() <= peak_rss_mib() + 1
    block = torch.ones(16 * MIB // 4)
    assert storage_bytes([block, block[3:], block.view(2, -1)]) == 16 * MIB


def test_activations_are_distinct_storages_that_are_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh())
    x = torch.randn(32, 8)
    with measure_activations(model) as saved:
        y = model(x)
        assert saved.nbytes == 4 * 32 * (8 + 16 + 4)  # input, both outputs of tanh, of which one is an input too
        (y * y.detach()).sum().backward()
    assert saved.nbytes == 0
    assert saved.peak == 4 * 32 * (8 + 16 + 4)
    with measure_activations() as with_parameters:
        model(x).sum()
    assert with_parameters.peak == saved.peak + 4 * 16 * 4


def test_activations_do_not_outlive_a_graph_that_is_dropped_and_change_no_gradient() -> None:
    torch.manual_seed(0)
    model = GPT2(COUNTED)
    tokens = torch.randint(0, 256, (2, 32))
    model(tokens, tokens).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with measure_activations(model) as saved:
        model(tokens, tokens)
        assert saved.nbytes == 0
        loss = model(tokens, tokens)
    assert saved.nbytes == saved.peak > 0
    loss.backward()
    assert saved.nbytes == 0
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_checkpoints_keep_their_inputs() -> None:
    layer = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(8, 64, requires_grad=True)
    with measure_activations(layer) as plain:
        plain_loss = layer(x).sum()
    with measure_activations(layer) as kept:
        loss = checkpoint(layer, x, use_reentrant=False).sum()
    assert plain.nbytes == 4 * 8 * (64 + 2 * 256)
    assert kept.nbytes == 4 * 8 * 64
    (plain_loss + loss).backward()


def test_activations_of_gpt2_follow_the_formula() -> None:
    """Fused attention keeps no scores; without dropout no masks: 16 of the 16.5 values of fp32 a layer."""
    config = GPT2Config(vocab_size=64, block_size=64, layers=8, heads=4, embd=128)
    model, tokens = GPT2(config), torch.zeros(4, 64, dtype=torch.int64)
    with measure_activations(model) as saved:
        loss = model(tokens, tokens)
    assert loss.requires_grad
    assert saved.nbytes == pytest.approx(activation_bytes(4, 64, 128, 4, 8, "fp32", recompute="selective"), rel=0.05)


def test_categories_of_a_plain_model_and_optimizer() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    psi = 30 * 20 + 20 + 40
    before = measure(model, optimizer)
    assert (before.parameters, before.total) == (4 * psi + 4 * 40 + 8,) * 2
    with measure_activations(model) as saved:
        model(torch.randn(5, 30)).sum().backward()
        optimizer.step()
        output = model(torch.randn(5, 30))
        found = measure(model, optimizer, saved)
    assert output.requires_grad
    assert (found.gradients, found.optimizer, found.buckets) == (4 * psi, 8 * psi, 0)
    assert found.activations >= 4 * 5 * (30 + 20)
    assert found.model_state == 16 * psi + 4 * 40 + 8
    assert found.rss > found.total


def engine(model: nn.Module, comm, stage: int, precision: mpidl.Precision | None = None, compress=None):
    """What to call, and the optimizer."""
    settings = {"process_group": comm, "bucket_cap_mb": 0.2, "compress": compress}
    if stage:
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision=precision, **settings)
    call = mpidl.DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False, **settings)
    return call, torch.optim.AdamW(model.parameters())


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_of_compression_agree_with_the_estimate(comm, stage: int) -> None:
    """The remainders of a first step, which might still be skipped, are there twice."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for undo in (True, False):
        model, compress = GPT2(COUNTED), Compression("int8", where="everywhere", undo=undo)
        call, optimizer = engine(model, comm, stage, compress=compress)
        call(tokens, tokens).backward()
        optimizer.step()
        found = measure(call, optimizer)
        expected = estimate(model, comm.size, comm.nodes, stage, bucket_cap_mb=0.2, compress=compress)
        assert found.compression == pytest.approx(expected.compression, rel=0.02)
        assert (found.compression > 0) == (comm.size > 1)


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
    of_model = estimate(GPT2(COUNTED), 8, **{**settings, "unit": 0})
    largest = max(sum(p.numel() for p in unit.parameters) for unit in cut(GPT2(COUNTED)))
    assert of_model.compression == pytest.approx(each * largest / 4, rel=1e-2)
    for other in ({"nodes": 1}, {"stage": 2}, {"shard_ranks": 4}):  # where nothing is gathered
        assert not estimate(1e6, 8, **{**settings, **other}).compression
    with pytest.raises(mpidl.ConfigurationError, match="compress_parameters: got 'int4'; needs one of bf16, fp16"):
        estimate(1e6, 8, **{**settings, "compress_parameters": "int4"})


def test_the_command_line_counts_compression() -> None:
    rows, _ = estimates(parse(["--params", "1e6", "--ranks", "4", "--nodes", "2", "--compress", "int8"]))
    assert [row.compression for row in rows] == [2e6] * 4
    assert "compression" in table(rows).splitlines()[1]
    assert main(["--params", "1e6", "--ranks", "4", "--compress", "int9"]) == 2
    line = "--model gpt2 --ranks 4 --nodes 2 --stage 3 --compress-parameters int8"
    assert estimates(parse(line.split()))[0][0].compression > 1e6


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_agree_with_the_estimate(comm, stage: int, dtype: str) -> None:
    """Within 2 %, each category; DDP's bf16 parameters have torch's AdamW, which keeps no masters."""
    model = GPT2(COUNTED).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    call, optimizer = engine(model, comm, stage)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    call(tokens, tokens).backward()
    optimizer.step()
    found = measure(call, optimizer)
    expected = estimate(model, comm.size, comm.nodes, stage, masters=stage > 0, bucket_cap_mb=0.2)
    for category in ("parameters", "gradients", "optimizer", "model_state"):
        assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category
    assert found.activations == 0
    if comm.nodes == 1:
        assert found.buckets <= 1.02 * expected.buckets


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_of_a_step_in_backward_agree_with_the_estimate(comm, stage: int) -> None:
    """At their most within a pass, as seen at each block: no more than the estimate, and half of it at least."""
    model = GPT2(COUNTED)
    if stage:
        settings = {"process_group": comm, "bucket_cap_mb": 0.2, "step_in_backward": True}
        call, optimizer = model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **settings)
    else:
        call = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.2)
        optimizer = torch.optim.AdamW(model.parameters())
        call.step_in_backward(optimizer)
    seen: list[int] = []

    def look(*_) -> None:
        now = measure(call, optimizer)
        seen.append(now.gradients + now.buckets)

    for block in model.transformer["h"]:
        block.register_full_backward_hook(look)
    tokens = torch.arange(32).expand(1, 32)
    for _ in range(2):
        call(tokens, tokens).backward()
        look()
        optimizer.step()
        optimizer.zero_grad()
    found = measure(call, optimizer)
    expected = estimate(model, comm.size, comm.nodes, stage, bucket_cap_mb=0.2, step_in_backward=True)
    assert found.gradients == expected.gradients == 0
    assert expected.total < estimate(model, comm.size, comm.nodes, stage, bucket_cap_mb=0.2).total or stage > 1
    if comm.nodes == 1:
        assert expected.buckets / 2 <= max(seen) <= 1.02 * expected.buckets


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("own", "dtype", "reduce"), [("fp32", "bf16", "fp32"), ("fp32", None, "bf16"), ("bf16", None, "fp32")]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counted_bytes_agree_with_the_estimate_whatever_gradients_are_reduced_in(
    comm, stage: int, own: str, dtype: str | None, reduce: str
) -> None:
    """Within 2 %, each category, for a model of dtype `own` with Precision(dtype, reduce)."""
    model = GPT2(COUNTED).to(DTYPES[own])
    precision = mpidl.Precision(None if dtype is None else DTYPES[dtype], DTYPES[reduce])
    settings = {"dtype": dtype, "reduce_dtype": reduce, "bucket_cap_mb": 0.2}
    expected = estimate(model, comm.size, comm.nodes, stage, **settings)
    call, optimizer = engine(model, comm, stage, precision)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    call(tokens, tokens).backward()
    optimizer.step()
    found = measure(call, optimizer)
    categories = ("parameters", "gradients", "optimizer", "model_state", *(("buckets",) if comm.nodes == 1 else ()))
    for category in categories:
        assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category


@pytest.mark.mpi
@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counted_bytes_of_hybrid_sharding_agree_with_the_estimate(comm, stage: int, share: bool, offload) -> None:
    """Two groups, where each is half of the nodes or of every node; else each rank alone."""
    over = comm.size // 2 if comm.size % 2 == 0 and comm.nodes != 3 else 1
    model = GPT2(COUNTED).bfloat16()
    group = comm.split(comm.rank // over)
    settings = {"shard_group": group, "share_in_node": share, "offload": offload, "bucket_cap_mb": 0.2}
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=comm, **settings)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    with optimizer.gathered(writable=False):  # after it, of units that are gathered, none is whole
        pass
    found = measure(model, optimizer)
    expected = estimate(
        model, comm.size, comm.nodes, stage, bucket_cap_mb=0.2, shard_ranks=over, offload=offload or False
    )
    for category in ("parameters", "gradients", "offloaded" if offload else "optimizer"):
        assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category
    if comm.nodes == 1:
        assert found.buckets <= 1.02 * expected.buckets


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_and_tied_parameters_count_once(comm, stage: int) -> None:
    model = Mixture()
    call, optimizer = engine(model, comm, stage)
    x, y = sequences(0, 0)
    call(x, y).backward()
    optimizer.step()
    found, expected = measure(call, optimizer), estimate(model, comm.size, comm.nodes, stage)
    elements = len(list(model.parameters()))
    padding = 64 * elements  # each begins with a cache line
    for category in ("parameters", "gradients", "optimizer"):
        difference = getattr(found, category) - getattr(expected, category)
        assert -padding <= difference <= padding, category


@pytest.mark.mpi
@pytest.mark.parametrize("as_views", [True, False])
def test_buckets_of_ddp_are_its_gradients_as_long_as_it_has_any(comm, as_views: bool) -> None:
    model = GPT2(COUNTED)
    call = mpidl.DistributedDataParallel(model, process_group=comm, gradient_as_bucket_view=as_views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    psi = 4 * sum(p.numel() for p in model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    states = []
    for _ in range(2):
        call(tokens, tokens).backward()
        states.append(measure(call, optimizer))
        optimizer.zero_grad()
        states.append(measure(call, optimizer))
    gradients = [state.gradients / psi for state in states]
    buckets = [state.buckets / psi for state in states]
    assert gradients == pytest.approx([1, 0, 1, 0], rel=0.02)
    assert buckets == pytest.approx([0, 1, 0, 1] if as_views else [1, 1, 1, 1], rel=0.02)


@pytest.mark.mpi
@pytest.mark.parametrize("share", [True, False])
def test_sharded_parameters_are_no_activations(comm, share: bool) -> None:
    """What autograd saves of a unit that is whole is counted with the parameters, in every stage."""
    kept = []
    for stage in (0, 3):
        model = GPT2(COUNTED)
        call = model
        if stage:
            settings = {"stage": 3, "process_group": comm, "share_in_node": share, "lr": 0.1}
            optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, **settings)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with measure_activations(model) as saved:
            loss = call(tokens, tokens)
        kept.append(measure(model, optimizer, saved).activations)
        loss.backward()
        assert saved.nbytes == 0
    assert kept[0] == kept[1] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_the_categories_add_up_to_what_the_process_grows_by(mpirun, tmp_path: Path, ranks: int, dtype: str) -> None:
    """Within 5 %: pages of a bucket that no gradient touched are counted, but not there yet."""
    path, picture = tmp_path / "rows.json", tmp_path / "memory.png"
    sizes = ("--layers=3", "--embd=320", "--batch=2", "--block-size=64")
    done = mpirun(
        *(ranks, "benchmarks/plot_memory.py", *sizes, f"--dtype={dtype}", f"--json={path}", f"--plot={picture}"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [row["engine"] for row in rows] == ["ddp", "zero1", "zero2", "zero3"]
    for row in rows:
        total = sum(row["measured"].values())
        assert total > 30 * MIB
        assert row["grown"] == pytest.approx(total, rel=0.05), row["engine"]
        assert total == pytest.approx(sum(row["estimated"].values()), rel=0.05), row["engine"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    if ranks == 1:
        again = mpirun(1, "benchmarks/plot_memory.py", f"--from={path}", f"--plot={tmp_path / 'again.png'}")
        assert again.returncode == 0, again.stderr
        wrong = mpirun(1, "benchmarks/plot_memory.py", f"--from={picture}", "--plot=x.png")
        assert (wrong.returncode, wrong.stderr.count("error: ")) == (2, 1)
