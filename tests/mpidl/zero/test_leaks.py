"""Steps leave nothing behind, and engines follow one another: tensors, hooks, allocations, files, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

import mpidl
from mpidl import Offload
from mpidl.models.gpt2 import GPT2, GPT2Config
from tests.mpidl.small_models import fresh, sequences
from tests.mpidl.zero.ways import STAGES, WAYS

pytestmark = pytest.mark.mpi

STAGE_2 = {**WAYS["stage 2"], "bucket_cap_mb": 0.5}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "stage 2": STAGE_2,
    "stage 2, bfloat16": {**STAGE_2, "precision": mpidl.Precision(torch.bfloat16)},
    "stage 2, offloaded": {**STAGE_2, "offload": Offload("cpu", delayed_update=True, delay_from=2)},
    **{way: WAYS[way] for way in ("stage 3", "stage 3 gathered")},
}
STEPS = 50
HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def model() -> torch.nn.Module:
    """Model of 0.6 MB, so that a copy of its weights a step is more than what allocators and interpreters keep."""
    return GPT2(GPT2Config(vocab_size=37, block_size=8, layers=3, heads=2, embd=64))


class Training:
    """One engine on a GPT-2."""

    def __init__(self, comm, engine: str) -> None:
        self.comm, self.model = comm, fresh(model)
        self.weights = sum(p.numel() * p.element_size() for p in self.model.parameters())  # bytes
        self.call: Any = self.model
        if engine == "ddp":
            self.call = mpidl.DistributedDataParallel(self.model, process_group=comm)
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        else:
            self.optimizer = mpidl.ZeroOptimizer(self.model, torch.optim.AdamW, process_group=comm, **ENGINES[engine])

    def step(self, number: int) -> None:
        """With all that a step may hold: accumulation, evaluation, clipping, a look at whole weights."""
        x, y = sequences(number % 4, 0)
        for _ in range(2):
            self.call(x, y).backward()
        clip = getattr(self.optimizer, "clip_grad_norm_", None)
        if clip is not None:
            clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number % 5 == 0:
            with torch.no_grad():
                self.call(x, y)
            if clip is not None:
                with self.optimizer.gathered(writable=False):
                    float(next(self.model.parameters()).sum())

    def counts(self) -> dict[str, int]:
        """Counts all that may grow, when nothing is in flight."""
        for p in self.model.parameters():
            p.untyped_storage()
        len(self.optimizer.state)  # waits for a delayed update
        gc.collect()
        return {
            "tensors": tensors(),
            "hooks": sum(map(hooks, self.call.modules())) + sum(map(hooks, self.model.parameters())),
            "allocations": self.comm.stats()["allocations"],
            "descriptors": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
        }


def tensors() -> int:
    """All that Python knows of."""
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def hooks(owner: torch.nn.Module | torch.nn.Parameter) -> int:
    """Counts hooks of all kinds."""
    return sum(len(getattr(owner, kind, None) or ()) for kind in HOOKS)


def resident() -> int:
    """Bytes of this process's own memory, without what malloc keeps of freed memory, where a leak would hide."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such line")


@pytest.mark.brief_on(2)
@pytest.mark.each("engine")
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_leave_nothing_behind(comm, engine: str, fewer: Callable[[int], int]) -> None:
    training = Training(comm, engine)
    quarter = (fewer(STEPS) if comm.size == 2 else STEPS // 4) // 4
    counts: list[dict[str, int]] = []
    memory: list[int] = []
    for _ in range(4):
        for number in range(quarter):
            training.step(number)
        counts.append(training.counts())
        memory.append(resident())
    grown = {name: count - counts[0][name] for name, count in counts[-1].items() if count > counts[0][name]}
    assert grown == {}  # what earlier tests left may go meanwhile
    # A quarter of a copy of the weights a step. Malloc may keep more pages once; a leak grows in every quarter.
    least = min(later - earlier for earlier, later in pairwise(memory))
    assert least < min((4 << 20) / 3, training.weights * quarter / 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_one_after_the_other_give_all_back(comm, engine: str) -> None:
    """Also what is in flight when an engine is deleted, once it has arrived."""

    def left() -> tuple[int, int]:
        gc.collect()
        return tensors(), comm.stats()["allocations"]

    counts: list[tuple[int, int]] = []
    for _ in range(3):
        training = Training(comm, engine)
        for number in range(2):
            training.step(number)
        gone = weakref.ref(training.model), weakref.ref(training.optimizer)
        del training
        until = monotonic() + 5
        while counts and monotonic() < until and any(now > then for now, then in zip(left(), counts[-1], strict=True)):
            sleep(0.01)
        comm.barrier()
        counts.append(left())
        assert engine not in STAGES or [each() for each in gone] == [None, None]
    assert all(later <= earlier for earlier, later in zip(counts[1], counts[2], strict=True))
