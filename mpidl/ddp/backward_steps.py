"""Steps within the backward pass: a bucket's parameters are stepped when it is reduced, and their gradients released.

    backward    g9 g8 | g7 g6           | g5 g4                   | g3 g2 ...
    bucket 0    fills   is reduced in A                             stepped: its buffer is needed again
    bucket 1            fills             is reduced in B
    bucket 2                              fills                     is reduced in A

Two buffers, used in turn, replace the arena of all gradients, as large as the two largest buckets of a dtype. A
gradient stays where autograd has put it until its bucket is filled; then it is copied to the buffer, and released once
the bucket's reduction has begun.

Who runs what: everything here is called by the thread of the backward pass, and each rank steps on parameters of its
own. The ranks begin the same collectives in the order of the buckets: of each bucket its reduction, and one of flags
that tell which of its parameters any rank has reached. If no buffer is free, a rank waits for both operations of the
oldest bucket. That depends on the buckets' sizes alone, so all ranks wait for the same bucket.

An exception or an interrupt may come anywhere. A bucket is in the list of those in flight from before it takes its
buffer until both operations have ended, and a buffer is free if none in the list has it: so no buffer is lost, and none
is filled while an operation may still write to it. If a hook begins operations on its bucket's Communicator and then
raises, they end before the next pass launches anything, as that pass begins with a collective on the same Communicator.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectives import Communicator, Work
from collectives.devices import Place

from ..errors import TrainingError
from ..gradients.backward import inside_backward
from ..gradients.buckets import GradientBucket
from ..gradients.foreign_steps import ForeignSteps
from ..gradients.grad_bucket import Handle
from ..partial_steps import NOT_REDUCED, STEP_INSIDE, STEP_NOT_CALLED, PartialSteps
from .used_gradient import UsedGradient


@dataclass
class _BufferedBucket:
    """A bucket that has a buffer.

    reached: flags of its parameters, of all ranks once `reached_work` has ended.
    handle, reached_work: the two operations, each None before it begins and after it has ended.
    has_failed: an error of one of them was raised.
    """

    bucket: GradientBucket
    buffer: torch.Tensor
    reached: np.ndarray
    handle: Handle | None = None
    reached_work: Work | None = None
    has_failed: bool = False


class BackwardSteps:
    """Reduces buckets in rotating buffers and steps on their parameters.

    names: of the module's parameters.
    reduce(bucket, number): begins a bucket's reduction.
    complete(bucket, handle): waits for it.
    is_unreduced(p): whether the parameter has a gradient of passes under no_sync that no later pass has averaged.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        place: Place,
        foreign: ForeignSteps,
        reduce: Callable[[GradientBucket, int], Handle],
        complete: Callable[[GradientBucket, Handle], None],
        is_unreduced: Callable[[torch.nn.Parameter], bool],
    ) -> None:
        self._optimizers, self._names = list(optimizers), names
        self._comm, self._place, self._foreign = comm, place, foreign
        self._reduce, self._complete, self._is_unreduced = reduce, complete, is_unreduced
        self._partial = {optimizer: PartialSteps(optimizer) for optimizer in optimizers}
        self._optimizer_of: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
        self._buffers: list[torch.Tensor] = []
        self._in_flight: deque[_BufferedBucket] = deque()
        self._streams: set[Any] = set()  # that were the last to read a buffer
        self._number = 0  # of buckets launched in this pass
        self._stepped: list[torch.nn.Parameter] = []  # in this pass
        self._awaiting_step_call: set[torch.optim.Optimizer] = set()  # stepped in a pass since `step` was called
        self._running_step: set[torch.optim.Optimizer] = set()  # whose `step` runs, and may run a pass as its closure
        self._handles = [_listen(optimizer, self) for optimizer in optimizers]

    # ---- between passes ---------------------------------------------------------------------------------------------

    def lay_out(self, buckets: Sequence[GradientBucket]) -> None:
        """Makes room for the two largest buckets of each dtype. Collective."""
        sizes: dict[torch.dtype, list[int]] = {}
        for bucket in buckets:
            sizes.setdefault(bucket.dtype, []).append(bucket.layout.padded)
        self._buffers = []  # gone before new ones are made
        self._buffers = [
            self._comm.empty(size, dtype, device=self._place.device)
            for dtype, every in sizes.items()
            for size in sorted(every)[-2:]
        ]

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Prepares `optimizer.step()`, which finds none of the gradients that a pass has used."""
        if inside_backward():
            raise TrainingError(STEP_INSIDE)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not has_closure and any(self._is_unreduced(p) for p in parameters):
            raise TrainingError(NOT_REDUCED)
        _forget_used(parameters)
        self._awaiting_step_call.discard(optimizer)
        self._running_step.add(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the end of `optimizer.step()`."""
        self._awaiting_step_call.discard(optimizer)
        self._running_step.discard(optimizer)

    @property
    def awaits_step_call(self) -> bool:
        """Returns whether an optimizer has stepped in a pass, and its `step` was not called after it."""
        return bool(self._awaiting_step_call)

    @property
    def bucket_tensors(self) -> list[torch.Tensor]:
        """The rotating buffers."""
        return self._buffers

    def remove(self) -> None:
        """Takes the hooks off the optimizers; passes step no more."""
        for optimizer, (before, after) in zip(self._optimizers, self._handles, strict=True):
            # `handle.remove()` does nothing where the garbage collector frees the handle.
            optimizer._optimizer_step_pre_hooks.pop(before.id, None)
            optimizer._optimizer_step_post_hooks.pop(after.id, None)
        _forget_used(list(self._names))
        self._buffers = []

    # ---- within a pass ----------------------------------------------------------------------------------------------

    def begin(self, synchronise: bool) -> None:
        """Begins a pass. Raises TrainingError if the pass before has stepped and this one does not communicate."""
        self.abandon()  # of a pass before, where an interrupt has cut `abandon` short
        if not synchronise:
            if self.awaits_step_call:
                raise TrainingError(STEP_NOT_CALLED)
            return
        self._number, self._stepped = 0, []
        self._optimizer_of = {
            p: optimizer for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        }

    @torch.no_grad()
    def launch(self, bucket: GradientBucket, given: Sequence[bool]) -> None:
        """Begins the reduction of a filled bucket. given: per parameter, whether this rank gives it a gradient.

        If the reduction raises, gradients stay where they are.
        """
        launched = _BufferedBucket(bucket, self._take_buffer(bucket), np.array(given, np.uint8))
        self._in_flight.append(launched)
        bucket.allocate(launched.buffer)
        for p, view in zip(bucket.parameters, bucket.views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
        launched.handle = self._reduce(bucket, self._number)
        if self._comm.size > 1:
            launched.reached_work = self._comm.all_reduce(launched.reached, "max", async_op=True)
        for p, is_given in zip(bucket.parameters, given, strict=True):
            if is_given and p in self._optimizer_of and p.grad is not None:
                self._place.record_use(p.grad)
                p.grad = None
        self._number += 1

    def _take_buffer(self, bucket: GradientBucket) -> torch.Tensor:
        """The smallest free one with room for the bucket."""
        while True:
            free = [b for b in self._buffers if all(b is not each.buffer for each in self._in_flight)]
            fitting = [b for b in free if b.dtype == bucket.dtype and len(b) >= bucket.layout.padded]
            if fitting:
                self._place.wait_for_streams(self._streams)
                return min(fitting, key=len)
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Waits for a bucket's reduction, and steps on its parameters."""
        oldest = self._in_flight[0]
        try:
            if oldest.handle is not None:
                self._complete(oldest.bucket, oldest.handle)
                oldest.handle = None
            if oldest.reached_work is not None:
                oldest.reached_work.wait()
                oldest.reached_work = None
        except Exception:
            oldest.has_failed = True
            raise
        self._apply_means(oldest)
        self._drop_oldest()

    def _apply_means(self, done: _BufferedBucket) -> None:
        """Steps with the means, or leaves them to parameters that have no optimizer here."""
        mine = []
        try:
            for p, view, reached in zip(done.bucket.parameters, done.bucket.views, done.reached.tolist(), strict=True):
                if not reached:
                    continue
                if p in self._optimizer_of:
                    p.grad = view
                    mine.append(p)
                elif p.grad is None:
                    p.grad = view.clone()
                else:
                    p.grad.copy_(view)
            self.step(mine)
        finally:
            for p, view in zip(done.bucket.parameters, done.bucket.views, strict=True):
                if p.grad is view:  # `step` did not come to it
                    p.grad = None
            self._streams.add(self._place.stream())

    def _drop_oldest(self) -> None:
        """Frees the buffer of a bucket whose operations have ended."""
        self._in_flight[0].bucket.release()
        self._in_flight.popleft()

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Steps on these, of those that an optimizer has, and releases their gradients."""
        chosen: dict[torch.optim.Optimizer, list[torch.nn.Parameter]] = {}
        for p in parameters:
            if p in self._optimizer_of:
                chosen.setdefault(self._optimizer_of[p], []).append(p)
        for optimizer, some in chosen.items():
            self._awaiting_step_call.add(optimizer)
            try:
                with self._foreign.engine_writes(some):
                    self._partial[optimizer].step(some)
                    torch.autograd.graph.increment_version(some)  # fused optimizers write what torch does not count
            finally:
                for p in some:
                    p.grad = None
            self._stepped += some

    @torch.no_grad()
    def finish(self) -> None:
        """Steps on the remaining parameters, once all buckets have been launched."""
        while self._in_flight:
            self._finish_oldest()
        self._streams.clear()  # the next pass comes after this one

    def end(self) -> None:
        """Ends the pass: from now on, reading a gradient that its step has used raises an error."""
        for p in self._stepped:
            if p.grad is None and self._optimizer_of[p] not in self._running_step:
                p.grad = UsedGradient(p, self._names[p])

    def abandon(self) -> None:
        """Ends a pass that an exception cut short: waits for what was launched on all ranks, and does not step on it.

        Raises the first error of an operation that was not raised before, when all have ended. Where an interrupt comes
        before, the next pass begins with the rest.
        """
        first: Exception | None = None
        while self._in_flight:
            oldest = self._in_flight[0]
            for operation in (oldest.handle, oldest.reached_work):
                try:
                    if operation is not None:
                        operation.wait()
                except Exception as error:
                    first = first or (None if oldest.has_failed else error)
            self._drop_oldest()
        if first is not None:
            raise first


def _listen(
    optimizer: torch.optim.Optimizer, steps: BackwardSteps
) -> tuple[torch.utils.hooks.RemovableHandle, torch.utils.hooks.RemovableHandle]:
    """Tells `steps` of calls of the optimizer's step, and does not keep it. Returns the handles of both hooks."""
    where = weakref.ref(steps)

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = where()
        if alive is not None:
            alive.before_step(optimizer, any(callable(given) for given in (*args, *kwargs.values())))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = where()
        if alive is not None:
            alive.after_step(optimizer)

    return optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)


def _forget_used(parameters: Sequence[torch.Tensor]) -> None:
    for p in parameters:
        if isinstance(p.grad, UsedGradient):
            p.grad = None
