"""Fills gradient buckets as autograd's hooks fire, and launches them, strictly in their order on every rank.

    hooks of the parameters:   g9 arrives   g8 arrives   g7 arrives ...                      the pass ends
                               take(g9)     take(g8)     take(g7), launch(bucket 0) ...      launch the rest, finish

Every synchronised pass launches every bucket, whatever was reached: the ranks cannot fall out of step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from collectives.devices import HOST, Place
from collectives.diagnostics import label

from .backward import BackwardWatch
from .buckets import GradientBucket

OfParameter = Callable[[GradientBucket, int], None]


class BucketQueue:
    """Fills buckets from autograd's hooks and launches them in order.

    An engine puts these into the phases of `watch`: `arrive` into reached, `launch_rest` and `finish` into reduced,
    `end` into finished, `reset` into abandoned, and `synchronise` tells if a pass communicates.

    take(bucket, index): called when the gradient of a parameter is complete, to move it into the bucket.
    launch(bucket): starts the bucket's collective; called in each pass that communicates once for each bucket, in the
        order of `buckets`, when it is filled, or at the end of the pass. An attribute too, which may be set between
        passes.
    finish(): called at the end of a backward pass, after all buckets have been launched.
    missing(bucket, index): called for every parameter that the pass did not reach, before its bucket is launched.
    on_gradient_after_launch(bucket, index): called in place of take for a gradient that comes when its bucket has been
        launched.
    place: of the parameters. Autograd computes each gradient on the stream of its part of the forward pass.

    synchronise: bool; whether a pass communicates.
    defer_launch_to_end: bool; launch nothing before the pass ends.
    expected: dict of parameter to int; how often its gradient arrives in a pass, once if it is not in there.
    arrivals: dict of parameter to int; how often it did in this pass, in the order of the first arrivals.
    has_unreduced_gradients: bool; whether passes under `no_sync` wait for one that communicates.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        watch: BackwardWatch,
        *,
        take: OfParameter,
        launch: Callable[[GradientBucket], None],
        finish: Callable[[], None],
        missing: OfParameter,
        on_gradient_after_launch: OfParameter | None = None,
        place: Place = HOST,
    ) -> None:
        self.synchronise = True
        self.defer_launch_to_end = False
        self.has_unreduced_gradients = False
        self.expected: dict[torch.nn.Parameter, int] = {}
        self.arrivals: dict[torch.nn.Parameter, int] = {}
        self._watch = watch
        self._take, self.launch, self._finish, self._missing = take, launch, finish, missing
        self._on_gradient_after_launch = on_gradient_after_launch or take
        self._place = place
        self._handles: dict[torch.nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Sets the buckets that passes fill from the next one on."""
        self.buckets = list(buckets)
        self._bucket_of = {p: (b, index) for b in self.buckets for index, p in enumerate(b.parameters)}
        self._take_off([p for p in self._handles if p not in self._bucket_of])
        self.listen(self._bucket_of)
        self.reset()

    def listen(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Lets gradients of these parameters begin a pass too, before they are in buckets."""
        for p in parameters:
            if p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(self._hook(p))

    def _hook(self, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        # The garbage collector does not see what a parameter's hooks refer to, so they must not keep the queue.
        queue_ref, parameter_ref = weakref.ref(self), weakref.ref(parameter)

        def gradient_is_complete(_: torch.Tensor) -> None:
            live_queue, live_parameter = queue_ref(), parameter_ref()
            if live_queue is not None and live_parameter is not None:
                watch = live_queue._watch
                watch.begin()
                for call in watch.phases.reached:
                    call(live_parameter)

        return gradient_is_complete

    def arrive(self, parameter: torch.nn.Parameter) -> None:
        """Takes in a parameter's complete gradient, in a pass that has begun."""
        if parameter not in self._bucket_of:
            return  # it began to train after the buckets were made; this pass communicates nothing
        bucket, index = self._bucket_of[parameter]
        times = self.arrivals.get(parameter, 0) + 1
        self.arrivals[parameter] = times
        if bucket.launched:
            self._on_gradient_after_launch(bucket, index)
            return
        bucket.streams.add(self._place.stream())
        self._take(bucket, index)
        if times >= self.expected.get(parameter, 1):
            self.mark_ready(bucket, index)

    def mark_ready(self, bucket: GradientBucket, index: int) -> None:
        """Marks a parameter as finished in this pass; launches the buckets that are now filled, in order."""
        bucket.ready[index] = True
        if self.synchronise and not self.defer_launch_to_end:
            while self._next < len(self.buckets) and all(self.buckets[self._next].ready):
                self._start(self.buckets[self._next])

    def mark_missing(self, parameter: torch.nn.Parameter) -> None:
        """Marks a parameter that the pass under way will not reach."""
        self.mark_ready(*self._bucket_of[parameter])

    def _start(self, bucket: GradientBucket) -> None:
        self._next += 1
        bucket.launched = True
        self._place.wait_for_streams(bucket.streams)
        for index, p in enumerate(bucket.parameters):
            if p not in self.arrivals:
                self._missing(bucket, index)
        with label("mpidl::bucket"):
            self.launch(bucket)

    def launch_rest(self) -> None:
        """Launches the remaining buckets in order, filled or not."""
        for bucket in self.buckets[self._next :]:
            self._start(bucket)

    def finish(self) -> None:
        """Ends a pass whose buckets have all been launched."""
        self.has_unreduced_gradients = False
        with label("mpidl::finish_backward"):
            self._finish()

    def end(self) -> None:
        """Ends any pass; the gradients of one that has not communicated wait for one that does."""
        if not self.synchronise:
            self.has_unreduced_gradients = True
        self.reset()

    def reset(self) -> None:
        """Prepares the next pass."""
        self._next = 0
        self.arrivals = {}
        for bucket in self.buckets:
            bucket.launched = False
            bucket.streams.clear()
            bucket.ready = [self.expected.get(p, 1) == 0 for p in bucket.parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside only accumulate; the next one outside communicates the sums."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self._take_off(list(self._handles))

    def _take_off(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Takes the hooks off these, also where the garbage collector frees the handles, which then remove nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            for p in parameters:
                handle, hooks = self._handles.pop(p), p._post_accumulate_grad_hooks
                if hooks:
                    hooks.pop(handle.id, None)
