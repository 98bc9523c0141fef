"""No store, or one in memory or on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidl.activations import CheckpointStore
from tests.mpidl.activations.checkpointed import KINDS, made


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore | None:
    return made(request.param, tmp_path)
