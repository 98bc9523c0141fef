"""The benchmark over slow networks: what it counts at the interfaces of two hosts, by the side of its formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mpidl.models.gpt2 import GPT2, GPT2Config
from network_methods import method_of, names_of
from tests.harness import launch
from tests.harness.on_hosts import on_hosts

SLOW = "benchmarks/bench_slow_network.py"
METHODS = (
    "single;ddp;zero2;zero3;zero3-ahead;zero3-keep;zero3-int8;zero3-node;bf16;onebit;onebit-lamb;zero-one;dion;post-local;"
    "diloco;diloco-int8;diloco-streaming;torch-ddp;torch-powersgd;powersgd:4;powersgd:4,fp16;powersgd:4,batched;"
    "powersgd:4,alternating;zero2+powersgd:4;ddp+bf16;fp16;int8;zero2+int8;int4;sign;gradzip:4;"
    "topk:0.01;dgc:0.01;randomk:0.01;sketch:0.001"
)
WITHOUT_COMPRESSION = {  # in the thread that trains, or none that is counted
    *("single", "ddp", "zero2", "zero3", "zero3-ahead", "zero3-keep", "zero3-node", "bf16"),
    *("dion", "post-local", "diloco", "diloco-int8", "diloco-streaming", "torch-ddp", "torch-powersgd"),
}
BETWEEN_NODES = (
    "single;ddp;zero2;onebit;onebit-lamb;zero-one;dion;post-local;diloco;powersgd:4;ddp+bf16;int8;zero2+int8;topk:0.01"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp,int8,ddp,", ["ddp", "int8"]),
        ("powersgd:4,fp16;int8", ["powersgd:4,fp16", "int8"]),
        ("dgc:0.01,momentum=0;", ["dgc:0.01,momentum=0"]),
    ],
)
def test_methods_whose_names_have_commas(text: str, expected: list[str]) -> None:
    assert names_of(text) == expected


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dgc:0.01", "zero2+dgc:0.01,momentum=0.5", "powersgd:4,alternating"])
def test_a_compressor_with_settings_is_a_method(comm, name: str) -> None:
    model = GPT2(GPT2Config(vocab_size=37, block_size=8, layers=1, heads=2, embd=16))
    engine = method_of(name).make(model, comm)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(3):
        loss = engine.loss(tokens, tokens)
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss)
    engine.close()


def measured(ranks: int, methods: str, path: Path, *more: str) -> tuple[dict[str, dict], list[str]]:
    """The rows of the benchmark by method, on two hosts of so many ranks, and the lines that it prints."""
    model = ("--layers=5", "--heads=4", "--embd=256", "--block-size=8", "--steps=2", f"--methods={methods}")
    written = (f"--json={path}", "--rate=1gbit", *more)
    done = on_hosts(SLOW, *model, *written, ranks=ranks, timeout=580, PYTHONPATH=str(launch.ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    assert list(rows) == methods.split(";")
    assert rows["single"]["sent_mb"] < 0.01  # what ranks agree on
    for name in rows.keys() - {"single"}:
        sent, formula = rows[name]["sent_mb"], rows[name]["formula_mb"]
        assert formula <= sent <= 1.08 * formula, name
    return rows, done.stdout.splitlines()


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_bytes_at_the_interfaces_are_those_of_the_formulas(tmp_path: Path) -> None:
    picture = tmp_path / "rows.png"
    rows, said = measured(1, METHODS, tmp_path / "rows.json", f"--plot={picture}")
    alone, base = (rows[name]["ms"] for name in ("single", "ddp"))
    for row in rows.values():
        assert row["ms"] > 0
        assert row["wire_ms"] == pytest.approx(8 * row["formula_mb"])
        assert row["goal"] == pytest.approx(1.1 * (row["wire_ms"] + alone) / base)
    assert rows["ddp"]["ratio"] == 1.0
    assert {name for name, row in rows.items() if not row["compress_ms"]} == WITHOUT_COMPRESSION
    losses = {name: row["loss"] for name, row in rows.items()}
    assert len({losses[name] for name in ("ddp", "zero2", "zero3", "zero3-ahead", "zero3-keep", "zero3-node")}) == 1
    assert losses["bf16"] == pytest.approx(losses["ddp"], rel=1e-2)
    assert [line.split()[0] for line in said if not line.startswith("#")] == METHODS.split(";")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_hosts_of_two_ranks_send_as_much_as_hosts_of_one(tmp_path: Path) -> None:
    measured(2, BETWEEN_NODES, tmp_path / "rows.json")
