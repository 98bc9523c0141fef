"""Benchmarks that ranks run refuse a wrong option in one line, with status 2 on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.devices import unusable_reason

WRONG = {
    "bench_training": {
        "--engines=zero4": "zero4",
        "--heads=7": "heads",
        "--steps=0": "--steps: got 0",
        "--called=x": "--called",
        **({} if torch.cuda.is_available() else {"--device=cuda": f"error: --device cuda: {unusable_reason()}"}),
    },
    "bench_learning": {
        "--methods=fp32,int9": "--methods: compress: got 'int9'; needs one of",
        "--methods=fp32 after 5": "--methods: got 'fp32 after 5'; fp32 has no such variant",
        "--methods=onebit after 5": "--methods: got 'onebit after 5'; onebit has no such variant",
        "--methods=diloco:5 without feedback": "diloco:5 has no such variant",
        "--methods=int8 at 0": "--methods: got 'int8 at 0'; needs a name, and behind it",
        "--windows=13": "--windows: got 13; needs a multiple of the 2 ranks",
        "--every=0": "--every: got 0; needs at least 1",
        "--seeds=0": "--seeds: got 0; needs at least 1",
        "--json=no/such/folder/learning.json": "cannot be written",
    },
    "bench_post_local": {"--methods=large,local:0": "--methods: got 'local:0'; needs any of small, large, local:STEPS"},
    "bench_slow_network": {
        "--methods=ddp,zero4+int8": "--methods: got 'zero4+int8'; needs any of single,ddp,",
        "--methods=int9": "--methods: got 'int9'; needs any of single,ddp,",
        "--methods=ddp+auto": "--methods: got 'ddp+auto'; needs any of single,ddp,",
        "--methods=ddp+powersgd:0": "--methods: compress: got 'powersgd:0': rank '0'; needs an integer from 1 up",
    },
    "bench_barrier": {"--rounds=0": "--rounds"},
    "bench_checkpoint": {"--engines=copy": "--engines"},
}


@pytest.mark.thorough
@pytest.mark.limit(150)
def test_wrong_options_are_one_line_and_status_2(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    """All in one job."""
    asked: list[str] = []
    for program, wrong in WRONG.items():
        more = [f"--dir={tmp_path}"] if program == "bench_checkpoint" else []
        asked += [f"benchmarks/{program}.py", json.dumps([[option, *more] for option in wrong])]
    done = mpirun(2, "tests/examples/outcomes.py", *asked, timeout=120)
    assert done.returncode == 0, done.stderr
    messages = [(option, message) for wrong in WRONG.values() for option, message in wrong.items()]
    for (option, message), ranks in zip(messages, json.loads(done.stdout), strict=True):
        assert [status for status, _, _ in ranks] == [2, 2], (option, ranks)
        errors = [line for _, _, text in ranks for line in text.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, option
        assert message in errors[0]
