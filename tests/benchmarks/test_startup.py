"""Cost of starting a job: its benchmark runs, and the import brings in little beyond torch and mpi4py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import ROOT, environment, run

# What a program may need later and must not pay for when it starts.
HEAVY = (
    *("torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "torch.testing", "torch.utils.tensorboard"),
    *("transformers", "safetensors", "tokenizers", "tiktoken", "sklearn", "scipy", "PIL", "matplotlib", "cupy"),
)


def test_importing_mpidl_brings_in_little_beyond_torch_and_mpi4py() -> None:
    program = (
        "import sys, torch, numpy; from mpi4py import MPI; before = set(sys.modules)\n"
        "import mpidl; print(*sorted(set(sys.modules) - before))"
    )
    done = run([sys.executable, "-c", program], 60, ROOT, environment())
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    foreign = [name for name in modules if name.split(".")[0] not in ("mpidl", "collectives")]
    assert len(foreign) <= 12, foreign
    assert not [name for name in foreign if name.startswith(HEAVY)]
    assert len(modules) <= 253, "modules of the project's own, each of which costs about a millisecond"


@pytest.mark.thorough
@pytest.mark.limit(200)
def test_the_time_to_the_first_step_is_told_by_stages(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/bench_startup.py", "--ranks", "2", "--launches", "1", "--json", str(path)]
    done = run(command, 180, ROOT, environment())
    assert done.returncode == 0, done.stderr
    times = json.loads(path.read_text())["2"]
    for stages in times.values():
        (whole,) = stages["all"]
        parts = [stages[stage][0] for stage in ("launch", "import", "join", "wrap", "step")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(whole, abs=1e-3)
    assert "mpidl of torch" in done.stdout


def test_wrong_numbers_are_refused() -> None:
    wrong = subprocess.run(
        [sys.executable, "benchmarks/bench_startup.py", "--ranks", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "need numbers of at least 1" in wrong.stderr
