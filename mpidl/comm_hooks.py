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
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

import torch

from collectives import Communicator, Work

from .errors import ConfigurationError, ConfigurationTypeError, TrainingError
from .gradients.buckets import by_rank
from .mesh.groups import data_group


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
        of: Sequence[Any],
        duplicates: Mapping[Communicator, Communicator] | None = None,
        shards: BucketShards | None = None,
        repeated: bool = False,
    ) -> None:
        self._index, self._last, self._flat, self._repeated = index, last, flat, repeated
        self._views, self._parameters = list(views), list(of)
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
        process_group: in DDP, as of `communicator`; ZeRO reduces over its own ranks.

        The handle's `wait()` returns the means of the elements that `needed()` tells, in the dtype of `values`.
        """
        values = self._flat if values is None else values
        if values.shape != self._flat.shape:
            raise TrainingError(
                f"bucket.reduce: got values of shape {tuple(values.shape)}; needs {tuple(self._flat.shape)}"
            )
        if self._shards is not None:
            return self._shards.reduce_scatter(values)
        comm = self.communicator(process_group)
        if comm.size == 1:
            return completed(values)
        algorithm = by_rank(comm, "all_reduce") if values is self._flat else "auto"  # others lie in ordinary memory
        work = comm.all_reduce(values, "avg", algorithm=algorithm, async_op=True)
        assert work is not None
        return Then(work, lambda: values)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as views of `buffer()`."""
        return [view.detach() for view in self._views]  # what a hook sets the data of is no place in the bucket

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return list(self._parameters)


Hook = Callable[[Any, GradBucket], Handle]


def check(given: Any) -> None:
    """Refuses what cannot be called as `hook(state, bucket)`, or has annotations that do not fit."""
    if not callable(given):
        raise ConfigurationTypeError(f"register_comm_hook: got {given!r} as the hook; needs a callable")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # nothing is known of it
        return
    annotations = _annotations(given.func if isinstance(given, partial) else given)
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(given, "__name__", type(given).__name__)
        raise ConfigurationTypeError(
            f"register_comm_hook: the hook is {name}{signature}; needs one to call as hook(state, bucket)"
        ) from error
    names = list(signature.parameters)
    bucket: Any = annotations.get("bucket" if "bucket" in names else "".join(names[1:2]))
    if not _may_be(bucket, _takes_buckets):
        raise ConfigurationError(
            f"register_comm_hook: the hook's bucket is annotated as {_shown(bucket)}; needs mpidl.comm_hooks.GradBucket"
        )
    returned: Any = annotations.get("return")
    if not _may_be(returned, _is_handle):
        raise ConfigurationError(
            f"register_comm_hook: the hook is annotated to return {_shown(returned)}; needs a handle with wait(), as "
            "collectives.Work"
        )


def _annotations(called: Any) -> dict[str, Any]:
    """Returns the annotations of a callable by name, except those that cannot be evaluated."""
    function = called if inspect.isroutine(called) else type(called).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    found: dict[str, Any] = {}
    with suppress(Exception):  # it evaluates texts of the program's, from Python 3.14 on all of them at once
        for name, annotation in getattr(function, "__annotations__", {}).items():
            with suppress(Exception):
                one = SimpleNamespace(__annotations__={name: annotation})
                found |= get_type_hints(one, globalns=getattr(function, "__globals__", {}))
    return found


def _may_be(annotation: Any, fits: Callable[[type, Any], bool]) -> bool:
    """Returns whether an annotation is no class, or one that `fits`, or a union of which one does.

    fits: called with the class and the annotation, which is the class or has arguments besides.
    """
    if get_origin(annotation) in (Union, UnionType):
        return any(_may_be(one, fits) for one in get_args(annotation) if one is not type(None))
    kind = get_origin(annotation) or annotation
    return not isinstance(kind, type) or kind in (object, Any) or fits(kind, annotation)


def _takes_buckets(kind: type, _: Any) -> bool:
    return issubclass(GradBucket, kind) or kind.__name__ == GradBucket.__name__


def _is_handle(kind: type, annotation: Any) -> bool:
    """Returns whether values of the class have `wait`; of a Future, whether it may be one of tensors or None."""
    of = get_args(annotation)[:1] if issubclass(kind, torch.futures.Future) else ()
    return hasattr(kind, "wait") and all(one in (None, type(None)) or _may_be(one, _is_result) for one in of)


def _is_result(kind: type, _: Any) -> bool:
    return issubclass(kind, torch.Tensor | list)


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} ..." if len(numbers) > 8 else shown


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


class _Completed:
    def __init__(self, values: torch.Tensor | None) -> None:
        self._values = values

    def wait(self) -> torch.Tensor | None:
        """Never blocks."""
        return self._values


def plain_wait(work: Work) -> None:
    """Waits as the class of the work does."""
    work.wait()


class Then:
    """A handle that does something with the result once the communication is complete."""

    def __init__(self, work: Work, then: Callable[[], torch.Tensor | None]) -> None:
        self.work, self._then = work, then

    def wait(self, wait: Callable[[Work], None] = plain_wait) -> torch.Tensor | None:
        """Blocks until the communication is complete. wait: how an engine waits for it."""
        wait(self.work)
        return self._then()


def average_some(gradients: Sequence[torch.Tensor], comm: Communicator) -> Then:
    """Starts to average some of a bucket's gradients, of one dtype, and leaves the others as they are."""
    means = torch.cat([g.reshape(-1) for g in gradients])
    work = comm.all_reduce(means, "avg", async_op=True)
    assert work is not None

    def put_back() -> None:
        for g, mean in zip(gradients, means.split([g.numel() for g in gradients]), strict=True):
            g.copy_(mean.view(g.shape))

    return Then(work, put_back)


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
    values = handle.wait(wait) if isinstance(handle, Then) else handle.wait()
    values = values[0] if isinstance(values, list) else values
    return None if values is None else values.view(-1)


def completed(values: torch.Tensor | None = None) -> Handle:
    """A handle of communication that is over: `values` is the reduced gradient, None if it lies in the bucket."""
    return _Completed(values)


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
    return bucket.reduce(None if flat.dtype == dtype else flat.to(dtype), process_group)
