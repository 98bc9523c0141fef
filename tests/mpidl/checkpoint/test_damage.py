"""Whatever is wrong with a checkpoint: one error on every rank that names the file, and nothing in memory changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from mpidl.checkpoint import index, load, newest, save, verify
from mpidl.checkpoint.reading import CheckpointReader
from mpidl.models.gpt2 import GPT2
from tests.mpidl.checkpoint.training import SETTINGS, Run
from tests.mpidl.small_models import MODELS, SMALL_GPT2, fresh
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi


def snapshot(run: Run) -> dict[str, Any]:
    """All that a load might change on this rank, copied."""
    held: dict[str, Any] = {}
    if run.engine in WAYS:
        for part in run.optimizer.owned_state().slices():
            held[f"{id(part.parameter)}"] = part.values.detach().clone()
    else:
        held |= {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for number, entry in enumerate(run.optimizer.state.values()):
        held |= {f"{number} {key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    groups = [{key: v for key, v in group.items() if key != "params"} for group in run.optimizer.param_groups]
    return {**held, "groups": str(groups), "schedule": str(run.schedule.state_dict()), "random": torch.get_rng_state()}


def assert_refused(
    run: Run, attempt: Callable[[], Any], *named: str, kind: type[Exception] | None = mpidl.CheckpointError
) -> str:
    """The attempt fails on every rank, with these words, and changes nothing."""
    before = snapshot(run)
    with pytest.raises(mpidl.CheckpointError) as raised:
        attempt()
    assert kind is None or raised.type is kind
    messages = mpidl.all_gather_object(run.comm, str(raised.value))
    assert len(set(messages)) == 1, messages
    for word in named:
        assert word in messages[0], messages[0]
    after = snapshot(run)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if torch.is_tensor(value) else value == after[name], name
    return messages[0]


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


class DamagedCheckpoint:
    """A checkpoint that rank 0 damages and restores."""

    def __init__(self, comm, folder: Path) -> None:
        self.comm, self.path = comm, folder
        self._sound = folder.with_name(f"{folder.name}-sound")
        self.do(lambda: shutil.copytree(folder, self._sound))
        self.file = f"rank{comm.size - 1:05d}-000.safetensors"

    def do(self, damage: Callable[[], Any]) -> None:
        """On rank 0, while the others wait."""
        if self.comm.rank == 0:
            damage()
        self.comm.barrier()

    def restore(self) -> None:
        def copy_back() -> None:
            shutil.rmtree(self.path)
            shutil.copytree(self._sound, self.path)

        self.do(copy_back)


@pytest.fixture(params=["ddp", "stage 3"])
def damaged_run(request, comm, shared: Path) -> tuple[Run, DamagedCheckpoint]:
    """A run that has gone on since it was saved, and its checkpoint."""
    run = Run(request.param, comm)
    run.steps(0, 1)
    run.save(shared, 1, extra={"tensor": torch.arange(5)})
    run.steps(1, 2)
    return run, DamagedCheckpoint(comm, shared / "step-00000001")


def replace(path: Path, data: bytes) -> None:
    path.write_bytes(data)


CASES: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "cut in half": (lambda p, f: os.truncate(p / f, (p / f).stat().st_size // 2), "is cut short"),
    "cut by a byte": (lambda p, f: os.truncate(p / f, (p / f).stat().st_size - 1), "is cut short"),
    "emptied": (lambda p, f: os.truncate(p / f, 0), "is cut short"),
    "longer": (lambda p, f: replace(p / f, (p / f).read_bytes() + b"x"), "bytes, needs"),
    "removed": (lambda p, f: (p / f).unlink(), "No such file"),
    "a text": (lambda p, f: replace(p / f, b"no tensors here"), "has 15 bytes, needs"),
    "a text as long": (lambda p, f: replace(p / f, b"x" * (p / f).stat().st_size), "is no safetensors file"),
    "a directory": (lambda p, f: ((p / f).unlink(), (p / f).mkdir()), "directory"),
    "header flipped": (lambda p, f: flip(p / f, 20, 1), ""),
    "header's length flipped": (lambda p, f: flip(p / f, 6, 3), "is no safetensors file"),
    "data flipped": (lambda p, f: flip(p / f, (p / f).stat().st_size - 9, 4), "is damaged: bytes"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_named(damaged_run: tuple[Run, DamagedCheckpoint], case: str) -> None:
    run, damaged = damaged_run
    damage, said = CASES[case]
    damaged.do(lambda: damage(damaged.path, damaged.file))
    assert_refused(run, lambda: run.load(damaged.path), str(damaged.path / damaged.file), said)
    damaged.restore()
    assert run.load(damaged.path).step == 1


def test_any_flipped_bit_is_found(damaged_run: tuple[Run, DamagedCheckpoint]) -> None:
    """At random places of random files; every byte is read by some rank."""
    run, damaged = damaged_run
    rng = random.Random(run.comm.size)
    files = [f"rank{rank:05d}-000.safetensors" for rank in range(run.comm.size)]
    for _ in range(12):
        path = damaged.path / rng.choice(files)
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        run.comm.barrier()
        damaged.do(lambda path=path, at=at, bit=bit: flip(path, at, bit))
        assert_refused(run, lambda: run.load(damaged.path), str(path))
        if run.comm.rank == 0:
            with pytest.raises(mpidl.CheckpointError, match=path.name):
                verify(damaged.path)
        run.comm.barrier()
        damaged.do(lambda path=path, at=at, bit=bit: flip(path, at, bit))
    assert run.load(damaged.path).step == 1


def test_any_change_of_the_index_is_found(damaged_run: tuple[Run, DamagedCheckpoint]) -> None:
    run, damaged = damaged_run
    rng = random.Random(run.comm.size)
    path = damaged.path / "index.json"
    for _ in range(12):
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        before = json.loads(path.read_text())
        run.comm.barrier()
        damaged.do(lambda at=at, bit=bit: flip(path, at, bit))
        try:
            unchanged = json.loads(path.read_bytes().decode()) == before  # 1e-06 may become 1E-06
        except ValueError:
            unchanged = False
        run.comm.barrier()
        if not unchanged:
            assert_refused(run, lambda: run.load(damaged.path), str(path))
        damaged.do(lambda at=at, bit=bit: flip(path, at, bit))
    damaged.do(lambda: os.truncate(path, 1000))
    assert_refused(run, lambda: run.load(damaged.path), str(path), "damaged or cut short")
    damaged.do(lambda: replace(path, b'{"format": "another"}'))
    assert_refused(run, lambda: run.load(damaged.path), str(path), "is not the index of an mpidl checkpoint")
    damaged.do(path.unlink)
    assert_refused(run, lambda: run.load(damaged.path), str(damaged.path))


@pytest.mark.parametrize("lacks", ["ranks", "own", "files", "tensors", "model", "a tensor", "a dtype"])
def test_an_index_that_is_whole_but_wrong_is_named(comm, shared: Path, lacks: str) -> None:
    """Another program may have written the format."""
    run = Run("ddp", comm)
    run.save(shared, 1, extra={"tensor": torch.arange(5)})
    path = shared / "step-00000001" / "index.json"

    def spoil() -> None:
        content = json.loads(path.read_text())
        if lacks == "a tensor":
            del content["tensors"]["extra/0"]
        elif lacks == "a dtype":
            content["tensors"]["extra/0"]["dtype"] = "I7"
        else:
            del content[lacks]
        del content["checksum"]
        content["checksum"] = index.content_checksum(content)
        path.write_text(json.dumps(content))

    if comm.rank == 0:
        spoil()
    comm.barrier()
    assert_refused(run, lambda: run.load(path.parent), str(path), "is not as the format has it")


def test_a_file_that_fails_while_it_is_read_into_memory_is_named_and_so_is_what_that_means(
    damaged_run: tuple[Run, DamagedCheckpoint], monkeypatch
) -> None:
    run, damaged = damaged_run
    fill = CheckpointReader.fill

    def fails(reader: CheckpointReader, *arguments: Any) -> None:
        if run.comm.rank == 0:
            raise OSError(5, "Input/output error", "here")
        fill(reader, *arguments)

    monkeypatch.setattr(CheckpointReader, "fill", fails)
    with pytest.raises(mpidl.CheckpointError, match=r"here: Input/output error.*; only a part is loaded: load a"):
        run.load(damaged.path)
    monkeypatch.undo()
    run.load(damaged.path)


def test_a_file_of_another_checkpoint_is_not_taken(damaged_run: tuple[Run, DamagedCheckpoint], shared: Path) -> None:
    """Names, shapes and size are the same; only the values differ."""
    run, damaged = damaged_run
    run.save(shared / "other", 1, extra={"tensor": torch.arange(5)})
    damaged.do(lambda: shutil.copy(shared / "other" / "step-00000001" / damaged.file, damaged.path / damaged.file))
    assert_refused(run, lambda: run.load(damaged.path), str(damaged.path / damaged.file))


def test_no_permission_on_one_rank_is_told_to_all(damaged_run: tuple[Run, DamagedCheckpoint], monkeypatch) -> None:
    run, damaged = damaged_run
    opened = os.open

    def refuse(path: Any, *arguments: Any, **settings: Any) -> int:
        if run.comm.rank == run.comm.size - 1 and str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **settings)

    monkeypatch.setattr("mpidl.checkpoint.tensorfile.os.open", refuse)
    said = assert_refused(run, lambda: run.load(damaged.path), "cannot be opened: Permission denied", ".safetensors")
    assert run.comm.size == 1 or f"(on rank {run.comm.size - 1})" in said


@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_what_belongs_to_another_training_is_refused(comm, shared: Path, engine: str) -> None:
    saved = Run(engine, comm)
    saved.steps(0, 1)
    saved.save(shared, 1)
    file = str(shared / "step-00000001" / "index.json")
    refused = partial(assert_refused, kind=mpidl.CheckpointMismatch)
    others = {
        "of another shape: transformer.wte.weight (has (37, 16), needs (37, 8))": GPT2(
            type(SMALL_GPT2)(vocab_size=37, block_size=8, layers=3, heads=2, embd=8)
        ),
        "unexpected: transformer.h.2.": GPT2(type(SMALL_GPT2)(vocab_size=37, block_size=8, layers=2, heads=2, embd=16)),
        "missing: transformer.h.3.": GPT2(type(SMALL_GPT2)(vocab_size=37, block_size=8, layers=4, heads=2, embd=16)),
    }
    for said, model in others.items():
        run = Run(engine, comm, model)
        refused(run, lambda run=run: run.load(shared), file, "is of another model", said)
    sgd = Run(engine, comm, optimizer=torch.optim.SGD, settings={"lr": 0.1})
    refused(sgd, lambda: sgd.load(shared), file, "the state of AdamW; the optimizer here is SGD")
    run = Run(engine, comm)
    run.steps(0, 1)
    scaler = mpidl.GradScaler(process_group=comm)
    refused(run, lambda: run.load(shared, scaler=scaler), file, "was saved without a scaler")
    save(shared / "weights", run.call, process_group=comm)
    refused(run, lambda: load(shared / "weights", run.call, run.optimizer), "was saved without an optimizer")
    frozen = fresh(MODELS["gpt2"])
    frozen.transformer["wpe"].weight.requires_grad_(False)
    run = Run(engine, comm, frozen)
    said = refused(run, lambda: run.load(shared), file, "other parameters were trained")
    assert "trained only when it was saved: transformer.wpe.weight" in said
    one_group = fresh(MODELS["gpt2"])
    plain = torch.optim.AdamW(one_group.parameters(), **SETTINGS)
    with pytest.raises(mpidl.CheckpointMismatch, match="in 2 groups there and in 1 here"):
        load(shared, one_group, plain, process_group=comm)
    assert_refused(run, lambda: run.load(shared / "nowhere"), str(shared / "nowhere"), "no such directory")


def test_torn_ones_are_passed_over(comm, shared: Path) -> None:
    run = Run("stage 3", comm)
    losses = []
    for step in range(4):
        losses += run.steps(step, step + 1)
        run.save(shared, step + 1)
    damaged = DamagedCheckpoint(comm, shared / "step-00000004")
    damaged.do(lambda: (shared / "step-00000004" / "rank00000-000.safetensors").unlink())
    damaged.do(lambda: (shared / "step-00000003" / "index.json").unlink())
    damaged.do(lambda: shutil.copytree(shared / "step-00000002", shared / "step-00000005.tmp"))
    found, passed = newest(shared)
    assert found == shared / "step-00000002"
    assert len(passed) == 3
    for why, part in zip(sorted(passed), ("3: was not", "4/rank00000-000.safetensors: is", "5.tmp: was"), strict=True):
        assert part in why
    comm.barrier()
    loaded = run.load(shared)
    assert loaded.path == shared / "step-00000002"
    np.testing.assert_array_equal(run.steps(2, 4), losses[2:])
    run.save(shared, 5)
    left = sorted(path.name for path in shared.iterdir() if path.name.startswith("step-0000000"))
    assert "step-00000005.tmp" not in left
    assert newest(shared)[0] == shared / "step-00000005"
    assert newest(shared / "nothing") == (None, [])
