"""Stage 3 where ranks gather, and a pass that an exception cuts while one rank is a round ahead of the others."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import mpidl
from collectives import Work, WorkTimeout
from tests.harness import launch
from tests.mpidl.zero.reference import Late, Several, after_failure, engine, plainly, strategy, wait_for_rounds

CUT = ZeroDivisionError


class Never(Work):
    """A reduction to which another rank does not come."""

    def __init__(self) -> None:
        super().__init__("never")


def cut_pass(model: Any, optimizer: mpidl.ZeroOptimizer, rank: int) -> None:
    """All ranks fail in the same place of a backward pass; rank 0 has started a round there, the others have not."""

    def fail(_: torch.Tensor) -> None:
        if rank == 0:
            wait_for_rounds(optimizer)  # that all have started
            strategy(optimizer).wait_for_reduction(Late())
        raise CUT("deliberate")

    handle = model.blocks[1].inner.weight.register_hook(fail)
    try:
        plainly(model, rank, 0).backward()
    except CUT:
        handle.remove()
        return
    raise AssertionError("the pass was not cut")


def left_open(optimizer: Any) -> Any:
    return strategy(optimizer)._rounds.last


@pytest.mark.mpi
@pytest.mark.parametrize("before", ["first", "later"])
def test_a_round_that_is_left_does_not_outlive_the_next_construction(comm, duplicated: list[str], before: str) -> None:
    """Neither does it keep the engine, nor cost a Communicator."""
    if comm.size == 1:
        return  # nothing is gathered there
    count = 0
    for _ in range(3):
        gc.collect()
        model, optimizer = engine(comm, Several, "stage 3 gathered")
        if before == "later":
            after_failure(comm, model, optimizer, Several)
        cut_pass(model, optimizer, comm.rank)
        left = left_open(optimizer)
        comm.barrier()
        if comm.rank == 0:
            assert not left.is_over()
        else:
            left.wait()
        count = count or len(duplicated)
        parameters = torch.utils.weak.ref(strategy(optimizer))
        del model, optimizer
        gc.collect()
        assert parameters() is None
        model, optimizer = engine(comm, Several, "stage 3 gathered")
        assert left.is_over()
        assert len(duplicated) == count
        after_failure(comm, model, optimizer, Several)
        del model, optimizer


@pytest.mark.mpi
def test_training_goes_on_after_it(comm) -> None:
    if comm.size == 1:
        return
    model, optimizer = engine(comm, Several, "stage 3 gathered")
    cut_pass(model, optimizer, comm.rank)
    left = left_open(optimizer)
    optimizer.zero_grad()
    after_failure(comm, model, optimizer, Several)
    assert left.is_over()


@pytest.mark.mpi
def test_a_communicator_can_be_closed_after_it(comm) -> None:
    if comm.size == 1:
        return
    own = comm.duplicate()
    model, optimizer = engine(own, Several, "stage 3 gathered")
    cut_pass(model, optimizer, comm.rank)
    left = left_open(optimizer)
    own.close()
    assert left.is_over()


@pytest.mark.mpi
def test_a_wait_with_a_limit_takes_part_in_gathers(comm) -> None:
    if comm.size == 1:
        return
    model, optimizer = engine(comm, Several, "stage 3 gathered")
    if comm.rank == 0:
        with pytest.raises(WorkTimeout, match="never"):
            strategy(optimizer).wait_for_reduction(Never(), 0.1)
        left_open(optimizer).wait()  # the others come to a round that this rank has started
    else:
        strategy(optimizer).wait_for_reduction(Late())
        left_open(optimizer).wait()
    after_failure(comm, model, optimizer, Several)


_PROGRAM = """
import gc, sys, time
import torch, mpidl
from tests.mpidl.zero.parameters.test_cut import cut_pass, left_open
from tests.mpidl.zero.reference import Several, engine, plainly
comm = mpidl.init()
model, optimizer = engine(comm, Several, "stage 3 gathered")
{}
"""
_CUT = """cut_pass(model, optimizer, comm.rank)
assert comm.rank or not left_open(optimizer).is_over()
comm.barrier()
"""
_GONE = "del model, optimizer\ngc.collect()\n"
# Longer than the limit. On rank 0, whose round is left; on rank 1, for which it waits.
_PAUSE = "if comm.rank == {}:\n    time.sleep(4)\n"


@pytest.mark.thorough
@pytest.mark.job
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        (_GONE, 0),
        ("sys.exit(3)\n", 3),
        (_GONE + _PAUSE.format(1), 0),
        (_PAUSE.format(0) + "comm.close()\n", 0),
    ],
    ids=["alive", "gone", "exit", "late", "close"],
)
def test_the_end_of_the_job_does_not_wait_for_a_round_that_is_left(end: str, status: int) -> None:
    done = launch.mpirun(2, "-c", _PROGRAM.format(_CUT + end), timeout=100, MPIDL_TIMEOUT="2")
    assert done.returncode == status, done.stderr
    assert status or not done.stderr
    # Else what there is may be from an mpirun that tells of the status.
    assert not any(word in done.stderr for word in ("mpidl", "Traceback", "Error"))


@pytest.mark.thorough
@pytest.mark.job
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_rank_that_exits_in_the_middle_ends_the_job_with_its_status(where: str) -> None:
    leave = {
        "forward": "model.blocks[1].register_forward_pre_hook(lambda *_: sys.exit(5))\n",
        "backward": "model.blocks[1].inner.weight.register_hook(lambda _: sys.exit(5))\n",
        "step": "plainly(model, 1, 0).backward()\n    sys.exit(5)\n",
    }[where]
    steps = "for step in range(2):\n    plainly(model, comm.rank, 0).backward()\n    optimizer.step()\n"
    program = _PROGRAM.format(f"if comm.rank == 1:\n    {leave}{steps}")
    done = launch.mpirun(3, "-c", program, timeout=100)
    assert done.returncode == 5
    assert "rank 1, which is at the end of its program with status 5" in done.stderr


@pytest.mark.thorough
@pytest.mark.job
@pytest.mark.parametrize(
    "hook", ["register_forward_pre_hook(fail)", "inner.weight.register_hook(fail)"], ids=["forward", "backward"]
)
def test_a_rank_that_goes_on_without_its_pass_is_told_at_its_step(hook: str) -> None:
    """While another waits for it in that pass."""
    program = _PROGRAM.format(f"""
def fail(*_):
    raise KeyError("deliberate")
mpidl.zero.parameters.sharded._REDUCTION_STALL_S = 0.5
if comm.rank == 1:
    model.blocks[1].{hook}
try:
    plainly(model, comm.rank, 0).backward()
except KeyError:
    pass
optimizer.step()
""")
    done = launch.mpirun(2, "-c", program, timeout=100)
    assert done.returncode == 1
    assert "mpidl: rank 1 of 2 ends the job" in done.stderr
    assert "in step" in done.stderr
    assert "TrainingError: rank 0 cannot go on with a backward pass in which this rank takes no part" in done.stderr
