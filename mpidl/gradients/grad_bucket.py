"""A gradient bucket as communication hooks see it, and the handles that hooks return.

GradBucket    the gradients of some parameters; `reduce` starts the reduction that the engine needs
Handle        the protocol of what a hook returns; ChainedWork: one that calls a function after its Work
begin         calls a hook; `result_of` waits for its handle, and `sized_result` checks what it gives

`mpidl.comm_hooks` exports what a hook needs. The thread of the backward pass calls hooks, on every rank for the same
buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from collectives import Communicator, Work

from ..errors import ConfigurationError, TrainingError
from ..mesh.groups import data_group
from .buckets import rank_order_algorithm


class Handle(Protocol):
    """The handle that a hook returns."""

    def wait(self) -> Any:
        """Blocks until the communication is complete; the reduced gradient, or None if it lies in the bucket."""


@dataclass(frozen=True)
class BucketShards:
    """Shards of a bucket under ZeRO. shard: this rank's elements. reduce_scatter(whole): starts the mean of these."""

    shard: slice
    reduce_scatter: Callable[[torch.Tensor], Handle]


class GradBucket:
    """A bucket as a hook sees it: the gradients of some parameters of one dtype, side by side."""

    def __init__(
        self,
        index: int,
        last: bool,
        flat: torch.Tensor,
        views: Sequence[torch.Tensor],
        parameters: Sequence[Any],
        duplicates: Mapping[Communicator, Communicator] | None = None,
        shards: BucketShards | None = None,
        repeated: bool = False,
    ) -> None:
        self._index, self._last, self._flat, self._repeated = index, last, flat, repeated
        self._views, self._parameters = list(views), list(parameters)
        self._duplicates, self._shards = duplicates or {}, shards

    def index(self) -> int:
        """The bucket's number; buckets are reduced in the order of their numbers."""
        return self._index

    def is_last(self) -> bool:
        """Returns whether no bucket follows in this backward pass."""
        return self._last

    def is_repeated(self) -> bool:
        """Returns whether this backward pass has reduced the bucket before, and these gradients came after that.

        Under ZeRO several re-entrant checkpoints that share a parameter do so; such buckets come after the last one.
        """
        return self._repeated

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, this rank's own, not divided by anything; it may be overwritten.

        Each begins with a cache line; between them are zeros.
        """
        return self._flat

    def set_buffer(self, values: torch.Tensor) -> None:
        """Overwrites all gradients; `values` has the shape of `buffer()`."""
        self._flat.copy_(values)

    def communicator(self, process_group: Communicator | None = None) -> Communicator:
        """Returns a Communicator for operations on the bucket: the wrapper's own duplicate of its process group.

        process_group: by default the world. Another one than the wrapper's is returned as it is.
        """
        group = data_group("communication hook", process_group, needed="the wrapper's process_group as its state")
        return self._duplicates.get(group, group)

    def refuse_other_ranks(self, what: str, process_group: Communicator | None) -> None:
        """Raises ConfigurationError unless the wrapper averages over the ranks of this group, in its order.

        what: whose group it is, for the message.
        """
        ranks = data_group(what, process_group, needed="process_group=").world_ranks
        for own in self._duplicates:
            if own.world_ranks != ranks:
                raise ConfigurationError(
                    f"{what}: its process_group has ranks {_ranks(ranks)} of the world, the wrapper's has "
                    f"{_ranks(own.world_ranks)}; needs the wrapper's"
                )

    def needed(self) -> slice:
        """The elements of `buffer()` whose mean this rank needs: all of them in DDP, those of its shard in ZeRO."""
        return slice(0, self._flat.numel()) if self._shards is None else self._shards.shard

    def reduce(self, values: torch.Tensor | None = None, process_group: Communicator | None = None) -> Handle:
        """Starts the mean over all ranks of `values`, in DDP by an all-reduce, in ZeRO by a reduce-scatter.

        values: of the shape of `buffer()` and any floating dtype, overwritten; by default the gradients themselves.
            Of complex gradients also of the shape of `torch.view_as_real(buffer())`.
        process_group: in DDP, as of `communicator`; ZeRO reduces over its own ranks.

        The handle's `wait()` returns the means of the elements that `needed()` tells, in the dtype of `values`.
        """
        values = self._flat if values is None else values
        in_parts = self._flat.is_complex() and values.shape == (*self._flat.shape, 2)  # real and imaginary
        if values.shape != self._flat.shape and not in_parts:
            raise TrainingError(
                f"bucket.reduce: got values of shape {tuple(values.shape)}; needs {tuple(self._flat.shape)}"
            )
        if self._shards is not None:
            return self._shards.reduce_scatter(values)
        comm = self.communicator(process_group)
        if comm.size == 1:
            return completed(values)
        # Values other than the flat ones lie in ordinary memory.
        algorithm = rank_order_algorithm(comm, "all_reduce") if values is self._flat else "auto"
        work = comm.all_reduce(values, "avg", algorithm=algorithm, async_op=True)
        assert work is not None
        return ChainedWork(work, lambda: values)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as views of `buffer()`."""
        return [view.detach() for view in self._views]  # what a hook sets the data of is no place in the bucket

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return list(self._parameters)


