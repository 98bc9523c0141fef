"""Checkpoints of offloaded, delayed, hybrid and gathered training: the bits of a run that nothing interrupted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl import Offload
from mpidl.checkpoint import index
from mpidl.checkpoint.reading import CheckpointReader
from mpidl.models.gpt2 import GPT2, Block, GPT2Config
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh, largest_difference

pytestmark = pytest.mark.mpi
BF16 = mpidl.Precision(torch.bfloat16, torch.float32, [nn.LayerNorm])
SMALL = {"buffer_mb": 0.02}


def late(to: str, delay_from: int = 0) -> Offload:
    return Offload(to, delayed_update=True, delay_from=delay_from, **(SMALL if to == "disk" else {}))


SETTINGS: dict[str, dict[str, Any]] = {
    "disk bf16": {"offload": Offload("disk", **SMALL), "precision": BF16},
    "late disk": {"offload": late("disk")},
    "late disk bf16": {"offload": late("disk"), "precision": BF16},
    "late cpu bf16": {"offload": late("cpu"), "precision": BF16},
    "late from 3": {"offload": late("disk", 3), "precision": BF16},
    "late from 4 cpu": {"offload": late("cpu", 4)},
}
HYBRID = ", hybrid"  # after a way: shards in groups


def group_of(comm):
    """Two pairs of neighbours; each rank alone, where there are fewer than four."""
    return comm.split(comm.rank // 2 if comm.size % 4 == 0 else comm.rank)


def run_of(comm, way: str, model: nn.Module | None = None, rank: int = 0, **settings: Any) -> Run:
    if way.endswith(HYBRID):
        settings["shard_group"] = group_of(comm)
    made = fresh(MODELS["gpt2"], rank) if model is None else model
    return Run(way.removesuffix(HYBRID), comm, made, **settings)


def state_of(run: Run) -> dict[Any, Any]:
    """Weights and optimizer state on rank 0; brings a pending update in."""
    entries = run.optimizer.state_dict().get("state", {})
    state = {(number, key): torch.as_tensor(v) for number, entry in entries.items() for key, v in entry.items()}
    return {**run.weights(), **state}


def assert_same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    ("way", "setting"),
    [
        ("stage 1, hybrid", "late disk bf16"),
        ("stage 2", "late from 3"),
        ("stage 2, hybrid", "disk bf16"),
        ("stage 3", "late disk"),
        ("stage 3 gathered", "late disk bf16"),
        ("stage 3 gathered, hybrid", "late from 4 cpu"),
        ("stage 3 gathered, hybrid", "late cpu bf16"),
    ],
)
def test_a_resumed_run_and_one_that_saves_have_the_bits_of_one_that_does_neither(
    comm, shared: Path, way: str, setting: str
) -> None:
    settings = SETTINGS[setting]
    alone = run_of(comm, way, **settings)
    losses = alone.steps(0, 5)
    saving = run_of(comm, way, **settings)
    found = saving.steps(0, 2)
    saving.save(shared, 2)
    assert found + saving.steps(2, 5) == losses
    again = run_of(comm, way, rank=1, **settings)
    again.steps(5, 6)  # of which nothing is to be left, a pending update included
    again.load(shared)
    assert again.steps(2, 5) == losses[2:]
    expected = state_of(alone)
    assert_same(state_of(saving), expected)
    assert_same(state_of(again), expected)


def test_every_way_loads_every_other(comm, shared: Path) -> None:
    """The judge is one process."""
    alone = Run("plain", comm)
    losses = alone.steps(0, 3)
    expected = alone.weights()
    offload = {"offload": Offload("disk", **SMALL)}
    ways = ["stage 1, hybrid", "stage 3", "stage 3 gathered, hybrid"]
    made = {(way, away): (way, offload if away else {}) for way in ways for away in (False, True)}
    names = {which: "-".join(map(str, which)).replace(", ", "-").replace(" ", "-") for which in made}
    for which, (way, settings) in made.items():
        run = run_of(comm, way, **settings)
        run.steps(0, 2)
        run.save(shared / names[which], 2)
    comm.barrier()
    if comm.rank == 0:  # replicas write nothing twice, and offload nothing else
        contents = [index.read(shared / name / "step-00000002") for name in names.values()]
        assert len({sum(entry.count for entry in content.tensors.values()) for content in contents}) == 1
        counts = [sum(s.stop - s.start for e in c.tensors.values() for s in e.slices) for c in contents]
        assert len(set(counts)) == 1
    for way in ways[1:]:
        for settings in ({}, offload):
            run = run_of(comm, way, rank=1, **settings)
            for name in names.values():
                run.load(shared / name)
                np.testing.assert_allclose(run.steps(2, 3), losses[2:], rtol=0, atol=1e-6, err_msg=f"{name} -> {way}")
                weights = run.weights()
                assert comm.rank or largest_difference(weights, expected) < 1e-6, f"{name} -> {way}"


@pytest.mark.parametrize("engine", ["ddp", "stage 2", "late"])
def test_a_pending_update_is_seen_at_once_where_nothing_is_delayed(comm, shared: Path, engine: str) -> None:
    run = run_of(comm, "stage 3", offload=late("disk"), precision=BF16)
    run.steps(0, 3)
    run.save(shared, 3)
    expected = run.weights()
    if engine == "late":  # nor does a checkpoint without one leave one behind
        run.optimizer.flush()
        run.save(shared, 4)
        other = run_of(comm, "stage 2, hybrid", rank=1, offload=late("cpu"), precision=BF16)
        other.steps(0, 2)
        assert other.optimizer.stats()["pending_update"]
    else:
        other = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
    other.load(shared)
    assert engine != "late" or not other.optimizer.stats()["pending_update"]
    found = other.weights()
    assert comm.rank or all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_pending_update_on_other_ranks(comm, shared: Path) -> None:
    """Saved by one rank, and by all: what all ranks go on with is what one goes on with."""
    half = comm.split(0 if comm.rank == 0 else None)
    if half is not None:
        alone = Run("stage 2", half, offload=late("disk"), precision=BF16)
        alone.steps(0, 2)
        alone.save(shared / "one", 2)
    comm.barrier()
    run = run_of(comm, "stage 3 gathered, hybrid", rank=1, offload=late("cpu"), precision=BF16)
    run.load(shared / "one")
    assert run.optimizer.stats()["pending_update"]
    with_loss = run.micro_step(2)
    if half is not None:
        expected = alone.micro_step(2)
        assert with_loss == pytest.approx(expected, rel=1e-4)
        newest = alone.weights()
    found = run.weights()
    if half is not None:
        assert_same(found, newest)
        half.close()


@pytest.mark.parametrize("way", ["stage 2, hybrid", "stage 3", "stage 3 gathered, hybrid"])
def test_models_without_values_and_checkpointed_blocks(comm, shared: Path, way: str) -> None:
    """With dropout, whose masks a checkpointed block draws twice."""
    config = GPT2Config(vocab_size=64, block_size=16, layers=3, heads=2, embd=16, dropout=0.2)
    settings = SETTINGS["late disk bf16"]

    def made(seed: int) -> Run:
        torch.manual_seed(seed)
        model = mpidl.deferred_init(GPT2, config)
        mpidl.activations.checkpoint_modules(model, Block)
        run = run_of(comm, way, model, **settings)
        torch.manual_seed(100 * seed + comm.rank)
        return run

    alone, saving = made(0), made(0)
    torch.manual_seed(comm.rank)
    losses = alone.steps(0, 4)
    torch.manual_seed(comm.rank)
    found = saving.steps(0, 2)
    saving.save(shared, 2)
    again = made(1)
    again.load(shared)
    assert found + again.steps(2, 4) == losses
    assert_same(state_of(again), state_of(alone))


def mapped(folder: Path) -> dict[tuple[int, int], int]:
    """Lists the mappings of the file that an optimizer has in a folder, and their bytes in this process's memory."""
    found = {}
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        fields = part.split(maxsplit=5)
        if fields[5].startswith(f"{folder}/"):
            low, high = fields[0].split("-")
            found[int(low, 16), int(high, 16)] = 1024 * int(re.findall(r"Rss: +(\d+)", part)[0])
    return found


