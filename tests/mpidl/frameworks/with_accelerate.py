"""A loop with accelerate in every engine, compared with one process; its own checkpoints, and mpidl's.

Usage: with_accelerate.py FOLDER    FOLDER: empty, the same on every rank.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import mpidl
from tests.mpidl.frameworks.reference import (
    LENGTH,
    MAX_NORM,
    SEQUENCES,
    STEPS,
    Run,
    check,
    reference,
    sequences,
    weights_of,
    wrapped,
)


class Loop:
    """A model and an optimizer as accelerate prepares them."""

    def __init__(self, way: str) -> None:
        self.model, self.optimizer = wrapped(way)
        self.accelerator = Accelerator()
        self.called, self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def run(self, rank: int, steps: range = range(STEPS)) -> Run:
        """Trains on the rank's sequences."""
        losses, norms = [], []
        for step in steps:
            batch = sequences(rank).view(STEPS, SEQUENCES, LENGTH)[step]
            loss = self.called(input_ids=batch, labels=batch).loss
            self.accelerator.backward(loss)
            norms.append(float(self.accelerator.clip_grad_norm_(self.called.parameters(), MAX_NORM)))
            self.prepared.step()
            self.prepared.zero_grad()
            losses.append(loss.item())
        return Run(losses, norms, weights_of(self.model, self.optimizer))

    def whole(self, writable: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, accelerate's save_state and load_state see whole weights."""
        is_zero = isinstance(self.optimizer, mpidl.ZeroOptimizer)
        return self.optimizer.gathered(writable=writable) if is_zero else contextlib.nullcontext()


def resume(rank: int, way: str, folder: Path, whole: Run, by_mpidl: bool) -> None:
    """Half a run, and the rest of it by another loop."""
    half = STEPS // 2
    first, second = Loop(way), Loop(way)
    first.run(rank, range(half))
    zero: Any = first.optimizer
    if by_mpidl:
        mpidl.checkpoint.save(folder, first.model, zero, step=half)
        mpidl.checkpoint.load(folder, second.model, second.optimizer)
    else:
        with first.whole(writable=False):
            first.accelerator.save_state(str(folder / f"rank{rank}"))
        with second.whole(writable=True):
            second.accelerator.load_state(str(folder / f"rank{rank}"))
    rest = second.run(rank, range(half, STEPS))
    assert rest.losses == whole.losses[half:], (way, by_mpidl, rest.losses, whole.losses)
    assert all(torch.equal(rest.weights[name], p) for name, p in whole.weights.items()), (way, by_mpidl)


def main(folder: Path) -> None:
    """Runs all; prints "done" where all is as it must be."""
    comm = mpidl.init()
    expected = reference(comm.size)
    for way in ("stage 2", "stage 3", "stage 3 gathered", "ddp"):
        found = Loop(way).run(comm.rank)
        check(comm, way, found, expected)
        for by_mpidl in (True, False):
            into = folder / way / ("mpidl" if by_mpidl else "accelerate")
            into.mkdir(parents=True, exist_ok=True)
            resume(comm.rank, way, into, found, by_mpidl)
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
