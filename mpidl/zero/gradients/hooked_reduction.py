"""A communication hook instead of a bucket's reduce-scatter: the bucket as the hook sees it, and the hook's result.

Both run in the thread of the backward pass. The hook starts the communication, for the same buckets in the same order
on every rank; `take_result` waits for it as the engine waits for its own reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from collectives import Work

from ...gradients.buckets import GradientBucket
from ...gradients.grad_bucket import BucketShards, ChainedWork, GradBucket, Handle, sized_result
from ..shard_group import ShardGroup
from .bucket_gradient import BucketGradient


def bucket_for_hook(
    gradient: BucketGradient, last: bool, over: ShardGroup, algorithm: str, repeated: bool
) -> GradBucket:
    """Returns the bucket as a communication hook sees it.

    last: whether no bucket follows in the pass.
    algorithm: of the reduce-scatter of the bucket's own memory.
    repeated: whether the pass has reduced the bucket before.
    """
    bucket, flat, size = gradient.bucket, gradient.bucket.flat, gradient.bucket.layout.shard_size
    assert flat is not None

    def reduce_scatter(values: torch.Tensor) -> Handle:
        if values is flat:
            own, chosen = gradient.target, algorithm
            assert own is not None
        else:
            own, chosen = bucket.layout.shard(values, over.rank), "auto"  # in ordinary memory
        return ChainedWork(over.reduce_scatter(own, values, chosen), lambda: own)

    shards = BucketShards(slice(over.rank * size, (over.rank + 1) * size), reduce_scatter)
    duplicates = {over.world: over.backward_comm}
    return GradBucket(gradient.number, last, flat, bucket.views, bucket.parameters, duplicates, shards, repeated)


def bucket_without_storage(gradient: BucketGradient, last: bool, over: ShardGroup) -> GradBucket:
    """Returns what `bucket_for_hook` will, with the places of gradients, but no gradients."""
    bucket, layout = gradient.bucket, gradient.bucket.layout
    placed = GradientBucket(bucket.parameters, layout)
    placed.allocate(torch.empty(layout.padded, dtype=bucket.dtype, device="meta"))
    empty = replace(gradient, bucket=placed, target=None)
    return bucket_for_hook(empty, last, over, "auto", repeated=False)


def take_result(gradient: BucketGradient, rank: int, wait: Callable[[Work], None]) -> None:
    """Waits for what a hook has started, and puts this rank's part of the mean where it is expected."""
    flat, target, handle = gradient.bucket.flat, gradient.target, gradient.handle
    assert flat is not None
    assert target is not None
    assert handle is not None
    found = sized_result(handle, flat, target, wait)
    if found.numel() == flat.numel():
        found = gradient.bucket.layout.shard(found, rank)
    if found.data_ptr() != target.data_ptr():
        target.copy_(found)