def test_offloaded_state_passes_through_memory_a_tensor_at_a_time(
    comm, shared: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> None:
    def made(folder: Path) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        offload = Offload("disk", path=folder, buffer_mb=1)
        settings = {"offload": offload, "precision": mpidl.Precision(torch.bfloat16), "process_group": comm}
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, 3, lr=0.1, **settings)

    from mpidl.checkpoint import tensorfile

    folder = tmp_path_factory.mktemp("saved")
    model, optimizer = made(folder)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    largest, others = [0], [0]
    inside = tensorfile.checksum

    def counted(*arguments: Any) -> int:
        largest[0] = max(largest[0], sum(mapped(folder).values()))
        return inside(*arguments)

    monkeypatch.setattr(tensorfile, "checksum", counted)
    mpidl.checkpoint.save(shared, model, optimizer, step=1)
    away = optimizer.offloaded_bytes()
    assert away >= 12 * 4 * 512 * 512 // comm.size
    assert 0 < largest[0] < away / 2  # of 12 tensors, one
    folder = tmp_path_factory.mktemp("loaded")
    model, optimizer = made(folder)
    largest[0] = 0
    read = CheckpointReader.read

    def reading(
        reader: CheckpointReader, names: Any, cut: Any, low: int, high: int, target: torch.Tensor, *more: Any
    ) -> None:
        read(reader, names, cut, low, high, target, *more)
        if not any(first <= target.data_ptr() < last for first, last in mapped(folder)):
            others[0] += target.nbytes
        largest[0] = max(largest[0], sum(mapped(folder).values()))

    monkeypatch.setattr(CheckpointReader, "read", reading)
    mpidl.checkpoint.load(shared, model, optimizer)
    assert 0 < largest[0] < away / 2
    assert others[0] < away / 2
    assert sum(mapped(folder).values()) < away / 2
