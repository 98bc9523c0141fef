"""Copies between a tensor's memory and the host's, concurrently with computation in either.

    current stream   ... a0 a1 a2   B  . . . . . . . . . . . . . .  E  ...   (join)
    line of copies                    a0 | a1 | a2 | ...
    host                                 a0 is there: the host computes with it, while a1 arrives

A line's copies run one after another, each after what the caller's current stream held when it was started.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import torch

from .device import Device, Event, Stream

_UnderWay = tuple[Event, torch.Tensor, torch.Tensor]


class Arrival(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Blocks the host until the copy has ended."""


class _Done:
    def wait(self) -> None:
        pass


class Copies:
    """Copies within the host's memory, done at once."""

    def room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host from and to which is copied: so many elements."""
        return torch.empty(size, dtype=dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """target = source: both contiguous and of one dtype, that of the host from `room`."""
        target.copy_(source)
        return _Done()

    def join(self) -> None:
        """Makes the current stream wait for all copies that were started."""

    def finish(self) -> None:
        """Blocks the host until all that was started is done."""


class GpuCopies(Copies):
    """Copies from and to a GPU, on a stream of their own. Tensors are held until their copy is done.

    No allocator knows of that stream: so this object waits for its copies when it is freed.
    """

    def __init__(self, gpu: Device) -> None:
        self._gpu = gpu
        with gpu.current():
            self._stream = gpu.stream()
        self._under_way: deque[_UnderWay] = deque()
        weakref.finalize(self, _finish, gpu, self._stream, self._under_way).atexit = False

    def room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Implements `Copies.room`."""
        return self._gpu.host_memory(size * dtype.itemsize).view(dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Implements `Copies.start`."""
        with self._gpu.current():
            self._stream.wait(self._gpu.torch_stream().record())
            self._gpu.copy(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size(), self._stream)
            end = self._stream.record()
        while self._under_way and self._under_way[0][0].is_done():
            self._under_way.popleft()
        self._under_way.append((end, target, source))
        return end

    def join(self) -> None:
        """Implements `Copies.join`."""
        with self._gpu.current():
            self._gpu.torch_stream().wait(self._stream.record())

    def finish(self) -> None:
        """Implements `Copies.finish`."""
        _finish(self._gpu, self._stream, self._under_way)


def _finish(gpu: Device, stream: Stream, under_way: deque[_UnderWay]) -> None:
    with gpu.current():
        stream.record().wait()
    under_way.clear()
