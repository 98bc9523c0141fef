"""Engines on products of dp and tp that take more ranks than the suite otherwise has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.thorough
@pytest.mark.limit(400)
@pytest.mark.parametrize(
    ("engine", "name", "dp", "shards", "sequences"),
    [
        ("stage 1", "gpt2", 2, "all", "in pieces"),
        ("stage 3", "gpt2", 4, "all", "in pieces"),
        ("stage 3", "gpt2", 4, 2, "in pieces"),
        ("stage 3 gathered", "llama, two key heads", 2, "all", "in pieces"),
        ("stage 2", "llama, two key heads", 4, 2, "in pieces"),
        ("ddp", "llama, two key heads", 1, "all", "in pieces"),
        ("stage 3", "t5", 2, "all", "whole"),
        ("ddp", "bert", 4, "all", "whole"),
    ],
)
def test_eight_ranks_train_as_one_process(
    mpirun: Callable[..., Any], engine: str, name: str, dp: int, shards: str | int, sequences: str
) -> None:
    """Also with hybrid sharding, where two replicas have two ranks of dp each."""
    arguments = (engine, name, dp, shards, sequences)
    job = mpirun(8, "-W", "ignore", "-m", "tests.mpidl.tensor.job_eight_ranks", *arguments, timeout=360)
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == "the same"
