"""Benchmarks on GPUs: limits, bounds, and that there is none; and their course, without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bench_collectives import GpuRow, Setting
from gpu_limits import by_way, moved_bytes, told

MIB = 1 << 20

# The course of a benchmark on a GPU, on the host's memory: with its clock, and groups that all go the host's way.
ON_THE_HOST = """if True:
    import runpy, sys
    sys.path.insert(0, "benchmarks")
    import gpu_limits
    from collectives.timing import Clock

    class Gpu:
        device, own, sharing, index, name = "cpu", False, 2, 0, "none"

        def __init__(self, comm): self.clock = Clock()
        def synchronize(self): pass
        def copy_bandwidth(self, comm): return 1e10
        def used_mib(self): return 1.0

    gpu_limits.missing, gpu_limits.Gpu = str, Gpu
    gpu_limits.groups = lambda comm, ways, device: {way: comm.duplicate() for way in ways if way in ("ipc", "staged")}
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def row(
    algorithm: str, time_us: float, buffer: str = "user", nbytes: int = 256 * MIB, op: str = "all_reduce"
) -> GpuRow:
    return GpuRow(op, algorithm, "bfloat16", 4, nbytes, buffer, time_us, 1.0, 1.0, limit_us=600.0)


def test_the_limit_counts_what_ranks_on_one_gpu_read_and_write() -> None:
    assert moved_bytes("all_reduce", 400, 4) == 800
    assert moved_bytes("reduce_scatter", 400, 4) == 500
    assert moved_bytes("all_gather", 400, 4) is None
    assert Setting(sharing=4, bandwidth=1600.0).limit("all_reduce", 400, 4) == 2.0


def test_bounds_are_kept_or_missed() -> None:
    rows = [row("ipc", 1000.0, "symmetric"), row("ipc", 2000.0), row("staged", 6000.0), row("gloo", 9000.0)]
    what = "# all_reduce of 256 MiB of bfloat16"
    assert told(rows) == [
        f"{what}, ipc, symmetric arrays: 0.60 of the limit (at least 0.6: kept), 9.0 x gloo (at least 10: MISSED)",
        f"{what}, ipc, user arrays: 0.30 of the limit, 4.5 x gloo",
        f"{what}, staged, user arrays: 0.10 of the limit, 1.5 x gloo (at least 2: MISSED)",
    ]
    assert "at least" not in told([row("ipc", 1000.0, "symmetric", 64 * MIB)])[0]
    assert "at least" not in told([row("ipc", 1000.0, "symmetric", op="reduce_scatter")])[0]


def test_a_way_is_asked_for_and_what_was_asked_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("aware", None):
        monkeypatch.delenv("MPIDL_CUDA", raising=False)
        if before:
            monkeypatch.setenv("MPIDL_CUDA", before)
        with by_way("staged"):
            assert os.environ["MPIDL_CUDA"] == "staged"
        assert os.environ.get("MPIDL_CUDA") == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line_and_status_2(mpirun) -> None:
    for program in ("bench_collectives", "bench_training"):
        done = mpirun(2, f"benchmarks/{program}.py", "--device=cuda")
        assert (done.returncode, done.stdout) == (2, "")
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert lines == ["error: --device cuda: torch sees no CUDA GPU"]


def test_collectives_by_ways_beside_the_limit(mpirun, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ("--min-bytes=1K", "--max-bytes=1K", "--iters=2", f"--json={path}")
    done = mpirun(2, "-c", ON_THE_HOST, "benchmarks/bench_collectives.py", "--device=cuda", *sizes)
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
        ("copy", "symmetric"),
    }
    table = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(table) == len(rows)
    assert all(line[-1] == "0" for line in table if "copy" not in line), "wrong results"
    assert "# all_reduce of 0 MiB of float32, ipc, symmetric arrays: " in done.stdout
    assert "# all_reduce of float32: not served by aware, mpi, nccl" in done.stdout


def test_a_step_is_beside_the_one_without_communication() -> None:
    import training_report

    for step, verdict in ((108.0, "kept"), (111.0, "MISSED")):
        times = {"single": np.array([0.1]), "zero3": np.array([step / 1000])}
        lines: list[str] = []
        training_report.compare(times, lines.append, bounded=True)
        assert lines[-1] == f"# zero3: {step / 100:.3f} of single (at most 1.1: {verdict})"
        training_report.compare(times, lines.append)
        assert lines[-1] == f"# zero3: {step / 100:.3f} of single"


def test_a_ratio_is_of_the_same_turns() -> None:
    """The machine is half as fast in the second turn; so are both."""
    import training_report

    times = {"single": np.array([0.1, 0.2, 0.1]), "ddp": np.array([0.11, 0.24, 0.13])}
    lines: list[str] = []
    training_report.compare(times, lines.append)
    assert lines == ["# ddp: 1.200 of single"]
    times |= {"all-reduce": np.array([0.01, 0.04, 0.03]), "zero1": np.array([0.1, 0.1, 0.1])}
    lines.clear()
    training_report.compare(times, lines.append)
    assert lines == [
        "# ddp: 1.200 of single",
        "# zero1: 1.000 of single, 0.769 of ddp",
        "# ddp: 1.000 of single + all-reduce",
    ]
    launches = {"single": np.array([[0.1, 0.2], [0.1, 0.1]]), "ddp": np.array([[0.11, 0.24], [0.13, 0.12]])}
    lines.clear()
    training_report.compare(launches, lines.append)
    assert lines == ["# ddp: 1.200 (1.150 to 1.250) of single"]
