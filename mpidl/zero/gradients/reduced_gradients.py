"""Gradients between passes: this rank's shards of their means, and which parameters the passes have reached.

    zero_grad     pass, pass, ...           read, clipped, stepped on               zero_grad
    no shard      the shard adds up         `shard`, or with `sums_whole` `whole`   no shard

Who runs what: the thread of the program or of the backward pass. Nothing here starts a reduction; what is in flight of
a pass that an exception has cut short is waited for first; while it waits, stage 3 over nodes may start rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from collectives.devices import Place

from ...errors import TrainingError
from ...gradients.bucket_queue import BucketQueue
from ...gradients.buckets import GradientBucket
from ...partial_steps import NOT_REDUCED
from .bucket_gradient import BucketGradient
from .buffer_pool import BufferPool


class ReducedGradients:
    """The gradients that an engine's backward passes have left, by the numbers of their buckets.

    by_bucket: the gradient of each bucket; more may come.
    queue: fills the buckets.
    buffers: that buckets take to be filled.
    rank: among those over which gradients are cut.
    keep_whole: stage 1 without `step_in_backward`, where the buckets stay allocated.
    place: where the parameters lie.
    finish_reductions: waits for reductions in flight.
    discard_reductions: waits for them and drops their results.

    sums_whole: where the inner optimizer `updates_wholes`: its hook leaves a whole bucket reduced, and what several
        passes give adds up in all of it; may be set.
    """

    def __init__(
        self,
        by_bucket: Mapping[GradientBucket, BucketGradient],
        queue: BucketQueue,
        buffers: BufferPool,
        rank: int,
        keep_whole: bool,
        place: Place,
        *,
        finish_reductions: Callable[[], None],
        discard_reductions: Callable[[], None],
    ) -> None:
        self._by_bucket, self._queue, self._buffers = by_bucket, queue, buffers
        self._rank, self._keep_whole, self._place = rank, keep_whole, place
        self._finish_reductions, self._discard_reductions = finish_reductions, discard_reductions
        self.sums_whole = False

    @property
    def buckets(self) -> list[GradientBucket]:
        """The buckets, in the order of their numbers."""
        return self._queue.buckets

    @property
    def has_unreduced(self) -> bool:
        """True if there were passes that did not communicate, and none that did after them."""
        return self._queue.has_unreduced_gradients

    def refuse_unreduced(self) -> None:
        """Raises TrainingError if there were passes that did not communicate."""
        if self._queue.has_unreduced_gradients:
            raise TrainingError(NOT_REDUCED)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def shard(self, number: int) -> torch.Tensor:
        """The reduced gradient of this rank's part of bucket `number`; zeros if there was no pass.

        TrainingError if there were passes that did not communicate: on every rank, as all make the same calls.
        """
        self.refuse_unreduced()
        self._finish_reductions()  # of a pass that an exception has cut short
        gradients = self._by_bucket[self._queue.buckets[number]]
        if gradients.shard is None:
            bucket = gradients.bucket
            gradients.shard = torch.zeros(bucket.layout.shard_size, dtype=bucket.dtype, device=self._place.device)
        self._place.record_use(gradients.shard)
        return gradients.shard

    def whole(self, number: int) -> torch.Tensor:
        """All gradients of bucket `number`, with `sums_whole`; zeros if there was no pass. TrainingError as `shard`."""
        self.refuse_unreduced()
        return self.whole_so_far(number)

    def whole_so_far(self, number: int) -> torch.Tensor:
        """Returns what `whole` does, also in a pass that reduces what passes before it did not."""
        self._finish_reductions()
        gradients = self._by_bucket[self._queue.buckets[number]]
        flat = gradients.bucket.flat
        assert flat is not None
        if gradients.shard is None:
            gradients.shard = gradients.bucket.layout.shard(flat.zero_(), self._rank)
        elif gradients.shard.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            raise TrainingError(
                "gradients of earlier passes were loaded, of which each rank has its shard, and the optimizer needs "
                "whole ones; needs a checkpoint after a step"
            )
        return flat

    def reached(self, number: int) -> list[bool]:
        """Per parameter of bucket `number`, whether a pass gave it a gradient since `clear`.

        On any rank, or on this one, for passes that did not communicate.
        """
        return self._by_bucket[self._queue.buckets[number]].reached

    def used(self, number: int) -> list[bool]:
        """Per parameter of bucket `number`, whether a step in the last backward pass has used its gradient up."""
        gradients = self._by_bucket[self._queue.buckets[number]]
        return gradients.used or [False] * len(gradients.reached)

    # ---- changing ---------------------------------------------------------------------------------------------------

    def promote_to_fp32(self) -> None:
        """Keeps reduced 16-bit gradients in fp32 until `clear`.

        Divided by a loss scale, many would be zero in fp16; multiplied by anything, they would be rounded once more.
        """
        for gradients in self._by_bucket.values():
            if gradients.shard is not None and gradients.shard.dtype.itemsize == 2:
                gradients.shard = gradients.shard.float()

    def restore(self, number: int, reached: Sequence[bool], in_fp32: bool) -> torch.Tensor:
        """Sets zeros as the reduced gradient of bucket `number`, to be filled with that of earlier passes.

        Returns them.

        reached: as of `reached`.
        in_fp32: fp32 where the bucket has 16 bits.
        """
        gradients = self._by_bucket[self._queue.buckets[number]]
        dtype = torch.float32 if in_fp32 and gradients.bucket.dtype.itemsize == 2 else gradients.bucket.dtype
        gradients.shard = torch.zeros(gradients.bucket.layout.shard_size, dtype=dtype, device=self._place.device)
        gradients.reached = list(reached)
        return gradients.shard

    # ---- forgetting -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets all gradients, also those of a pass that an exception has cut short."""
        self._discard_reductions()
        self.forget_used()
        self._queue.has_unreduced_gradients = False
        for gradients in self._by_bucket.values():
            self._clear(gradients)

    def _clear(self, gradients: BucketGradient) -> None:
        gradients.shard = None
        gradients.filled = [False] * len(gradients.filled)
        gradients.reached = [False] * len(gradients.reached)
        if not self._keep_whole and gradients.bucket.flat is not None:
            self._buffers.release(gradients.bucket)

    def forget(self, number: int, index: int) -> None:
        """Forgets the gradient of one parameter of bucket `number`, between passes."""
        self._finish_reductions()
        gradients = self._by_bucket[self._queue.buckets[number]]
        gradients.filled[index] = gradients.reached[index] = False
        if not any(gradients.reached):
            self._clear(gradients)
        elif self.sums_whole:
            gradients.bucket.views[index].zero_()
        elif gradients.shard is not None:
            piece = gradients.bucket.layout.piece(index, self._rank)
            piece.view_in(gradients.shard).zero_()

    def forget_used(self) -> None:
        """Forgets which gradients the steps of the last backward pass have used up."""
        for gradients in self._by_bucket.values():
            gradients.used = []
