"""The benchmark's command line: what it plans, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from collectives.bench.caches import cache_bytes
from collectives.bench.operations import OPERATIONS
from collectives.bench.options import BenchOptions, read
from collectives.command_line import Refused
from collectives.devices import unusable_reason


def plan(text: str, ranks: int = 4) -> BenchOptions:
    return read(text.split(), ranks)


def test_without_options_the_usual_operations_run_from_1_kib_to_64_mib() -> None:
    options = plan("")
    assert options.operations == ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    assert list(options.sizes()) == [1 << k for k in range(10, 27, 2)]
    assert (options.sides, options.places, options.buffers) == (("auto",), ("out", "in"), ("user", "symmetric"))
    assert (options.op, options.datatype, options.root, options.check, options.average) == (
        ("sum",),
        ("float32",),
        (0,),
        1,
        3,
    )


def test_sizes_grow_by_a_factor_or_by_steps() -> None:
    assert list(plan("-b 8 -e 1K -f 4").sizes()) == [8, 32, 128, 512]
    assert list(plan("--minbytes 1M --maxbytes 3M --stepbytes 1M").sizes()) == [1 << 20, 2 << 20, 3 << 20]
    assert list(plan("-e 256").sizes()) == [256], "a largest size below the usual smallest"
    assert list(plan("-b 128M").sizes()) == [128 << 20]


def test_every_type_operator_and_root_that_makes_sense_is_planned() -> None:
    options = plan("reduce,all_gather -d half,int32 -o sum,avg -r all", ranks=2)
    cases = options.series("reduce")
    assert {case.operation.name for case in cases} == {"reduce"}
    assert [(case.dtype, case.op, case.root) for case in cases] == [
        *(("float16", "sum", 0), ("float16", "sum", 1), ("float16", "avg", 0), ("float16", "avg", 1)),
        *(("int32", "sum", 0), ("int32", "sum", 1)),
    ]
    assert [(case.dtype, case.op, case.root) for case in options.series("all_gather")] == [
        ("float16", "none", -1),
        ("int32", "none", -1),
    ]
    assert plan("all").operations == tuple(OPERATIONS)


def test_a_side_that_is_compared_with_runs_once() -> None:
    options = plan("--algorithms auto,mpi,ring --compare mpi,gloo")
    assert options.sides == ("auto", "mpi", "ring", "gloo")
    assert options.compare == ("mpi", "gloo")


WRONG = {
    "dance": "got 'dance'; needs any of all_reduce",
    "--algorithms star": "--algorithms: got 'star'; needs any of auto",
    "--compare nccl": "--compare: got 'nccl'",
    "-b 2 -e 1": "--minbytes 2 is more than --maxbytes 1",
    "-b a": "-b/--minbytes: invalid number of bytes value: 'a'",
    "-i 8 -f 2": "--stepbytes 8 and --stepfactor 2: needs one of them",
    "-r 2": "-r/--root: got '2'; needs a rank from 0 to 1, or all",
    "-o avg -d int32": "an average needs a floating-point type",
    "-n 0": "got 0; needs at least 1",
    "--cache 1M": "--cache 1048576: needs --cold",
    "--cold --device cuda": "needs --device cpu",
    "--fresh --device cuda": "needs --device cpu",
    "--fresh -m 2": "--agg_iters 2: with --fresh",
    "--json no/such/place.json": "cannot be written",
    "--iter=3": "unrecognized arguments: --iter=3",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options_say_what_is_needed(text: str) -> None:
    with pytest.raises(Refused) as refused:
        plan(text, ranks=2)
    assert WRONG[text] in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_wrong_options_are_one_line_and_status_2_on_all_ranks(mpirun) -> None:
    lines = ["dance", "-b 2 -e 1", "-r 2", "--help", *([] if torch.cuda.is_available() else ["--device=cuda"])]
    done = mpirun(2, "tests/examples/outcomes.py", "collectives.bench", json.dumps([line.split() for line in lines]))
    assert done.returncode == 0, done.stderr
    for line, ranks in zip(lines, json.loads(done.stdout), strict=True):
        is_help = line == "--help"
        assert [status for status, _, _ in ranks] == ([0, 0] if is_help else [2, 2]), line
        assert [len(errors.splitlines()) for _, _, errors in ranks] == ([0, 0] if is_help else [1, 0]), line
        assert line != "--device=cuda" or ranks[0][2] == f"error: --device cuda: {unusable_reason()}\n"
        assert [bool(out) for _, out, _ in ranks] == [is_help, False], line


def test_caches_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.process.cores.usable", lambda: {0, 1})
    levels = [("Data", "32K"), ("Instruction", "64K"), ("Unified", "512K"), ("Unified", "4M")]
    for core in (0, 1):
        for number, (kind, size) in enumerate(levels[: 3 + core]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{number}"
            folder.mkdir(parents=True)
            (folder / "type").write_text(f"{kind}\n")
            (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == (32 + 512 + 4096) << 10
