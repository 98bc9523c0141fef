"""Streams of a stand-in, each with a thread that works off its queue, and their events."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import queue
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.cuda import device
from tests.collectives.backends.cuda.order import Clock

if TYPE_CHECKING:
    from tests.collectives.backends.cuda.standin import Gpu


class Event(device.Event):
    """clock: of all that it comes after; see `Order`."""

    def __init__(self, gpu: Gpu, clock: Clock) -> None:
        self._passed, self._gpu, self.clock = threading.Event(), gpu, clock

    def wait(self) -> None:
        self._passed.wait()
        self._gpu.order.host_waits(self.clock)
        self._gpu.raise_errors()

    def is_done(self) -> bool:
        self._gpu.raise_errors()
        if self._passed.is_set():
            self._gpu.order.host_waits(self.clock)
            return True
        return False

    def waiting(self) -> Any:
        return self._passed.wait


class SharedEvent(device.SharedEvent):
    """Two numbers in a memfd: how often it was recorded, and the number of the last record that has passed."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.file = os.memfd_create("stand-in event")
        os.ftruncate(self.file, mmap.PAGESIZE)
        self.numbers = np.frombuffer(mmap.mmap(self.file, mmap.PAGESIZE), np.int64)[:2]
        self.handle = f"/proc/{os.getpid()}/fd/{self.file}".encode()

    def record(self, stream: device.Stream) -> None:
        assert isinstance(stream, Stream)
        self.numbers[0] = number = self.numbers[0] + 1
        stream.queue(functools.partial(self.numbers.__setitem__, 1, number))

    def close(self) -> None:
        os.close(self.file)
        self.numbers[:] = -1, -2  # what still waits for it fails


class OpenedEvent(Event):
    """Another process's, which orders nothing of this one's."""

    def __init__(self, gpu: Gpu, handle: bytes) -> None:
        assert not handle.startswith(f"/proc/{os.getpid()}/".encode()), "CUDA does not open the process's own"
        file = os.open(handle, os.O_RDWR)
        self.numbers = np.frombuffer(mmap.mmap(file, mmap.PAGESIZE), np.int64)[:2]
        os.close(file)
        self._gpu, self.clock = gpu, {}

    def waiting(self) -> Any:
        """A wait for what is recorded now."""
        number = self.numbers[0]

        def wait() -> None:
            while self.numbers[1] < number:
                assert self.numbers[0] >= 0, "an event was ended for which a stream waits"
                time.sleep(2e-5)

        return wait


class Stream(device.Stream):
    numbers = itertools.count(1)

    def __init__(self, gpu: Gpu) -> None:
        self.number = next(self.numbers)
        self.capturing = False
        self._gpu = gpu
        pauses = None if gpu.seed is None else random.Random(gpu.seed + self.number)
        self._line = Line(gpu.lines, gpu.errors, pauses)
        weakref.finalize(self, self._line.works.put, None).atexit = False

    def put(self, work: Any) -> None:
        """Has something done when the stream comes here, that is no work of a GPU."""
        self._line.works.put(work)

    def queue(self, work: Any) -> None:
        """Queues work."""
        self.put(work)

    def record(self) -> Event:
        event = Event(self._gpu, self._gpu.order.event(self.number))
        self.put(event._passed.set)
        return event

    def wait(self, event: device.Event) -> None:
        assert isinstance(event, Event)
        self._gpu.order.wait(self.number, event.clock)
        self.queue(event.waiting())

    @property
    def is_capturing(self) -> bool:
        return self.capturing


class Line(threading.Thread):
    """The thread of a stream, which it outlives until all that is queued is done. lines: those that are there."""

    def __init__(self, lines: set[Line], errors: list[BaseException], pauses: random.Random | None) -> None:
        super().__init__(daemon=True)
        self.works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lines, self._errors, self._pauses = lines, errors, pauses
        lines.add(self)
        self.start()

    def run(self) -> None:
        pauses = self._pauses
        while (work := self.works.get()) is not None:
            if pauses is not None and pauses.random() < 0.3:
                time.sleep(pauses.random() * 1e-3)
            try:
                work()
            except BaseException as error:
                self._errors.append(error)
            del work
        self._lines.discard(self)

    def wait_for_end(self) -> None:
        """Blocks until all that is queued now is done."""
        end = threading.Event()
        self.works.put(end.set)
        while not end.wait(0.01) and self.is_alive():
            pass
