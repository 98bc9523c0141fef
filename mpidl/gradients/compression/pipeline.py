"""Runs the reductions of several buckets at once, phase by phase, in the thread of the backward pass.

    bucket 0    phase 0 ── phase 1 ── phase 2 ── done
    bucket 1               phase 0 ── phase 1 ── phase 2 ...         a phase: operations on a Communicator of its own
    bucket 2                          phase 0 ...

A bucket enters a phase after the bucket before it has entered it, on every rank: so operations on each Communicator are
in the same order everywhere, whenever a rank continues. `poll` continues what need not wait. A rank that waits for
bucket k has started all that the others need for it, as they wait for no later bucket: nothing can deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from collectives import Work

from ..grad_bucket import ChainedWork, plain_wait
from .compressor import Steps


class PipelinedReduction(ChainedWork):
    """The reduction of one bucket: the handle of the communication hook.

    phases_entered: int; how many it has begun.
    done: bool.
    found: what `wait` returns.
    """

    def __init__(self, pipeline: Pipeline, steps: Steps, found: Callable[[], torch.Tensor | None]) -> None:
        self._pipeline, self._steps, self._found = pipeline, steps, found
        self._works: list[Work] = []
        self.phases_entered, self.done = 0, False

    def wait(self, wait: Callable[[Work], None] = plain_wait) -> torch.Tensor | None:
        """Blocks until the bucket, and those before it, are reduced. wait: how an engine waits for an operation."""
        self._pipeline.finish(self, wait)
        return self._found()

    def enter_next_phase(self) -> None:
        """Takes up the results of the phase under way, and starts the operations of the next."""
        begun = time.thread_time()
        try:
            self._works = next(self._steps)
            self.phases_entered += 1
        except StopIteration:
            self._works, self.done = [], True
        self._pipeline.computing_seconds += time.thread_time() - begun

    def is_completed(self) -> bool:
        """Returns whether the phase under way is over."""
        return all(work.is_completed() for work in self._works)

    def wait_for_phase(self, wait: Callable[[Work], None]) -> None:
        """Blocks until the phase under way is over."""
        for work in self._works:
            wait(work)


class Pipeline:
    """The reductions under way, in the order of their buckets.

    computing_seconds: float; time that this thread has computed in their phases, without its waits.
    """

    def __init__(self) -> None:
        self.computing_seconds = 0.0
        self._in_flight: list[PipelinedReduction] = []

    def start(self, steps: Steps, found: Callable[[], torch.Tensor | None]) -> PipelinedReduction:
        """Starts the first phase of a bucket's reduction, and continues earlier ones."""
        self.poll()
        made = PipelinedReduction(self, steps, found)
        self._in_flight.append(made)
        made.enter_next_phase()
        return made

    def poll(self) -> None:
        """Continues each reduction whose phase is over, as far as the one before it has come."""
        before: PipelinedReduction | None = None
        for each in self._in_flight:
            while _may_continue(each, before) and each.is_completed():
                each.enter_next_phase()
            before = each
        self._in_flight = [each for each in self._in_flight if not each.done]

    def finish(self, until: PipelinedReduction, wait: Callable[[Work], None]) -> None:
        """Completes the reductions up to this one; the later ones go on meanwhile."""
        while not until.done:
            first = self._in_flight[0]
            first.wait_for_phase(wait)
            self.poll()

    def drain(self) -> None:
        """Completes all."""
        if self._in_flight:
            self.finish(self._in_flight[-1], plain_wait)


def _may_continue(each: PipelinedReduction, before: PipelinedReduction | None) -> bool:
    return not each.done and (before is None or before.done or before.phases_entered > each.phases_entered)
