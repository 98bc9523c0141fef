"""Means of the dense buckets over the ranks: their memory, and the operations that reduce them in it.

                           memory                          reduced by
    usually                the arena (`bucket_memory`)     a `PartitionedAllReduce`, to which each is handed in
    communication hook     the arena                       what the hook starts for each bucket
    step_in_backward       rotating buffers                an operation for each bucket, or what the hook starts;
                           (`backward_steps`)              `backward_steps` calls `begin` and `complete`

Who runs what: the thread of the backward pass calls `launch` and `wait`, for the buckets in their order on every rank.
A bucket that is handed in is reduced by an all-reduce of its own, in the Communicator's progress thread, while backward
goes on. Where the ranks fill the cores of one node, one operation reduces all buckets at the end of the pass, in the
thread that waits there (`collectives.partitioned`). Sparse gradients are reduced elsewhere (`sparse`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from collectives import Communicator, PartitionedAllReduce
from collectives.devices import Place

from ..comm_hooks import allreduce
from ..gradients.buckets import GradientBucket, rank_order_algorithm
from ..gradients.grad_bucket import GradBucket, Handle, Hook, begin, sized_result
from .backward_steps import BackwardSteps
from .bucket_memory import BucketMemory
from .joined_passes import JoinedPasses
from .trained_parameters import TrainedParameters

if TYPE_CHECKING:  # at run time with compress= alone: few programs need it
    from ..gradients.compression.hook import CompressedReduction


class BucketMeans:
    """Gives the dense buckets their memory, and reduces them to their means.

    group: the user's Communicator, of which `comm` is a duplicate.
    place: where the parameters lie.
    join: has the factor of the means.

    hook: what communicates in place of the all-reduce, and its state; may be set.
    """

    def __init__(
        self, comm: Communicator, group: Communicator, place: Place, trained: TrainedParameters, join: JoinedPasses
    ) -> None:
        self._comm, self._group, self._duplicates = comm, group, {group: comm}
        self._place, self._trained, self._join = place, trained, join
        self.hook: tuple[Any, Hook] | None = None
        self._arena = BucketMemory(comm, place.device)
        self._all_reduce: PartitionedAllReduce | None = None  # of the dense buckets; one rank has none
        self._count = 0  # of the dense buckets
        self._in_flight: deque[tuple[GradientBucket, Handle]] = deque()

    # ---- between passes ---------------------------------------------------------------------------------------

    def lay_out(self, buckets: Sequence[GradientBucket], steps: BackwardSteps | None) -> None:
        """Gives the buckets their memory, and prepares their all-reduce. Collective.

        steps: within the passes; then buckets lie in its buffers, not in the arena.
        """
        self._all_reduce, self._count = None, len(buckets)
        if steps is not None:
            steps.lay_out(buckets)
            return
        self._arena.lay_out(buckets)
        if self._comm.size > 1 and buckets:
            flats = [bucket.flat for bucket in buckets]
            algorithm = rank_order_algorithm(self._comm, "all_reduce")
            self._all_reduce = self._comm.partitioned_all_reduce(flats, "avg", algorithm=algorithm)

    def release_arena(self) -> None:
        """Forgets the arena, which is freed with the buckets that lie in it."""
        self._arena = BucketMemory(self._comm, self._place.device)

    def retire(self) -> None:
        """Forgets what is under way, for which no rank waits, and the memory."""
        self._in_flight.clear()
        if self._all_reduce is not None:
            self._all_reduce.abandon()
        self._all_reduce = None
        self.release_arena()

    @property
    def reduces_at_end(self) -> bool:
        """True if no rank reduces a bucket before its backward pass is over."""
        return self.hook is None and self._all_reduce is not None and self._all_reduce.waits

    # ---- within a pass ----------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Tells the hook of `compress=` that a pass begins."""
        if (compressed := self._compressed()) is not None:
            compressed.begin_pass(self._has_gradients)

    def give_up_window(self) -> None:
        """Tells the hook of `compress=`, before and after a shadow pass, that no step of this rank follows."""
        if (compressed := self._compressed()) is not None:
            compressed.give_up_window()

    def note_missed(self, parameter: torch.nn.Parameter) -> None:
        """Tells the hook of `compress=` that this rank's pass does not reach a parameter."""
        if (compressed := self._compressed()) is not None:
            compressed.note_missed(parameter)

    def end_pass(self, reached: Set[torch.nn.Parameter]) -> None:
        """Tells the hook of `compress=` what the ranks' passes have reached."""
        if (compressed := self._compressed()) is not None:
            compressed.end_pass(reached)

    def _compressed(self) -> CompressedReduction | None:
        """The hook of `compress=`, if there is one."""
        if self.hook is None:
            return None
        from ..gradients.compression.hook import CompressedReduction

        return self.hook[1] if isinstance(self.hook[1], CompressedReduction) else None

    def _has_gradients(self) -> bool:
        given = (p.grad for p in self._trained.parameters if p.grad is not None)
        return any(g._nnz() > 0 if g.layout != torch.strided else bool(g.any()) for g in given)

    def launch(self, bucket: GradientBucket) -> None:
        """Starts the reduction of a filled bucket, in a pass that does not step."""
        if bucket.parameters[0] in self._trained.sparse:
            return  # they follow at the end, in their order
        if self.hook is not None:
            self._in_flight.append((bucket, self.begin(bucket, len(self._in_flight))))
        elif self._all_reduce is not None:
            assert bucket.flat is not None
            self._all_reduce.hand_in(bucket.flat)
            self._in_flight.append((bucket, self._all_reduce))

    def begin(self, bucket: GradientBucket, number: int) -> Handle:
        """Starts the reduction by the user's hook, or else by an operation of the bucket's own."""
        assert bucket.flat is not None
        if self.hook is not None:
            bucket.clear_padding()  # in which a hook may have written in the step before
        state, hook = self.hook or (self._group, allreduce)
        last = number == self._count - 1
        seen = GradBucket(number, last, bucket.flat, bucket.views, bucket.parameters, self._duplicates)
        return begin((state, hook), seen)

    def complete(self, bucket: GradientBucket, handle: Handle) -> None:
        """Waits until the bucket holds the mean."""
        assert bucket.flat is not None
        values = sized_result(handle, bucket.flat)
        if values.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(values)
        if self._join.mean_correction != 1.0:
            bucket.flat.mul_(self._join.mean_correction)

    def wait(self) -> None:
        """Waits until all buckets that were launched hold their means."""
        while self._in_flight:
            self.complete(*self._in_flight[0])
            self._in_flight.popleft()  # not before: what is under way is waited for, whatever happens

    def abandon(self) -> None:
        """Waits for what was launched on all ranks, in a pass that an exception has cut short."""
        while self._in_flight:
            with suppress(Exception):  # the pass has ended with one that tells more
                self._in_flight[0][1].wait()
            self._in_flight.popleft()
