"""What a rank owns in ZeRO: its shard of every bucket's parameters and of the reduced gradients.

Kinds of tensor, and which share storage:

    bucket.flat     a bucket's gradients, whole, in the dtype in which they are reduced; stage 1 keeps it, stages 2 and
                    3 pass it on
    gradient shard  this rank's part of the mean over the ranks; in stage 1 a view of bucket.flat; fp32 of its own
                    once 16-bit ones are summed, clipped or unscaled
    values          this rank's part of the parameters; in stages 1 and 2 a view of the whole flat parameters
    slice           what the shard holds of one parameter: a view of `values`, or its fp32 master copy for 16-bit
                    parameters; the inner optimizer steps on slices
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from collectives import Communicator, Work
from collectives.devices import HOST, Place

from ..backward import BackwardWatch
from ..bucket_queue import BucketQueue
from ..buckets import GradientBucket, Layout, aligned, by_rank
from ..errors import TrainingError, listed
from ..foreign_steps import ForeignSteps
from ..partial_steps import NOT_REDUCED
from .groups import ShardGroup
from .sharded_gradient import ShardedGradient


@dataclass(eq=False)
class ParameterShard:
    """This rank's shard of a group of parameters of one dtype. values: `layout.shard_size` elements."""

    parameters: list[torch.nn.Parameter]
    layout: Layout
    values: torch.Tensor
    trains: bool = True


@dataclass(eq=False)
class _Gradients:
    """The state of one bucket's gradients.

    apart: whether it is reduced straight into `memory`, which stays, instead of in the bucket. filled: per parameter,
    whether its place in bucket.flat holds a gradient of passes not yet reduced. reached: per parameter, whether any
    pass since zero_grad gave it a gradient. shard: the reduced part. coming: what the reduction under way writes.
    everywhere: `reached` of all ranks, once it is there, for a `Stepper`. used: per parameter, whether that has used up
    the last pass's gradient.
    """

    number: int
    bucket: GradientBucket
    apart: bool
    filled: list[bool]
    reached: list[bool]
    shard: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    coming: torch.Tensor | None = None
    everywhere: tuple[np.ndarray, Work] | None = None
    used: list[bool] = field(default_factory=list)


class Stepper(Protocol):
    """Steps on each bucket's shard as soon as it is reduced, so that no gradient is kept. Alike on all ranks."""

    def begin(self) -> None:
        """A pass that communicates begins."""

    def launched(self, number: int) -> None:
        """All gradients of a bucket are there on this rank."""

    def step(self, number: int, gradient: torch.Tensor, reached: Sequence[bool]) -> None:
        """A bucket has been reduced, to this rank's shard of the gradient; its parameters that any rank has reached."""

    def end(self) -> None:
        """All buckets have been."""


class _Storage:
    """A few flat buffers of symmetric memory for gradients on their way.

        lasting buckets   [ the model's own ]       one for each, as they fill all through a pass
        the others        [ a block ] [ a block ]   `rotating` a dtype, as large as the largest of them, the next, ...

    Symmetric memory is allocated by all ranks together, so at construction: how many buckets are open at a time, and in
    which order they open, is each rank's own affair.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        comm: Communicator,
        rotating: int,
        lasting: Sequence[GradientBucket],
        device: torch.device,
    ) -> None:
        self._own: dict[GradientBucket, torch.Tensor] = {}
        self._rotating: list[torch.Tensor] = []  # those that no bucket has
        for dtype in dict.fromkeys(bucket.dtype for bucket in buckets):
            of_dtype = [bucket for bucket in buckets if bucket.dtype == dtype]
            own = [bucket for bucket in of_dtype if bucket in lasting]
            others = sorted((b.layout.padded for b in of_dtype if b not in lasting), reverse=True)[:rotating]
            sizes = [aligned(size, dtype) for size in [*(b.layout.padded for b in own), *others]]
            if not any(sizes):
                continue
            # One allocation, in which each rank may choose another buffer.
            flats = comm.empty(sum(sizes), dtype, device=device).split(sizes)
            self._own.update(zip(own, flats, strict=False))
            self._rotating += [flat for flat in flats[len(own) :] if flat.numel()]
        self._places = {flat.data_ptr(): flat for flat in self._rotating}

    @property
    def free(self) -> list[torch.Tensor]:
        """The buffers that no bucket has."""
        return [*self._rotating, *(flat for bucket, flat in self._own.items() if bucket.flat is None)]

    def take(self, bucket: GradientBucket) -> torch.Tensor | None:
        """A buffer for the bucket: its own, or the smallest that is free and large enough; None if there is none."""
        if bucket in self._own:
            return self._own[bucket]
        fitting = [
            number
            for number, flat in enumerate(self._rotating)
            if flat.dtype == bucket.dtype and flat.numel() >= bucket.layout.padded
        ]
        if not fitting:
            return None
        return self._rotating.pop(min(fitting, key=lambda number: self._rotating[number].numel()))

    def give_back(self, flat: torch.Tensor) -> None:
        """A bucket needs it no more; what is one bucket's own stays so."""
        if flat.data_ptr() in self._places:
            self._rotating.append(self._places[flat.data_ptr()])


