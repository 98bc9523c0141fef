"""The benchmark on GPUs: limits and bounds; and its course, without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from collectives.bench.device import BenchDevice
from collectives.bench.gpu_limits import by_transport, limit_lines, moved_bytes
from collectives.bench.measurement import Row

MIB = 1 << 20

# The course of a benchmark on a GPU, on the host's memory: with its clock, and groups that all go the host's way.
ON_THE_HOST = """if True:
    import sys
    from collectives.bench import __main__ as program, gpu_limits, options
    from collectives.timing import Clock

    class Gpu:
        device, own, sharing, index, name = "cpu", False, 2, 0, "none"

        def __init__(self, comm): self.clock = Clock()
        def synchronize(self): pass
        def copy_bandwidth(self, comm): return 1e10
        def used_mib(self): return 1.0

    options.unusable_reason, gpu_limits.Gpu = str, Gpu
    gpu_limits.groups = lambda comm, ways, device: {way: comm.duplicate() for way in ways if way in ("ipc", "staged")}
    sys.exit(program.main())
"""


def row(algorithm: str, time_us: float, buffer: str = "user", nbytes: int = 256 * MIB, op: str = "all_reduce") -> Row:
    """A row in the operation's usual form."""
    place = "in" if op == "all_reduce" else "out"
    what = (op, algorithm, buffer, "cold", place, "bfloat16", "sum", -1, 4, nbytes, nbytes // 2)
    return Row(*what, time_us, time_us, time_us, time_us, 1.0, 1.0, 0, {}, limit_us=600.0)


def test_the_limit_counts_what_ranks_on_one_gpu_read_and_write() -> None:
    assert moved_bytes("all_reduce", 400, 4) == 800
    assert moved_bytes("reduce_scatter", 400, 4) == 500
    assert moved_bytes("all_gather", 400, 4) is None
    assert BenchDevice(sharing=4, bandwidth=1600.0).limit("all_reduce", 400, 4) == 2.0


def test_bounds_are_kept_or_missed() -> None:
    rows = [row("ipc", 1000.0, "symmetric"), row("ipc", 2000.0), row("staged", 6000.0), row("gloo", 9000.0)]
    what = "# all_reduce of 256 MiB of bfloat16"
    assert limit_lines(rows) == [
        f"{what}, ipc, symmetric arrays: 0.60 of the limit (at least 0.6: kept), 9.0 x gloo (at least 10: MISSED)",
        f"{what}, ipc, user arrays: 0.30 of the limit, 4.5 x gloo",
        f"{what}, staged, user arrays: 0.10 of the limit, 1.5 x gloo (at least 2: MISSED)",
    ]
    assert "at least" not in limit_lines([row("ipc", 1000.0, "symmetric", 64 * MIB)])[0]
    assert "at least" not in limit_lines([row("ipc", 1000.0, "symmetric", op="reduce_scatter")])[0]


def test_a_way_is_asked_for_and_what_was_asked_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("aware", None):
        monkeypatch.delenv("MPIDL_CUDA", raising=False)
        if before:
            monkeypatch.setenv("MPIDL_CUDA", before)
        with by_transport("staged"):
            assert os.environ["MPIDL_CUDA"] == "staged"
        assert os.environ.get("MPIDL_CUDA") == before


@pytest.mark.thorough
def test_collectives_by_ways_against_the_limit(mpirun, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ("--minbytes=1K", "--maxbytes=1K", "--iters=2", f"--json={path}")
    done = mpirun(2, "-c", ON_THE_HOST, "--device=cuda", "--compare=mpi,gloo,nccl,copy", *sizes)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    limits = {found["op"]: found["limit_us"] for found in rows}
    assert limits == pytest.approx(
        {"all_reduce": 0.4096, "reduce_scatter": 0.3072, "all_gather": None, "all_to_all": 0.4096}
    )
    served = {(found["algorithm"], found["buffer"]) for found in rows}
    assert served == {
        ("ipc", "user"),
        ("ipc", "symmetric"),
        ("staged", "user"),
        ("gloo", "user"),
        ("copy", "-"),
    }
    assert all(found["wrong"] == 0 for found in rows if found["algorithm"] != "copy")
    assert {found["cache"] for found in rows} == {"cold"}
    assert "# all_reduce of 0 MiB of float32, ipc, symmetric arrays: " in done.stdout
    assert "# all_reduce of float32: not served by aware, mpi, nccl" in done.stdout