Hook = Callable[[Any, GradBucket], Handle]


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} ..." if len(numbers) > 8 else shown


class _Completed:
    def __init__(self, values: torch.Tensor | None) -> None:
        self._values = values

    def wait(self) -> torch.Tensor | None:
        """Returns the values at once."""
        return self._values


def plain_wait(work: Work) -> None:
    """Calls `work.wait()`."""
    work.wait()


class ChainedWork:
    """A handle that calls a function once its Work is complete."""

    def __init__(self, work: Work, then: Callable[[], torch.Tensor | None]) -> None:
        self.work, self._then = work, then

    def wait(self, wait: Callable[[Work], None] = plain_wait) -> torch.Tensor | None:
        """Blocks until the communication is complete. wait: how an engine waits for it."""
        wait(self.work)
        return self._then()

    def then(self, function: Callable[[Any], torch.Tensor | None]) -> ChainedWork:
        """A handle of the same Work, whose result is the function of this one's."""
        return ChainedWork(self.work, lambda: function(self._then()))


def average_some(gradients: Sequence[torch.Tensor], comm: Communicator) -> ChainedWork:
    """Starts to average some of a bucket's gradients, of one dtype, and leaves the others as they are."""
    means = torch.cat([g.reshape(-1) for g in gradients])
    work = comm.all_reduce(means, "avg", async_op=True)
    assert work is not None

    def put_back() -> None:
        for g, mean in zip(gradients, means.split([g.numel() for g in gradients]), strict=True):
            g.copy_(mean.view(g.shape))

    return ChainedWork(work, put_back)


def begin(hook: tuple[Any, Hook], bucket: GradBucket) -> Handle:
    """Calls a hook, with its state, for a bucket."""
    handle = hook[1](hook[0], bucket)
    if not hasattr(handle, "wait"):
        raise TrainingError(f"the communication hook returned {handle!r}; needs a handle with wait()")
    return handle


def result_of(handle: Handle, wait: Callable[[Work], None] = plain_wait) -> torch.Tensor | None:
    """Waits for a hook's handle and returns its result, flat. wait: how an engine waits for an operation."""
    if isinstance(handle, Work):
        wait(handle)
        return None
    values = handle.wait(wait) if isinstance(handle, ChainedWork) else handle.wait()
    values = values[0] if isinstance(values, list) else values
    return None if values is None else values.view(-1)


def sized_result(
    handle: Handle, flat: torch.Tensor, shard: torch.Tensor | None = None, wait: Callable[[Work], None] = plain_wait
) -> torch.Tensor:
    """Waits as `result_of` does; returns the bucket where the result lies in it. Raises TrainingError for another size.

    flat: the bucket.
    shard: this rank's part, of which a hook may give the mean alone; None in DDP.
    """
    found = result_of(handle, wait)
    if found is None:
        return flat
    if found.numel() != flat.numel() and (shard is None or found.numel() != shard.numel()):
        or_shard = "" if shard is None else f", or the {shard.numel()} of this rank's shard"
        raise TrainingError(
            f"the communication hook's result has {found.numel()} elements; needs the bucket's {flat.numel()}{or_shard}"
        )
    return found


def completed(values: torch.Tensor | None = None) -> Handle:
    """A handle of communication that is over: `values` is the reduced gradient, None if it lies in the bucket."""
    return _Completed(values)
