"""A few kills of random ranks, as `tests/kill.py` deals them out by the dozen."""

from __future__ import annotations

import os
import sys

import pytest

from tests import kill
from tests.harness import launch


@pytest.mark.limit(180)
@pytest.mark.job
def test_nothing_is_lost_and_nothing_left_behind_by_killed_ranks(brief: bool) -> None:
    kills, ranks = (1, 2) if brief else (3, 3)
    seed = os.environ.get("MPIDL_KILL_SEED", "11")
    command = [sys.executable, kill.__file__, "--kills", str(kills), "--ranks", str(ranks), "--seed", seed]
    done = launch.run(command, 170, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills: the losses are the same" in done.stdout


@pytest.mark.thorough
@pytest.mark.limit(180)
@pytest.mark.job
def test_on_other_numbers_of_ranks_the_training_goes_on_all_the_same() -> None:
    command = [sys.executable, kill.__file__, "--kills", "1", "--ranks", "3", "--then", "2", "--seed", "5"]
    done = launch.run(command, 170, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills: the losses are the same" in done.stdout
