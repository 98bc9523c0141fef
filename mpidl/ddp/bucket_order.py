"""Order of the parameters in the buckets, and with it of the buckets: the same on every rank.

    arena, one a dtype   [ bucket 0: g9 g8 | bucket 1: g7 g6 g5 | ... ]      a parameter's `.grad` is its slot in here
    first pass           buckets by the reverse of `parameters()`
    after it             by the order in which gradients arrived on rank 0, which all ranks take over

The new order is laid out as the second pass begins, and kept until other parameters train. `compress="auto"` changes
the size of buckets with the method that it tries or takes: they are laid out anew as the next pass begins. Parameters
with sparse gradients follow all others, one a bucket, which has no memory.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", sections 3.2 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from collectives import Communicator

from ..gradients.bucket_queue import BucketQueue
from ..gradients.buckets import FIRST_BUCKET_MB, MIB, GradientBucket, assign
from ..job.objects import broadcast_object
from .backward_steps import BackwardSteps
from .bucket_means import BucketMeans
from .linear import Destination
from .trained_parameters import TrainedParameters


class BucketOrder:
    """Lays out the buckets of `queue`, with the gradients that lie in them.

    destinations: of gradients that are computed in the buckets.
    cap: returns a bucket's bytes.

    has_ended_pass: whether a synchronised pass has ended since other parameters began to train.
    """

    def __init__(
        self,
        comm: Communicator,
        trained: TrainedParameters,
        queue: BucketQueue,
        means: BucketMeans,
        destinations: Mapping[torch.nn.Parameter, Destination],
        cap: Callable[[], float],
    ) -> None:
        self._comm, self._trained, self._queue, self._means = comm, trained, queue, means
        self._destinations, self._cap, self._laid_out_for = destinations, cap, 0.0
        self.has_ended_pass = False
        self._pending: list[torch.nn.Parameter] | None = None  # what the next pass lays out

    def start_anew(self, steps: BackwardSteps | None) -> None:
        """Lays out what trains now, of whose order nothing is known. Collective."""
        self.has_ended_pass, self._pending = False, None
        self._lay_out(list(reversed(self._trained.parameters)), steps)

    def apply_learned_order(self, steps: BackwardSteps | None) -> None:
        """Lays out the order that was learned, if it is a new one, or buckets of another size. Collective then."""
        if self._pending is not None:
            order, self._pending = self._pending, None
            self._lay_out(order, steps)
        elif self._cap() != self._laid_out_for:
            self.lay_out_again(steps)

    def lay_out_again(self, steps: BackwardSteps | None) -> None:
        """Lays out the same order anew. Collective."""
        self._lay_out([p for bucket in self._queue.buckets for p in bucket.parameters], steps)

    def learn(self, root: int, *, varies: bool) -> None:
        """Learns the order as the first synchronised pass ends. Collective then.

        root: the rank whose order counts.
        varies: passes may leave out different parameters, so no order is learned.
        """
        if self.has_ended_pass:
            return
        self.has_ended_pass = True
        if varies:
            return
        trained = self._trained.parameters
        numbers = {p: number for number, p in enumerate(trained)}
        order = broadcast_object(self._comm, [numbers[p] for p in self._queue.arrivals], root)
        arrived = [trained[number] for number in order]
        first = set(arrived)
        self._pending = arrived + [p for p in reversed(trained) if p not in first]

    def _lay_out(self, order: Sequence[torch.nn.Parameter], steps: BackwardSteps | None) -> None:
        """Cuts the parameters into buckets in this order; gradients that lie in the old ones move along."""
        sparse, cap = self._trained.sparse, self._cap()
        self._laid_out_for = cap
        cut = assign([p for p in order if p not in sparse], cap, min(cap, FIRST_BUCKET_MB * MIB))
        dense = [GradientBucket(group) for group in cut]
        moved = {
            p: p.grad.clone()
            for bucket in self._queue.buckets
            if bucket.flat is not None
            for p, view in zip(bucket.parameters, bucket.views, strict=True)
            if p.grad is not None and p.grad.data_ptr() == view.data_ptr() and p.numel()
        }
        self._means.lay_out(dense, steps)
        self._queue.set_buckets(dense + [GradientBucket([p]) for p in order if p in sparse])
        placed = [bucket for bucket in dense if bucket.flat is not None]
        views = {p: view for bucket in placed for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        for p, destination in self._destinations.items():
            destination.move(views.get(p))
        for p in moved.keys() & views.keys():
            p.grad = views[p].detach().copy_(moved.pop(p))
        for p, gradient in moved.items():  # frozen meanwhile
            p.grad = gradient
