"""Memory of a rank, counted while models train, against the estimate."""

from __future__ import annotations

import json
from pathlib import Path

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
    model_state_bytes,
    peak_rss_mib,
    pss_mib,
    rss_mib,
    storage_bytes,
)
from mpidl.memory.activations import DTYPES
from mpidl.models.gpt2 import GPT2, GPT2Config
from tests.mpidl.small_models import MEMORY_GPT2, Mixture, sequences


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
    model = GPT2(MEMORY_GPT2)
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
    """Returns what to call, and the optimizer."""
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
        model, compress = GPT2(MEMORY_GPT2), Compression("int8", where="everywhere", undo=undo)
        call, optimizer = engine(model, comm, stage, compress=compress)
        call(tokens, tokens).backward()
        optimizer.step()
        found = measure(call, optimizer)
        expected = estimate(model, comm.size, comm.nodes, stage, bucket_cap_mb=0.2, compress=compress)
        assert found.compression == pytest.approx(expected.compression, rel=0.02)
        assert (found.compression > 0) == (comm.size > 1)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_agree_with_the_estimate(comm, stage: int, dtype: str) -> None:
    """Within 2 %, each category; DDP's bf16 parameters have torch's AdamW, which keeps no masters."""
    model = GPT2(MEMORY_GPT2).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    call, optimizer = engine(model, comm, stage)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    call(tokens, tokens).backward()
    optimizer.step()
    found = measure(call, optimizer)
    expected = estimate(model, comm.size, comm.nodes, stage, masters=stage > 0, bucket_cap_mb=0.2)
    for category in ("parameters", "gradients", "optimizer", "model_state"):
        assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category
    assert found.activations == 0
    held = model_state_bytes(call, optimizer)
    assert held == {category: getattr(found, category) for category in held}
    if comm.nodes == 1:
        assert found.buckets <= 1.02 * expected.buckets


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_of_a_step_in_backward_agree_with_the_estimate(comm, stage: int) -> None:
    """At their most within a pass, as seen at each block: no more than the estimate, and half of it at least."""
    model = GPT2(MEMORY_GPT2)
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
    ("own", "dtype", "reduce"),
    [("fp32", "bf16", None), ("fp32", "bf16", "fp32"), ("fp32", None, "bf16"), ("bf16", None, "fp32")],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counted_bytes_agree_with_the_estimate_whatever_gradients_are_reduced_in(
    comm, stage: int, own: str, dtype: str | None, reduce: str | None
) -> None:
    """Within 2 %, each category, for a model of dtype `own` with Precision(dtype, reduce)."""
    model = GPT2(MEMORY_GPT2).to(DTYPES[own])
    precision = mpidl.Precision(*(None if name is None else DTYPES[name] for name in (dtype, reduce)))
    settings = {"dtype": dtype, "reduce_dtype": reduce, "bucket_cap_mb": 0.2}
    expected = estimate(model, comm.size, comm.nodes, stage, **settings)
    call, optimizer = engine(model, comm, stage, precision)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    call(tokens, tokens).backward()
    optimizer.step()
    found = measure(call, optimizer)
    for category in ("parameters", "gradients", "optimizer", "model_state"):
        assert getattr(found, category) == pytest.approx(getattr(expected, category), rel=0.02), category
    if comm.nodes == 1:
        assert found.buckets <= 1.02 * expected.buckets
        assert reduce is None or found.buckets >= 0.98 * expected.buckets


@pytest.mark.mpi
@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counted_bytes_of_hybrid_sharding_agree_with_the_estimate(comm, stage: int, share: bool, offload) -> None:
    """Two groups, where each is half of the nodes or of every node; else each rank alone."""
    over = comm.size // 2 if comm.size % 2 == 0 and comm.nodes != 3 else 1
    model = GPT2(MEMORY_GPT2).bfloat16()
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


def sends_less(name: str, model: nn.Module, comm) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The engine and the optimizer of a name of the estimate, which sends from the first step on as in later ones."""
    if name == "onebitadam":
        optimizer = mpidl.optim.OneBitAdam(model.parameters(), freeze_step=1, process_group=comm)
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
        wrapped.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
        return wrapped, optimizer
    if name == "diloco":
        return model, mpidl.optim.DiLoCo(torch.optim.AdamW(model.parameters()), 1, comm, compress="int8")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() != 2], "rule": "adamw"},
    ]
    optimizer = mpidl.optim.Dion(groups, process_group=comm)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    wrapped.register_comm_hook(mpidl.optim.DionState(optimizer), mpidl.optim.dion_hook)
    return wrapped, optimizer


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["onebitadam", "diloco", "dion"])
def test_counted_bytes_of_optimizers_that_send_less_agree_with_the_estimate(comm, name: str) -> None:
    model = GPT2(MEMORY_GPT2)
    call, optimizer = sends_less(name, model, comm)
    assert measure(call, optimizer).parameters == 4 * sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(comm.rank))
    for _ in range(2):
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    found, compress = measure(call, optimizer), "int8" if name == "diloco" else None
    expected = estimate(model, comm.size, comm.nodes, 0, optimizer=name, compress=compress).optimizer
    masks = 0
    if name == "onebitadam" and comm.size > 1:  # 16 bytes for each element that had no gradient in the first step
        masks = 16 * sum(int((entry["exp_avg_sq"] == 0).sum()) for entry in optimizer.state.values())
        assert masks > 0  # of tokens that no sequence has
        assert found.buckets > 0  # memory for messages
    assert found.optimizer == pytest.approx(expected + masks, rel=0.02)


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
    model = GPT2(MEMORY_GPT2)
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
    """Tensors that autograd saves of a whole unit are counted with the parameters, in every stage."""
    kept = []
    for stage in (0, 3):
        model = GPT2(MEMORY_GPT2)
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
