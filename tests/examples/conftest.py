"""Data for the tests of several examples."""

from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some words."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(rng.choice(["the", "rank", "of", "a", "shard", "is"]) for _ in range(3000)))
    return path