class GradientShards:
    """Reduces every bucket's gradients, as backward fills it, so that each rank holds the mean of its shard.

    shards: of the parameters of each bucket, in the order in which they are reduced. over: the ranks. keep_whole: stage
    1, where the buckets stay allocated; else their storage rotates among a few. names: of the parameters. reduce_dtype:
    of the buckets; by default that of their parameters. wait: waits for a reduction. rotating: how many buffers pass
    the gradients on, one of which fills while the others reduce. lasting: how many buckets, the last ones, have buffers
    of their own, as they fill all through a pass.

    stepper: if there is one, gradients are given to it, and forgotten, as they are reduced; may be set.

    counted: as of `Traffic`. place: of the parameters. keeps_shards: on the host, memory of fp32 shards stays from step
    to step, which spares new pages and a copy in each.

    Gradients of several passes add up until `clear`. What autograd gives a parameter is taken away at once.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        over: ShardGroup,
        watch: BackwardWatch,
        keep_whole: bool,
        names: Mapping[torch.nn.Parameter, str],
        reduce_dtype: torch.dtype | None = None,
        wait: Callable[[Work], None] = Work.wait,
        rotating: int = 3,
        lasting: int = 0,
        place: Place = HOST,
        keeps_shards: bool = True,
    ) -> None:
        self._place = place
        # Not for replicas, whose own reduction is without copies in symmetric memory.
        self._keeps_shards = keeps_shards and not (keep_whole or place.keeps_freed) and over.replicas is None
        self._landed: set[Any] = set()  # streams that were the last to read a rotating buffer
        self._over, self._comm = over, over.shards
        self._names = names
        self._keep_whole = keep_whole
        self.stepper: Stepper | None = None
        self._reduce_dtype = reduce_dtype
        self._wait = wait
        self._rotating = rotating
        self.counted = {"reductions": 0, "reduced_bytes": 0}
        self._of: dict[GradientBucket, _Gradients] = {}
        self._algorithm = by_rank(self._comm, "reduce_scatter")
        self._flying: deque[_Gradients] = deque()
        self._late_sums: dict[GradientBucket, dict[int, torch.Tensor]] = {}  # by bucket and parameter
        self._foreign = ForeignSteps(names)
        self._parameters: list[torch.nn.Parameter] = []  # of all buckets
        buckets = self._make(shards)
        self._lasting = buckets[len(buckets) - lasting :]
        self._storage = _Storage([] if keep_whole else buckets, self._comm, rotating, self._lasting, place.device)
        self.queue = BucketQueue(
            buckets,
            watch,
            take=self._take,
            launch=self._launch,
            finish=self._finish_pass,
            missing=lambda *_: None,
            late=self._late,
            place=place,
        )

    def add(self, shards: Sequence[ParameterShard]) -> None:
        """More buckets, reduced after those there are. Collective."""
        self.queue.set_buckets([*self.queue.buckets, *self._make(shards)])
        if not self._keep_whole:  # they may need larger buffers
            self._storage = _Storage(self.queue.buckets, self._comm, self._rotating, self._lasting, self._place.device)

    def _make(self, shards: Sequence[ParameterShard]) -> list[GradientBucket]:
        buckets = [GradientBucket(shard.parameters, shard.layout) for shard in shards]
        for bucket in buckets:
            self._parameters += bucket.parameters
            bucket.dtype = self._reduce_dtype or bucket.dtype
            count = len(bucket.parameters)
            apart = self._keeps_shards and bucket.dtype.itemsize > 2  # sums of 16-bit ones are fp32
            self._of[bucket] = _Gradients(len(self._of), bucket, apart, [False] * count, [False] * count)
            if self._keep_whole:
                bucket.allocate(self._comm.empty(bucket.layout.padded, bucket.dtype, device=self._place.device))
        return buckets

    def shard(self, number: int) -> torch.Tensor:
        """The reduced gradient of this rank's part of bucket `number`; zeros if there was no pass.

        TrainingError if there were passes that did not communicate: on every rank, as all make the same calls.
        """
        self.refuse_unsent()
        self._finish()  # of a pass that an exception has cut short
        gradients = self._of[self.queue.buckets[number]]
        if gradients.shard is None:
            bucket = gradients.bucket
            gradients.shard = torch.zeros(bucket.layout.shard_size, dtype=bucket.dtype, device=self._place.device)
        self._place.keep(gradients.shard)
        return gradients.shard

    def refuse_unsent(self) -> None:
        """Raises TrainingError if there were passes that did not communicate."""
        if self.queue.unsent:
            raise TrainingError(NOT_REDUCED)

    def widen(self) -> None:
        """Keeps reduced 16-bit gradients in fp32 until `clear`.

        Divided by a loss scale, many would be zero in fp16; multiplied by anything, they would be rounded once more.
        """
        for gradients in self._of.values():
            if gradients.shard is not None and gradients.shard.dtype.itemsize == 2:
                gradients.shard = gradients.shard.float()

    def reached(self, number: int) -> list[bool]:
        """Per parameter of bucket `number`, whether a pass gave it a gradient since `clear`.

        On any rank, or on this one, for passes that did not communicate.
        """
        return self._of[self.queue.buckets[number]].reached

    def used(self, number: int) -> list[bool]:
        """Per parameter of bucket `number`, whether a step in the last backward pass has used its gradient up."""
        gradients = self._of[self.queue.buckets[number]]
        return gradients.used or [False] * len(gradients.reached)

    def _forget_used(self) -> None:
        for gradients in self._of.values():
            gradients.used = []

    def restore(self, number: int, reached: Sequence[bool], wide: bool) -> torch.Tensor:
        """Zeros as the reduced gradient of bucket `number`, to be filled with that of earlier passes.

        reached: as of `reached`. wide: fp32 where the bucket has 16 bits.
        """
        gradients = self._of[self.queue.buckets[number]]
        dtype = torch.float32 if wide and gradients.bucket.dtype.itemsize == 2 else gradients.bucket.dtype
        gradients.shard = torch.zeros(gradients.bucket.layout.shard_size, dtype=dtype, device=self._place.device)
        gradients.reached = list(reached)
        return gradients.shard

    def clear(self) -> None:
        """Forgets all gradients, also those of a pass that an exception has cut short."""
        self._finish()
        self._forget_used()
        self.queue.unsent = False
        for gradients in self._of.values():
            self._clear(gradients)

    def _clear(self, gradients: _Gradients) -> None:
        gradients.shard = None
        gradients.filled = [False] * len(gradients.filled)
        gradients.reached = [False] * len(gradients.reached)
        if not self._keep_whole and gradients.bucket.flat is not None:
            self._give_back(gradients.bucket)

    def forget(self, number: int, index: int) -> None:
        """Forgets the gradient of one parameter of bucket `number`, between passes."""
        self._finish()
        gradients = self._of[self.queue.buckets[number]]
        gradients.filled[index] = gradients.reached[index] = False
        if not any(gradients.reached):
            self._clear(gradients)
        elif gradients.shard is not None:
            piece = gradients.bucket.layout.piece(index, self._comm.rank)
            gradients.shard[piece.offset : piece.offset + piece.stop - piece.start].zero_()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self.queue.remove()
        self._foreign.end()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The gradients, whole or sharded, and the rotating buffers."""
        shards = [g.shard for g in self._of.values() if g.shard is not None]
        whole = [b.flat for b in self.queue.buckets if b.flat is not None]
        whole += [gradient for sums in self._late_sums.values() for gradient in sums.values()]
        unused = [g.memory for g in self._of.values() if g.memory is not None and g.memory is not g.shard]
        return {"gradients": shards + whole, "buckets": self._storage.free + unused}

    def begin_pass(self) -> None:
        """A pass begins; refuses one that would give gradients of gradients. Collective where the pass makes steps."""
        _refuse_double_backward()
        if self.stepper is not None:
            self._forget_used()
        if self.queue.synchronise:
            if self.stepper is not None:
                self.stepper.begin()
            self._foreign.begin(self._parameters)

    def _take(self, bucket: GradientBucket, index: int) -> None:
        parameter, gradients = bucket.parameters[index], self._of[bucket]
        gradient = self._taken(parameter)
        if gradient is None:
            return
        self._open(gradients)
        if gradients.filled[index]:
            bucket.views[index].add_(gradient)
        else:
            bucket.views[index].copy_(gradient)
        gradients.filled[index] = gradients.reached[index] = True

    def _late(self, bucket: GradientBucket, index: int) -> None:
        """A parameter's second gradient in a pass, after its bucket was launched: it waits for the end of the pass.

        As from several re-entrant checkpoints that share the parameter.
        """
        gradient = self._taken(bucket.parameters[index])
        if gradient is None:
            return
        sums = self._late_sums.setdefault(bucket, {})
        sums[index] = gradient.to(bucket.dtype, copy=True) if index not in sums else sums[index].add_(gradient)

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The gradient of this pass, which the parameter has no more."""
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

    def _reduce_late(self) -> None:
        """Reduces once more the buckets for which something came late, and learns what was reached, on any rank.

        Refuses steps of hooks.
        """
        world, buckets = self._over.world, self.queue.buckets
        reached = [r for bucket in buckets for r in self._of[bucket].reached]
        agreed = np.array([self._foreign.found(world), *(b in self._late_sums for b in buckets), *reached], np.int64)
        work = world.all_reduce(agreed, "max", async_op=True)
        assert work is not None
        self._wait(work)  # others may still gather units
        foreign, *flags = agreed.tolist()
        self._foreign.refuse(foreign, world, self._parameters)
        late, rest = flags[: len(buckets)], iter(flags[len(buckets) :])
        if self.stepper is not None and any(late):
            again = [self._names[p] for p in buckets[late.index(1)].parameters]
            raise TrainingError(
                f"step_in_backward: a gradient of {listed(again)} came after the step on it, as of several re-entrant "
                "checkpoints that share a parameter; use torch.utils.checkpoint with use_reentrant=False"
            )
        for bucket in buckets:
            self._of[bucket].reached = [bool(next(rest)) for _ in bucket.parameters]
        for bucket in (bucket for bucket, found in zip(buckets, late, strict=True) if found):
            gradients = self._of[bucket]
            self._open(gradients)
            for index, gradient in self._late_sums.pop(bucket, {}).items():
                bucket.views[index].copy_(gradient)
                gradients.filled[index] = True
            self._launch(bucket)
        self._finish()

    def _open(self, gradients: _Gradients) -> None:
        """Makes sure that the bucket has storage, and that what it reduced before is kept beside it."""
        bucket = gradients.bucket
        if bucket.flat is None:
            while (flat := self._storage.take(bucket)) is None and self._flying:
                self._land(steps=True)
            if flat is None:  # more are open than usual, as under no_sync
                flat = torch.empty(bucket.layout.padded, dtype=bucket.dtype, device=self._place.device)
            self._place.follow(self._landed)
            bucket.allocate(flat)
        elif not any(gradients.filled) and gradients.shard is not None and self._keep_whole:
            gradients.shard = gradients.shard.clone()

    def _launch(self, bucket: GradientBucket) -> None:
        gradients = self._of[bucket]
        self._open(gradients)
        assert bucket.flat is not None
        for view, filled in zip(bucket.views, gradients.filled, strict=True):
            if not filled:
                view.zero_()
        if self._keep_whole:  # a shard that was clipped by a norm that is no number was a view of the bucket
            bucket.clear_padding()
        own = bucket.layout.shard(bucket.flat, self._comm.rank)
        if gradients.apart and gradients.shard is None:
            if gradients.memory is None:
                gradients.memory = torch.empty_like(own)
            own = gradients.memory
        gradients.coming = own
        bucket.work = self._over.reduce_scatter(own, bucket.flat, self._algorithm)
        self.counted["reductions"] += 1
        self.counted["reduced_bytes"] += bucket.nbytes
        self._flying.append(gradients)
        if self.stepper is not None:
            reached = np.array(gradients.reached, np.uint8)
            work = self._over.world.all_reduce(reached, "max", async_op=True)
            assert work is not None
            gradients.everywhere = reached, work
            with self._foreign.own(bucket.parameters):
                self.stepper.launched(gradients.number)

    def _land(self, steps: bool) -> None:
        """Waits for the reduction that has been under way longest.

        steps: give it to the stepper, if there is one; False where an exception has cut the pass short.
        """
        gradients = self._flying.popleft()
        bucket = gradients.bucket
        assert bucket.work is not None
        assert bucket.flat is not None
        self._wait(bucket.work)
        bucket.work = None
        coming, before, gradients.coming = gradients.coming, gradients.shard, None
        assert coming is not None
        if before is None:
            stays = self._keep_whole or coming is gradients.memory or self.stepper is not None
            gradients.shard = coming if stays else coming.clone()
        elif coming.dtype.itemsize == 2:
            gradients.shard = before.float().add_(coming)  # many small ones would be lost in a 16-bit sum
        elif self._keep_whole:
            gradients.shard = coming.add_(before)
        else:
            before.add_(coming)
        gradients.filled = [False] * len(gradients.filled)
        if self.stepper is not None:
            self._step(self.stepper, gradients, steps)
        if not self._keep_whole:
            self._give_back(bucket)

    def _step(self, stepper: Stepper, gradients: _Gradients, steps: bool) -> None:
        """Gives the reduced gradient to the stepper, and forgets it."""
        assert gradients.everywhere is not None
        assert gradients.shard is not None
        reached, work = gradients.everywhere
        self._wait(work)
        gradients.everywhere = None
        if steps:
            gradients.used = reached.astype(bool).tolist()
            stepper.step(gradients.number, gradients.shard, gradients.used)
        gradients.shard, gradients.reached = None, [False] * len(gradients.reached)

    def _give_back(self, bucket: GradientBucket) -> None:
        assert bucket.flat is not None
        self._storage.give_back(bucket.flat)
        self._landed.add(self._place.stream())
        bucket.release()

    def _finish_pass(self) -> None:
        self._finish(steps=True)
        self._reduce_late()
        self._landed.clear()  # the next pass comes after this one
        if self.stepper is not None:
            self.stepper.end()

    def abandon_pass(self) -> None:
        """An exception has cut the pass short: waits for what was launched on all ranks, and forgets the rest."""
        self._finish()
        self._late_sums.clear()
        self._foreign.end()

    def _finish(self, steps: bool = False) -> None:
        while self._flying:
            self._land(steps)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise TrainingError(
            "backward(create_graph=True) through a model that a ZeroOptimizer trains: gradients of gradients cannot "
            "pass through the reduction to shards"
        )
