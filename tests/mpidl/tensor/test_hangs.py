"""A rank of tp that does not come to a layer is named, with its place in the mesh, operation, step; the job ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import time, torch, mpidl
from mpidl.models.gpt2 import GPT2, GPT2Config
mpidl.init()
with mpidl.Mesh(tp=2) as mesh:
    torch.manual_seed(0)
    model = mpidl.parallelize(GPT2(GPT2Config(vocab_size=32, block_size=8, layers=1, heads=2, embd=8)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(1, 4, dtype=torch.int64)
    model(x, x).backward()
    optimizer.step()
    if mesh.comm.rank == mesh.comm.size - 1:
        time.sleep(100)  # so late
    model(x, x).backward()
    mesh.comm.barrier()
"""


@pytest.mark.thorough
def test_a_rank_that_does_not_come_to_a_layer_is_named_with_its_group_and_step(
    mpirun: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    job = mpirun(4, path, timeout=90, MPIDL_TIMEOUT="3")
    assert job.returncode != 0
    assert "rank 2 of 4 (dp=1, tp=0) has waited" in job.stderr
    assert "in all_reduce (operation " in job.stderr
    assert "of communicator 'tp at dp=1' of ranks 2, 3), in the forward pass of step 2\n" in job.stderr
    assert "not arrived: rank 3 (dp=1, tp=1), which is after " in job.stderr
    assert "), in step 2\n" in job.stderr
    assert "# so late" in job.stderr
