"""Whole jobs with DistributedDataParallel in which something goes wrong: they end, and say why."""

from __future__ import annotations

import pytest


@pytest.mark.thorough
def test_a_hook_that_raises_on_one_rank_ends_the_job(mpirun) -> None:
    program = """
import torch, mpidl
comm = mpidl.init()
wrapped = mpidl.DistributedDataParallel(torch.nn.Linear(2, 2))
def hook(state, bucket):
    if comm.rank == 1:
        raise ValueError("no good")
    return mpidl.comm_hooks.allreduce(state, bucket)
wrapped.register_comm_hook(None, hook)
wrapped(torch.ones(1, 2)).sum().backward()
"""
    done = mpirun(2, "-c", program)
    assert done.returncode != 0
    assert "rank 1 of 2 ends the job" in done.stderr
    assert "ValueError: no good" in done.stderr
