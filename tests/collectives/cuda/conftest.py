"""Fixtures: a stand-in for a GPU, the same on all ranks of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.cuda import driver
from tests.collectives.cuda.standin import Gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU that all ranks share; it fails the test if something that was queued on it failed."""
    made = Gpu()
    monkeypatch.setattr(driver, "open_device", lambda index: made)
    monkeypatch.setattr(driver, "is_usable", lambda: True)
    yield made
    made.synchronize()
