"""The benchmark over slow networks: what it counts at the interfaces of two hosts, by the side of its formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.on_hosts import on_hosts

SLOW = "benchmarks/bench_slow_network.py"
METHODS = (
    "single,ddp,zero2,zero3,zero3-ahead,zero3-keep,zero3-int8,zero3-node,bf16,onebit,diloco,powersgd:4,torch-ddp,"
    "torch-powersgd"
)


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_bytes_at_the_interfaces_are_those_of_the_formulas(tmp_path: Path) -> None:
    path, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    model = ("--layers=5", "--heads=4", "--embd=256", "--block-size=8", "--steps=2", f"--methods={METHODS}")
    written = (f"--json={path}", f"--plot={picture}", "--rate=1gbit")
    done = on_hosts(SLOW, *model, *written, ranks=1, timeout=110, PYTHONPATH=str(launch.ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    assert list(rows) == METHODS.split(",")
    for name, row in rows.items():
        few = 0.1  # MB, of what ranks agree on
        assert row["formula_mb"] <= row["sent_mb"] + few, name
        assert row["sent_mb"] <= 1.08 * row["formula_mb"] + few, name
        assert row["ms"] > 0
        assert row["wire_ms"] == pytest.approx(8 * row["formula_mb"])
        alone, base = (rows[other]["ms"] for other in ("single", "ddp"))
        assert row["goal"] == pytest.approx(1.1 * (row["wire_ms"] + alone) / base)
    assert rows["ddp"]["ratio"] == 1.0
    losses = {name: row["loss"] for name, row in rows.items()}
    assert len({losses[name] for name in ("ddp", "zero2", "zero3", "zero3-ahead", "zero3-keep", "zero3-node")}) == 1
    assert losses["bf16"] == pytest.approx(losses["ddp"], rel=1e-2)
    lines = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith("#")]
    assert lines == list(rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
