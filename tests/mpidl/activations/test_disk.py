"""Checkpoints whose inputs are on disk: read ahead, and what a disk may do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpidl.activations import checkpoint, checkpoint_modules
from mpidl.activations.disk import ActivationFile, DiskSlot
from mpidl.errors import TrainingError
from tests.mpidl.activations.checkpointed import INPUT, assert_same, dropping, made
from tests.mpidl.small_models import sequences


def test_backward_reads_each_checkpoint_once_and_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, events = made("disk", tmp_path), []
    load = DiskSlot.load_ahead

    def logged(self: DiskSlot) -> None:
        if self._coming is None:
            events.append(f"read {self._start // INPUT}")
        load(self)

    monkeypatch.setattr(DiskSlot, "load_ahead", logged)
    model = dropping()
    for number, block in enumerate(model.transformer["h"]):
        block.attn.register_forward_pre_hook(lambda *_, number=number: events.append(f"run {number}"))
    checkpoint_modules(model, store=store)
    loss = model(*sequences(0, 0))
    assert events == [f"run {n}" for n in range(4)]
    events.clear()
    loss.backward()
    assert events == ["read 3", "read 2", "run 3", "read 1", "run 2", "read 0", "run 1", "run 0"]


@pytest.mark.parametrize("broken", ["pwrite", "preadv"])
def test_a_full_or_broken_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    store = made("disk", tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    x = torch.randn(1000, requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, broken, fail)
        with pytest.raises(TrainingError, match=f"{tmp_path}: No space left on device"):
            checkpoint(torch.sin, x * 1, store=store).sum().backward()


def test_a_disk_that_takes_and_gives_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write, read = made("disk", tmp_path), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:100], at))
    monkeypatch.setattr(os, "preadv", lambda file, data, at: read(file, [data[0][:70]], at))
    x = torch.randn(1001, requires_grad=True)
    checkpoint(torch.sin, x * 1, store=store).sum().backward()
    assert_same(x.grad, x.detach().cos())


def test_a_slot_that_could_not_be_filled_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ActivationFile(tmp_path, 64)

    def fail(*_: Any) -> None:
        raise MemoryError("deliberate")

    monkeypatch.setattr(file, "_worker", SimpleNamespace(submit=fail))
    with pytest.raises(MemoryError, match="deliberate"):
        file.put(torch.ones(100))
    assert file.used == 0
