"""Reduces gradients to shards: reduce-scatters each bucket as backward fills it, and keeps this rank's part.

Kinds of tensor, and which share storage:

    bucket.flat     a bucket's gradients, whole, in the dtype in which they are reduced; stage 1 keeps it, stages 2
                    and 3, and stage 1 with `step_in_backward`, take a buffer from `BufferPool` until it is reduced
    gradient shard  this rank's part of the mean over the ranks; in stage 1 a view of bucket.flat; fp32 of its own
                    once 16-bit ones are summed, clipped or unscaled
    values          this rank's part of the parameters; in stages 1 and 2 a view of the whole flat parameters
    slice           what the shard holds of one parameter: a view of `values`, or its fp32 master copy for 16-bit
                    parameters; the inner optimizer steps on slices

Who runs what: the thread of the backward pass; operations run in the progress thread of a Communicator that this engine
alone has (`shard_group`), in this order on every rank:

    as the pass begins          with a `Stepper` an all-reduce: may every rank step
    for each bucket, in order   reduce-scatter; with a `Stepper` also an all-reduce of what was reached
    at the end of the pass      waits for all of these
                                an all-reduce of flags: steps of hooks, gradients after launch, what was reached
                                reduce-scatters of the buckets that got gradients after their launch, and their wait
                                with a `Stepper` what the strategy's `release` and `publish` send

A rank without a free buffer waits for its own oldest reduction. That reduction needs only operations that every rank
launches before it. In stage 3 over nodes every wait here, that for the flags too, also takes part in gathers
(`wait_for_reduction`), which the other ranks may need first. So no two ranks wait for each other. In a backward pass of
several engines another rank may come to that reduction only after one of another engine, which waits for this rank:
then the bucket takes new memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives import Work, WorkTimeout
from collectives.devices import HOST, Place

from ...errors import TrainingError, listed
from ...gradients.backward import BackwardWatch
from ...gradients.bucket_queue import BucketQueue
from ...gradients.buckets import GradientBucket, rank_order_algorithm
from ...gradients.foreign_steps import ForeignSteps
from ...gradients.grad_bucket import ChainedWork, GradBucket, Hook, begin, completed, result_of
from ..parameter_shard import ParameterShard
from ..shard_group import ShardGroup
from .bucket_gradient import BucketGradient
from .buffer_pool import BufferPool
from .hooked_reduction import bucket_for_hook, bucket_without_storage, take_result
from .reduced_gradients import ReducedGradients
from .sharded_gradient import ShardedGradient
from .stepper import Stepper

_BUFFER_WAIT_S = 0.1  # for a reduction, before a bucket takes other memory in a backward pass of several engines


class ShardReducer:
    """Reduces every bucket's gradients, as backward fills it, so that each rank holds the mean of its shard.

    shards: of the parameters of each bucket, in the order in which they are reduced.
    over: the ranks that have shards, and those that have the same one.
    watch: of the backward passes; `begin_pass`, `queue` and `abandon_pass` belong to its phases.
    keep_whole: stage 1 without `step_in_backward`, where the buckets stay allocated; else they take turns in a few
        buffers.
    names: of the parameters.
    reduce_dtype: of the buckets; by default that of their parameters.
    wait: waits for a Work, optionally with a limit in seconds, after which it raises WorkTimeout.
    num_shared_buffers: of each dtype; one fills while the others are reduced. `BufferPool` makes it more on a GPU.
    num_dedicated_buffers: buckets, the last ones, with buffers of their own, as they fill all through a pass.
    place: where the parameters lie.
    keeps_shard_memory: on the host, memory of fp32 shards stays from step to step, which spares new pages and a copy.

    reduced_gradients: ReducedGradients; the gradients between passes.
    stepper: if there is one, gradients are given to it as they are reduced, and then forgotten; may be set.
    counted: as of `ZeroTraffic`.

    Gradients of several passes add up until `ReducedGradients.clear`. What autograd gives a parameter is taken away at
    once.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        over: ShardGroup,
        watch: BackwardWatch,
        keep_whole: bool,
        names: Mapping[torch.nn.Parameter, str],
        reduce_dtype: torch.dtype | None = None,
        *,
        wait: Callable[..., None],
        num_shared_buffers: int = 3,
        num_dedicated_buffers: int = 0,
        place: Place = HOST,
        keeps_shard_memory: bool = True,
    ) -> None:
        self._place = place
        # Not for replicas, whose own reduction is without copies in symmetric memory.
        fresh_memory = keep_whole or place.keeps_freed or over.replica_comm is not None
        self._keeps_shard_memory = keeps_shard_memory and not fresh_memory
        self._over, self._comm = over, over.backward_shard_comm
        self._names, self._watch = names, watch
        self._keep_whole = keep_whole
        self.stepper: Stepper | None = None
        self.hook: tuple[Any, Hook] | None = None  # what communicates in place of the reduce-scatter, and its state
        self._reduce_dtype = reduce_dtype
        self._wait = wait
        self.counted = {"reductions": 0, "reduced_bytes": 0}
        self._by_bucket: dict[GradientBucket, BucketGradient] = {}
        self._algorithm = rank_order_algorithm(self._comm, "reduce_scatter")
        self._in_flight: deque[BucketGradient] = deque()
        self._gradients_after_launch: dict[GradientBucket, dict[int, torch.Tensor]] = {}  # by bucket and parameter
        self._foreign = ForeignSteps(names)
        self._parameters: list[torch.nn.Parameter] = []  # of all buckets
        buckets = self._make(shards)
        self._buffers = BufferPool(
            [] if keep_whole else buckets,
            self._comm,
            num_shared_buffers,
            buckets[len(buckets) - num_dedicated_buffers :],
            place,
            saves_memory=not keeps_shard_memory,
        )
        self.queue = BucketQueue(
            buckets,
            watch,
            take=self._take,
            launch=self._launch,
            finish=self._finish_pass,
            missing=lambda *_: None,
            on_gradient_after_launch=self._on_gradient_after_launch,
            place=place,
        )
        self.reduced_gradients = ReducedGradients(
            self._by_bucket,
            self.queue,
            self._buffers,
            self._comm.rank,
            keep_whole,
            place,
            finish_reductions=self._finish_reductions,
            discard_reductions=self._end_reductions,
        )

    def add(self, shards: Sequence[ParameterShard]) -> None:
        """Adds buckets, which are reduced after the present ones. Collective."""
        self.queue.set_buckets([*self.queue.buckets, *self._make(shards)])
        if not self._keep_whole:  # they may need larger buffers
            self._buffers.set_buckets(self.queue.buckets)

    def _make(self, shards: Sequence[ParameterShard]) -> list[GradientBucket]:
        buckets = [GradientBucket(shard.parameters, shard.layout) for shard in shards]
        for bucket in buckets:
            self._parameters += bucket.parameters
            bucket.dtype = self._reduce_dtype or bucket.dtype
            count = len(bucket.parameters)
            keeps_memory = self._keeps_shard_memory and bucket.dtype.itemsize > 2  # sums of 16-bit ones are fp32
            self._by_bucket[bucket] = BucketGradient(
                len(self._by_bucket), bucket, keeps_memory, [False] * count, [False] * count
            )
            if self._keep_whole:
                bucket.allocate(self._comm.empty(bucket.layout.padded, bucket.dtype, device=self._place.device))
        return buckets

    def buckets_without_storage(self) -> list[GradBucket]:
        """The buckets as a hook will see them, in their order, without gradients."""
        last = len(self._by_bucket) - 1
        return [bucket_without_storage(each, each.number == last, self._over) for each in self._by_bucket.values()]

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self.queue.remove()
        self._foreign.end()

    @property
    def buffer_count(self) -> int:
        """The number of buffers in which gradients are collected."""
        return self._buffers.count

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The gradients, whole or sharded, and the buffers that no bucket has."""
        shards = [g.shard for g in self._by_bucket.values() if g.shard is not None]
        whole = [b.flat for b in self.queue.buckets if b.flat is not None]
        whole += [gradient for sums in self._gradients_after_launch.values() for gradient in sums.values()]
        unused = [g.memory for g in self._by_bucket.values() if g.memory is not None and g.memory is not g.shard]
        return {"gradients": shards + whole, "buckets": self._buffers.free + unused}

    def begin_pass(self) -> None:
        """Begins a pass; raises TrainingError for create_graph=True. Collective where the pass makes steps."""
        _refuse_double_backward()
        if self.stepper is not None:
            self.reduced_gradients.forget_used()
        if self.queue.synchronise and self.stepper is not None:
            self.stepper.begin()
        self._foreign.begin(self._parameters)

    def end_pass(self) -> None:
        """Ends a pass, also one that has communicated nothing."""
        if not self.queue.synchronise:
            self._foreign.end_without_agreement()

    def _take(self, bucket: GradientBucket, index: int) -> None:
        parameter, gradients = bucket.parameters[index], self._by_bucket[bucket]
        gradient = self._take_from(parameter)
        if gradient is None:
            return
        self._ensure_storage(gradients)
        if gradients.filled[index]:
            bucket.views[index].add_(gradient)
        else:
            bucket.views[index].copy_(gradient)
        gradients.filled[index] = gradients.reached[index] = True

    def _on_gradient_after_launch(self, bucket: GradientBucket, index: int) -> None:
        """Keeps a parameter's second gradient in a pass, after its bucket was launched, until the end of the pass.

        Several re-entrant checkpoints that share the parameter give such ones.
        """
        gradient = self._take_from(bucket.parameters[index])
        if gradient is None:
            return
        sums = self._gradients_after_launch.setdefault(bucket, {})
        sums[index] = gradient.to(bucket.dtype, copy=True) if index not in sums else sums[index].add_(gradient)

    def _take_from(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Takes the gradient of this pass from a parameter."""
        gradient = parameter.grad
        if isinstance(gradient, ShardedGradient):
            gradient = gradient.take_arrived()
        else:
            parameter.grad = None
        if gradient is not None and gradient.layout != torch.strided:
            raise TrainingError(
                f"{self._names[parameter]}: its gradient is sparse; ZeRO's buckets are dense, so compute it densely"
            )
        return gradient

    def _agree_then_reduce_again(self) -> None:
        """Agrees on what any rank has reached; reduces the buckets once more that got gradients after their launch.

        Raises TrainingError on every rank where a hook has made a step.
        """
        world, buckets = self._over.backward_comm, self.queue.buckets
        reached = [r for bucket in buckets for r in self._by_bucket[bucket].reached]
        again = [bucket in self._gradients_after_launch for bucket in buckets]
        agreed = np.array([self._foreign.end_and_encode_change(world), *again, *reached], np.int64)
        work = world.all_reduce(agreed, "max", async_op=True)
        assert work is not None
        self._wait(work)  # others may still gather units
        foreign, *flags = agreed.tolist()
        self._foreign.refuse(foreign, world, self._parameters)
        anywhere, reached_anywhere = flags[: len(buckets)], iter(flags[len(buckets) :])
        if self.stepper is not None and any(anywhere):
            names = [self._names[p] for p in buckets[anywhere.index(1)].parameters]
            raise TrainingError(
                f"step_in_backward: a gradient of {listed(names)} came after the step on it, as of several re-entrant "
                "checkpoints that share a parameter; use torch.utils.checkpoint with use_reentrant=False"
            )
        for bucket in buckets:
            self._by_bucket[bucket].reached = [bool(next(reached_anywhere)) for _ in bucket.parameters]
        for bucket in (bucket for bucket, found in zip(buckets, anywhere, strict=True) if found):
            gradients = self._by_bucket[bucket]
            self._ensure_storage(gradients)
            for index, gradient in self._gradients_after_launch.pop(bucket, {}).items():
                if gradients.filled[index]:
                    bucket.views[index].add_(gradient)
                else:
                    bucket.views[index].copy_(gradient)
                gradients.filled[index] = True
            self._launch(bucket, repeated=True)
        self._finish_reductions()

    def _ensure_storage(self, gradients: BucketGradient) -> None:
        """Gives the bucket storage, if it has none, and moves what it reduced before out of it.

        Waits for the oldest reductions where all buffers are in use, unless another engine may have to go on first
        (`_oldest_times_out`).
        """
        bucket = gradients.bucket
        if bucket.flat is None:
            while (flat := self._buffers.take(bucket)) is None and self._in_flight and not self._oldest_times_out():
                self._finish_oldest_reduction(steps=True)
            if flat is None:  # more buckets fill than there are buffers, as under no_sync
                flat = torch.empty(bucket.layout.padded, dtype=bucket.dtype, device=self._place.device)
            self._place.wait_for_streams(self._buffers.readers)
            bucket.allocate(flat)
        elif not any(gradients.filled) and gradients.shard is not None and self._keep_whole:
            if self.reduced_gradients.sums_whole:
                self.reduced_gradients.whole_so_far(gradients.number)  # refuses what is not whole
                gradients.filled, gradients.shard = list(gradients.reached), None
            else:
                gradients.shard = gradients.shard.clone()

    def _oldest_times_out(self) -> bool:
        """Waits up to `_BUFFER_WAIT_S` for the oldest reduction if another engine may have to go on first.

        Returns True if it is not complete then; False at once if there is no such engine.
        """
        oldest = self._in_flight[0]
        if not self._watch.other_engine_may_run:
            return False
        try:  # others may still gather units
            if oldest.bucket.work is not None:
                self._wait(oldest.bucket.work, _BUFFER_WAIT_S)
            elif isinstance(oldest.handle, Work | ChainedWork):  # a program's own handle waits as long as it takes
                found = result_of(oldest.handle, lambda each: self._wait(each, _BUFFER_WAIT_S))
                oldest.handle = completed(found)
        except WorkTimeout:
            return True
        return False

    def _launch(self, bucket: GradientBucket, repeated: bool = False) -> None:
        gradients = self._by_bucket[bucket]
        self._ensure_storage(gradients)
        assert bucket.flat is not None
        for view, filled in zip(bucket.views, gradients.filled, strict=True):
            if not filled:
                view.zero_()
        if self._keep_whole:  # a shard that was clipped by a norm that is no number was a view of the bucket
            bucket.clear_padding()
        own = bucket.layout.shard(bucket.flat, self._comm.rank)
        if gradients.keeps_memory and gradients.shard is None:
            if gradients.memory is None:
                gradients.memory = torch.empty_like(own)
            own = gradients.memory
        gradients.target = own
        if self.hook is None:
            bucket.work = self._over.reduce_scatter(own, bucket.flat, self._algorithm)
        else:
            last = gradients.number == len(self.queue.buckets) - 1
            gradients.handle = begin(self.hook, bucket_for_hook(gradients, last, self._over, self._algorithm, repeated))
        self.counted["reductions"] += 1
        self.counted["reduced_bytes"] += bucket.nbytes
        self._in_flight.append(gradients)
        if self.stepper is not None:
            reached = np.array(gradients.reached, np.uint8)
            work = self._over.backward_comm.all_reduce(reached, "max", async_op=True)
            assert work is not None
            gradients.agreed_reached = reached, work
            with self._foreign.engine_writes(bucket.parameters):
                self.stepper.launched(gradients.number)

    def _finish_oldest_reduction(self, steps: bool) -> None:
        """Waits for the oldest reduction in flight, and adds its result to the bucket's shard.

        steps: give it to the stepper, if there is one; False where an exception has cut the pass short.
        """
        gradients = self._in_flight[0]
        bucket = gradients.bucket
        assert bucket.flat is not None
        if gradients.handle is not None:
            take_result(gradients, self._comm.rank, self._wait)
        else:
            assert bucket.work is not None
            self._wait(bucket.work)
        if gradients.agreed_reached is not None:
            self._wait(gradients.agreed_reached[1])
        self._in_flight.popleft()  # not before: what is under way is waited for, whatever happens
        bucket.work = gradients.handle = None
        target, before, gradients.target = gradients.target, gradients.shard, None
        assert target is not None
        if before is None:
            stays = self._keep_whole or target is gradients.memory or self.stepper is not None
            gradients.shard = target if stays else target.clone()
        elif target.dtype.itemsize == 2:
            gradients.shard = before.float().add_(target)  # many small ones would be lost in a 16-bit sum
        elif self._keep_whole:
            gradients.shard = target.add_(before)
        else:
            before.add_(target)
        gradients.filled = [False] * len(gradients.filled)
        if self.stepper is not None:
            self._step(self.stepper, gradients, steps)
        if not self._keep_whole:
            self._buffers.release(bucket)

    def _step(self, stepper: Stepper, gradients: BucketGradient, steps: bool) -> None:
        """Gives the reduced gradient to the stepper, and forgets it."""
        assert gradients.agreed_reached is not None
        assert gradients.shard is not None
        reached, _ = gradients.agreed_reached
        gradients.agreed_reached = None
        if steps:
            gradients.used = reached.astype(bool).tolist()
            stepper.step(gradients.number, gradients.shard, gradients.used)
        gradients.shard, gradients.reached = None, [False] * len(gradients.reached)

    def _finish_pass(self) -> None:
        self._finish_reductions(steps=True)
        self._agree_then_reduce_again()
        self._buffers.readers.clear()  # the next pass comes after this one
        if self.stepper is not None:
            self.stepper.end()

    def abandon_pass(self) -> None:
        """Abandons a pass that an exception has cut short: waits for its reductions, and drops the rest."""
        self._end_reductions()
        self._gradients_after_launch.clear()
        self._foreign.end()

    def _finish_reductions(self, steps: bool = False) -> None:
        while self._in_flight:
            self._finish_oldest_reduction(steps)

    def _end_reductions(self) -> None:
        """Waits for what is in flight, also where its results are lost, as a communication hook's wait() raises."""
        while self._in_flight:
            oldest = self._in_flight[0]
            try:
                self._finish_oldest_reduction(steps=False)
            except Exception:  # the pass has ended with one that tells more
                if self._in_flight and self._in_flight[0] is oldest:  # it raised while it waited
                    self._in_flight.popleft()
                oldest.bucket.work = oldest.handle = oldest.target = oldest.agreed_reached = None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise TrainingError(
            "backward(create_graph=True) through a model that a ZeroOptimizer trains: gradients of gradients cannot "
            "pass through the reduction to shards"
        )
