"""Frameworks train with mpidl on 2 ranks as one process does, with clipping that cuts in every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.limit(150)
@pytest.mark.thorough("with_accelerate", "with_lightning")
@pytest.mark.parametrize("job", ["with_trainer", "with_accelerate", "with_lightning"])
def test_frameworks_train_as_one_process_does(job: str, mpirun: Callable[..., Any], tmp_path: Path) -> None:
    """Losses and norms to 1e-5, weights to 1e-4; a run from the framework's own checkpoint to the bit."""
    alone = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    ran = mpirun(2, "-m", f"tests.mpidl.frameworks.{job}", tmp_path, timeout=120, **alone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done") == 2, ran.stdout + ran.stderr  # which may stand in one line
