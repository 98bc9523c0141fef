"""Communication hooks: they compress a gradient bucket, or replace its reduction, in DDP and in every stage of ZeRO.

    wrapped.register_comm_hook(None, mpidl.comm_hooks.bf16_compress)        of DistributedDataParallel
    optimizer.register_comm_hook(None, mpidl.comm_hooks.bf16_compress)      of ZeroOptimizer

    DDP       bucket [  g9   |  g8   |  g7   ] hook ->  the mean of all of it
    ZeRO      bucket [ shard | shard | shard ] hook ->  the mean of this rank's shard, or of all of it

A hook is called as `hook(state, bucket)`, on every rank for the same buckets in the same order, as soon as a bucket is
filled. It starts the communication and returns a handle with `wait()`: `wait()` returns the bucket's reduced gradient,
or None if the bucket itself holds it. A `collectives.Work` is such a handle, and `bucket.reduce(values)` starts the
reduction that the engine needs, of values that a hook has made of the gradients.

A state with `needs_every_rank = True`, as that of optimizers whose steps are collective, is refused in a `join`.
ZeroOptimizer refuses one with `leaves_gradients_local = True`, whose hook does not average all gradients.
"""

from __future__ import annotations

import torch

from collectives import Communicator

from .gradients.grad_bucket import ChainedWork, GradBucket, Handle, Hook, average_some, completed

__all__ = [
    "GradBucket",
    "Handle",
    "Hook",
    "allreduce",
    "average_some",
    "bf16_compress",
    "completed",
    "fp16_compress",
]


def allreduce(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """Reduces as without a hook: the mean over all ranks; in ZeRO of this rank's shard.

    process_group: the hook's state: the Communicator; None is the world.
    """
    return bucket.reduce(process_group=process_group)


def fp16_compress(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """The mean over all ranks, sent in half precision: half the bytes of fp32. Sums are formed in fp32 all the same."""
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """The mean over all ranks, sent as bfloat16: half the bytes of fp32 with its range, at 8 bits of precision."""
    return _compressed(process_group, bucket, torch.bfloat16)


def _compressed(process_group: Communicator | None, bucket: GradBucket, dtype: torch.dtype) -> Handle:
    flat = bucket.buffer()
    if flat.is_complex():
        return _compressed_parts(process_group, bucket, dtype)
    return bucket.reduce(None if flat.dtype == dtype else flat.to(dtype), process_group)


def _compressed_parts(process_group: Communicator | None, bucket: GradBucket, dtype: torch.dtype) -> Handle:
    """The mean of complex gradients, whose real and imaginary parts are sent in this dtype."""
    parts = torch.view_as_real(bucket.buffer())
    wide = parts.dtype

    def as_complex(means: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(means.to(wide))

    handle = bucket.reduce(parts.to(dtype), process_group)
    return handle.then(as_complex) if isinstance(handle, ChainedWork) else completed(as_complex(handle.wait()))
