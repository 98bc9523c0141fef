"""The watchdog's reports say in which phase of which step each rank is, with any engine."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from collectives.runtime.program import described
from mpidl.job.phase import follow_steps


def phase() -> str:
    """The phase of the main thread, as another thread sees it."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(described).result()[1]


class Telling(torch.nn.Linear):
    """Tells the phases of its forward and backward passes."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(2, 2)
        self._told = told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._told.append(phase())
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._told.append(phase()))
        return y


class Nested(torch.optim.SGD):
    """A step with others inside, as an engine has."""

    def __init__(self, parameters: Any, told: list[str]) -> None:
        super().__init__(parameters, lr=0.1)
        self._told, self._inner = told, [torch.optim.SGD(group["params"], lr=0.1) for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        self._told.append(phase())
        for inner in self._inner:
            inner.step()
        return super().step(closure)


def test_the_phases_of_steps_are_told_and_steps_inside_others_not_counted() -> None:
    follow_steps()
    told: list[str] = []
    model = Telling(told)
    optimizer = Nested(model.parameters(), told)
    found = []
    for _ in range(2):
        checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()
        optimizer.step()
        found.append([*told, phase()])
        told.clear()
    first = int(found[0][0].split()[-1])
    for step, words in enumerate(found, first):
        assert words[0] == f"in the forward pass of step {step}"
        assert set(words[1:-2]) == {f"in the backward pass of step {step}"}
        assert words[-2] == f"in the optimizer's step {step}"
        assert words[-1] == f"in step {step + 1}"


def test_steps_in_a_backward_pass_and_in_other_threads_are_not_counted() -> None:
    follow_steps()
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.step()
    before = phase()
    handle = p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    p.sum().backward()
    handle.remove()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert phase() == before
    optimizer.step()
    assert phase() != before


PROGRAM = """
import time, torch, mpidl
comm = mpidl.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
late, waits = comm.rank == 1, {waits!r}

def sleep(*_):
    if late:
        time.sleep(100)

{engine}
for step in range(3):
    loss = run(torch.ones(2, 4)).sum()
    if step == 1 and waits == "forward":
        sleep()
    if step == 1 and waits == "backward":
        model[1].weight.register_hook(sleep)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
run = mpidl.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
ZERO = """
run, optimizer = model, mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "waits", "where"),
    [
        pytest.param(DDP, "backward", "in the backward pass of step 2", id="ddp"),
        pytest.param(ZERO, "forward", "in step 2", id="stage 2"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_phase(
    mpirun: Callable[..., Any], tmp_path: Path, engine: str, waits: str, where: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(engine=textwrap.dedent(engine), waits=waits))
    job = mpirun(2, path, timeout=90, MPIDL_TIMEOUT="3")
    assert job.returncode != 0
    said = next(line for line in job.stderr.splitlines() if "has waited" in line)
    assert said.startswith("mpidl: rank 0 of 2 has waited")
    assert said.endswith("), in the backward pass of step 2")
    late = next(line for line in job.stderr.splitlines() if "not arrived" in line)
    assert late.startswith("  not arrived: rank 1, which is after ")
    assert late.endswith(f"), {where}")
