"""Communication hooks: what may stand in for the all-reduce of a gradient bucket.

    wrapped.register_comm_hook(None, mpidl.comm_hooks.bf16_compress)

A hook is called as `hook(state, bucket)`, on every rank for the same buckets in the same order, as soon as a bucket is
filled. It starts the communication and returns a handle with `wait()`: what `wait()` returns is taken as the bucket's
reduced gradient, None stands for what then lies in the bucket itself. A `collectives.Work` is such a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from collectives import Communicator, Work

from ..buckets import by_rank
from ..mesh.groups import data_group


class Handle(Protocol):
    """What a hook returns."""

    def wait(self) -> Any:
        """Blocks until the communication is complete; the reduced gradient, or None if it lies in the bucket."""


class GradBucket:
    """What a hook sees of a bucket: the gradients of some parameters of one dtype, side by side."""

    def __init__(
        self,
        index: int,
        last: bool,
        flat: torch.Tensor,
        views: Sequence[torch.Tensor],
        of: Sequence[Any],
        lanes: Mapping[Communicator, Communicator] | None = None,
    ) -> None:
        self._index, self._last, self._flat = index, last, flat
        self._views, self._parameters = list(views), list(of)
        self._lanes = lanes or {}

    def index(self) -> int:
        """The bucket's number; buckets are reduced in the order of their numbers."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, this rank's own, not divided by anything; it may be overwritten.

        Each begins with a cache line; between them are zeros.
        """
        return self._flat

    def set_buffer(self, values: torch.Tensor) -> None:
        """Overwrites all gradients; `values` has the shape of `buffer()`."""
        self._flat.copy_(values)

    def communicator(self, process_group: Communicator | None = None) -> Communicator:
        """For operations on the bucket: the wrapper's own duplicate of its process group, apart from other wrappers'.

        process_group: by default the world. Another one than the wrapper's is returned as it is.
        """
        group = data_group("communication hook", process_group, needed="the wrapper's process_group as its state")
        return self._lanes.get(group, group)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as views of `buffer()`."""
        return list(self._views)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return list(self._parameters)


Hook = Callable[[Any, GradBucket], Handle]


class _Completed:
    def __init__(self, values: torch.Tensor | None) -> None:
        self._values = values

    def wait(self) -> torch.Tensor | None:
        """Never blocks."""
        return self._values


class _Then:
    """A handle that does something with the result once the communication is complete."""

    def __init__(self, work: Work, then: Callable[[], torch.Tensor | None]) -> None:
        self._work, self._done = work, then

    def wait(self) -> torch.Tensor | None:
        """Blocks until the communication is complete."""
        self._work.wait()
        return self._done()


def completed(values: torch.Tensor | None = None) -> Handle:
    """A handle of communication that is over: `values` is the reduced gradient, None if it lies in the bucket."""
    return _Completed(values)


def allreduce(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """What happens without a hook: the mean over all ranks, in place.

    process_group: the hook's state: the Communicator; None is the world.
    """
    comm = bucket.communicator(process_group)
    if comm.size == 1:
        return completed()
    algorithm = by_rank(comm, "all_reduce")
    work = comm.all_reduce(bucket.buffer(), "avg", algorithm=algorithm, async_op=True)
    assert work is not None
    return work


def fp16_compress(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """The mean over all ranks, sent in half precision: half the bytes of fp32. Sums are formed in fp32 all the same."""
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress(process_group: Communicator | None, bucket: GradBucket) -> Handle:
    """The mean over all ranks, sent as bfloat16: half the bytes of fp32 with its range, at 8 bits of precision."""
    return _compressed(process_group, bucket, torch.bfloat16)


def _compressed(process_group: Communicator | None, bucket: GradBucket, dtype: torch.dtype) -> Handle:
    flat = bucket.buffer()
    small = flat.to(dtype)
    if small.data_ptr() == flat.data_ptr():
        return allreduce(process_group, bucket)
    work = bucket.communicator(process_group).all_reduce(small, "avg", async_op=True)
    assert work is not None
    return _Then(work, lambda: flat.copy_(small))
