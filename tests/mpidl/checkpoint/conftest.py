"""A directory that all ranks share, and weights that are equal on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mpidl
from mpidl.checkpoint import directory_lock


@pytest.fixture(autouse=True)
def seed() -> None:
    """Whatever the ranks have drawn before: a plain model is the same on all."""
    torch.manual_seed(0)


@pytest.fixture
def shared(comm, tmp_path: Path) -> Path:
    """Rank 0's temporary directory, on every rank."""
    return Path(mpidl.broadcast_object(comm, str(tmp_path)))


@pytest.fixture(autouse=True)
def unlocked() -> Iterator[None]:
    """No test holds another's directories, nor ever more files open."""
    yield
    directory_lock.release()
