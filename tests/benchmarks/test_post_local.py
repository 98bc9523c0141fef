"""The comparison of post-local SGD's accuracy."""

from collections.abc import Callable
from typing import Any

import bench_post_local
import pytest

from tests.harness.launch import ROOT


def test_the_rate_rises_to_its_scale_and_falls_in_two_stages() -> None:
    factors = [bench_post_local.factor(step, 100, 4.0) for step in range(100)]
    assert factors[:6] == pytest.approx([1.6, 2.2, 2.8, 3.4, 4.0, 4.0])
    assert factors[49:51] + factors[74:76] == pytest.approx([4.0, 0.4, 0.4, 0.04])


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_methods_learn_and_reduce_as_often_as_they_say(mpirun: Callable[..., Any]) -> None:
    options = ["--seeds=1", "--epochs=8", "--batch=16", "--train=256", "--methods=large,post-local:4,local:4"]
    done = mpirun(2, ROOT / "benchmarks/bench_post_local.py", *options, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith(("#", "method"))]
    assert [(row[0], *row[5:7]) for row in rows] == [
        ("large", "64", "64"),
        ("post-local:4", "64", str(32 + 8)),
        ("local:4", "64", "16"),
    ]
    assert all(float(row[1]) > 50 for row in rows)
