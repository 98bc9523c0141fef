"""All algorithms on more ranks than the other tests run on; 5 and 7 are the awkward ones, 8 the straight one."""

from __future__ import annotations

import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [5, 7, 8])
def test_every_algorithm_is_right(mpirun, ranks: int) -> None:
    done = mpirun(ranks, "-m", "tests.collectives.backends.oversubscribed", timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stdout + done.stderr
