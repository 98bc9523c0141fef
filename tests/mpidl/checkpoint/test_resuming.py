"""Where a program with checkpoints goes on from: what --resume says, and after a restart what the job has saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from mpidl.checkpoint import save
from mpidl.resuming import NEWEST_CHECKPOINT, Checkpoints, add_options

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("resume", ["never", "former"])
def test_a_job_that_is_started_again_goes_on_from_its_newest(
    comm, shared: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    model = torch.nn.Linear(2, 2)
    former, own = shared / "former", shared / "own"
    save(former, model, step=3, process_group=comm)
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = ["--checkpoint-dir", str(own), "--resume", str(former) if resume == "former" else resume]
    options = parser.parse_args(given)

    def step_of(environment: dict[str, Any]) -> int | None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        kept = Checkpoints(comm, options, mpidl.StopSignal(), (model,), {})
        loaded = kept.resume(9)
        return loaded and loaded.step

    first = 3 if resume == "former" else None
    assert step_of({}) == first
    save(own, model, step=7, process_group=comm)
    assert step_of({}) == first
    assert step_of({NEWEST_CHECKPOINT: str(former / "step-00000003")}) == first  # of another directory
    assert step_of({NEWEST_CHECKPOINT: str(own / "step-00000007")}) == 7
