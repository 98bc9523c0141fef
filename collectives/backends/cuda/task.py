"""An operation on GPU memory, from its issue to its end.

    caller's stream   ... what made the arrays  B                     . E ... what uses the result
    group's streams                              . the operation ... E

It begins after all that the caller's stream held when it was issued (B), in whatever thread it runs, and what the
caller queues afterwards (for an asynchronous one: after `Work.wait`) runs after its end (E). Neither waits for the
whole GPU. Of an asynchronous operation the arrays are held until E has passed: the stream that frees them may be
another one than those that waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...errors import ArgumentError
from ...runtime.progress import Work
from . import arrays as gpu_arrays
from . import driver
from .device import Device, Event, Stream

Enqueue = Callable[[Event], Event]  # queues an operation after an event, and returns that of its end
Hold = Callable[[Event, Any], None]


class Task:
    """An operation on the arrays of one GPU, to be issued any number of times.

    run: carries it out after an event, in the order of issue, and gives the event of its end.
    hold: keeps arrays alive until an event.
    device: the GPU's number.
    """

    def __init__(self, operation: str, run: Enqueue, hold: Hold, device: int) -> None:
        self._operation, self._run, self._hold, self._index = operation, run, hold, device

    def after(self, first: Callable[[], None]) -> Task:
        """Returns a task that runs `first` before this one, in the thread whose turn it is."""

        def run(begin: Event) -> Event:
            first()
            return self._run(begin)

        return Task(self._operation, run, self._hold, self._index)

    def start(self, arrays: Any, hold: bool) -> Started:
        """Marks the place in the caller's stream. hold: whether the arrays may be freed while the operation runs."""
        device = driver.open_device(self._index)
        array = next(_on_gpu(arrays))
        with device.current():
            current = partial(device.stream_of, array)
            stream = refuse_capture(current(), self._operation)
            return Started(self._run, self._hold if hold else None, device, stream, current, arrays)


class Compound(Task):
    """Several operations as one, on a stream of their own, which is torch's current one for them.

    parts: calls them, in the thread whose turn it is.
    branch: gives the stream.
    """

    def __init__(self, name: str, parts: Callable[[], None], branch: Callable[[], Stream], device: int) -> None:
        self._parts, self._branch = parts, branch
        super().__init__(name, self._run_parts, lambda *_: None, device)

    def start(self, arrays: Any, hold: bool) -> Started:
        """Implements `Task.start`; in the place of torch's current stream."""
        device = driver.open_device(self._index)
        with device.current():
            stream = refuse_capture(device.torch_stream(), self._operation)
            return Started(self._run, None, device, stream, device.torch_stream, arrays)

    def _run_parts(self, begin: Event) -> Event:
        stream = self._branch()
        stream.wait(begin)
        with driver.open_device(self._index).using(stream):
            self._parts()
        return stream.record()


class Started:
    """One issue of a task.

    stream: the caller's.
    current: gives the one that is its library's current one then.
    """

    def __init__(
        self,
        run: Enqueue,
        hold: Hold | None,
        device: Device,
        stream: Stream,
        current: Callable[[], Stream],
        arrays: Any,
    ) -> None:
        self._run, self._hold, self._device, self._stream = run, hold, device, stream
        self._current, self._arrays = current, arrays
        self._begin = stream.record()
        self.end: Event | None = None

    def run(self) -> None:
        """Runs the operation, in the thread whose turn it is."""
        with self._device.current():
            self.end = self._run(self._begin)
            if self._hold is not None:
                self._hold(self.end, self._arrays)
            self._arrays = None

    def finish(self, work: Work | None) -> Work | None:
        """Makes the caller's stream wait for the end, or returns the handle of an asynchronous operation."""
        if work is not None:
            return GpuWork(work, self)
        assert self.end is not None
        with self._device.current():
            self._stream.wait(self.end)
        return None

    def wait_on_current_stream(self) -> None:
        """Makes the current stream of the arrays' library wait for the end of the operation."""
        if self.end is not None:
            with self._device.current():
                refuse_capture(self._current(), "Work.wait").wait(self.end)


class GpuWork(Work):
    """The handle of an operation under way on a GPU."""

    def __init__(self, work: Work, started: Started) -> None:
        super().__init__(work.name)
        self._work, self._started = work, started

    def is_completed(self) -> bool:
        """Returns whether the operation has ended, on the GPU as well; never blocks."""
        end = self._started.end
        return self._work.is_completed() and (end is None or end.is_done())

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the host's part has ended, and has the current stream wait for the GPU's; see Work.wait."""
        self._work.wait(timeout)
        self._started.wait_on_current_stream()

    def has_ended_within(self, seconds: float) -> bool:
        """Returns whether the host's part has ended; waits so long for it."""
        return self._work.has_ended_within(seconds)

    def give_up(self) -> None:
        """Gives up the host's part; see Work.give_up."""
        self._work.give_up()


def refuse_capture(stream: Stream, what: str) -> Stream:
    """Returns the stream; raises ArgumentError while a CUDA graph is captured there. what: that cannot be in one."""
    if stream.is_capturing:
        raise ArgumentError(
            f"{what}: called while a CUDA graph is captured, which cannot hold what the host and other ranks do for "
            "it; needs to be called outside of the capture"
        )
    return stream


def _on_gpu(arrays: Any) -> Iterator[Any]:
    """The GPU arrays among nested lists and tuples."""
    if isinstance(arrays, (list, tuple)):
        for inner in arrays:
            yield from _on_gpu(inner)
    elif gpu_arrays.recognises(arrays):
        yield arrays
