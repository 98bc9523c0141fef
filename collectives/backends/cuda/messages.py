"""Messages from and to GPU memory: through pinned host memory, kept for the next message of about that size.

A CUDA-aware MPI library gets the device address instead (`direct`), after the host has waited for the stream, of which
MPI knows nothing. Sender and receiver choose independently: the bytes of the message are the same.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ...base.buffers import Buffer, DeviceBuffer, address
from . import driver
from .device import Device

Array = np.ndarray[Any, Any]
_SMALLEST = 64 << 10  # bytes


class HostSide:
    """The host's memory for one group's messages on one GPU."""

    def __init__(self, index: int) -> None:
        self._device = driver.open_device(index)
        with self._device.current():
            self._stream = self._device.stream()
        self._free: dict[int, list[Array]] = {}

    def outgoing(self, x: Any, data: DeviceBuffer) -> tuple[Buffer, Callable[[], None]]:
        """Returns a host copy made after the caller's stream, and the function that frees it once it is sent."""
        memory, back = self._take(data.nbytes)
        with self._device.current():
            self._stream.wait(self._device.stream_of(x).record())
            self._device.copy(address(memory), data.address, data.nbytes, self._stream)
            self._stream.record().wait()
        return self._seen(memory, data), back

    def incoming(self, x: Any, data: DeviceBuffer) -> tuple[Buffer, Callable[[], None]]:
        """Returns memory to receive into, and the function that then copies it to the array."""
        memory, back = self._take(data.nbytes)
        with self._device.current():
            begin = self._device.stream_of(x).record()

        def finish() -> None:
            with self._device.current():
                self._stream.wait(begin)
                self._device.copy(data.address, address(memory), data.nbytes, self._stream)
                self._stream.record().wait()
            back()

        return self._seen(memory, data), finish

    def direct(self, x: Any, data: DeviceBuffer) -> Buffer:
        """The array itself, for a library that takes device addresses."""
        with self._device.current():
            self._device.stream_of(x).record().wait()
        if not data.size:
            return Buffer(np.empty(0, data.dtype.storage), data.dtype)
        memory = self._device.for_mpi(data.address, data.nbytes)
        return Buffer(np.frombuffer(memory, data.dtype.storage), data.dtype, x)

    def _take(self, nbytes: int) -> tuple[Array, Callable[[], None]]:
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            with self._device.current():
                self._device.pin(address(memory), size)
            weakref.finalize(self, _unpin, self._device, memory).atexit = False
        return memory, lambda: free.append(memory)

    @staticmethod
    def _seen(memory: Array, data: DeviceBuffer) -> Buffer:
        return Buffer(memory[: data.nbytes].view(data.dtype.storage), data.dtype, memory)


def _unpin(device: Device, memory: Array) -> None:
    with device.current():
        device.unpin(address(memory))
