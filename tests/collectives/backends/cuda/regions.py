"""The memory that a stand-in's streams may use: of the device, and pinned memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Memory that work on streams may use, at the addresses from `address` on. inside: where it really lies.

    dropped: its last array has gone; what was queued may still use it. is_there: False once it is given back.
    pages: stay mapped for work that comes too late, so that it is told and hits nothing else.
    """

    kind, on_device = "pinned host memory", False
    pages: mmap.mmap | None = None

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.dropped, self.is_there = False, True

    @property
    def range(self) -> tuple[int, int]:
        return self.address, self.address + self.nbytes

    @property
    def inside(self) -> int:
        return self.address


class Mapping(Region):
    """One piece of device memory in this process. Its addresses may not be touched, except inside."""

    kind, on_device = "device memory", True

    def __init__(self, file: int, nbytes: int) -> None:
        self.file = file
        self._inside = mmap.mmap(file, nbytes)
        self.nbytes = nbytes
        super().__init__(self._begin(), nbytes)

    def _begin(self) -> int:
        found = _libc.mmap(None, self.nbytes, getattr(mmap, "PROT_NONE", 0), mmap.MAP_SHARED, self.file, 0)
        assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return int(found)

    def _end(self) -> None:
        _libc.munmap(self.address, self.nbytes)

    @property
    def inside(self) -> int:
        return int(np.frombuffer(self._inside, np.uint8).ctypes.data)

    def close(self) -> None:
        """Ends it; `inside` stays mapped for as long as work refers to it."""
        self.is_there = False
        self._end()
        os.close(self.file)


class Place(NamedTuple):
    """Bytes of a region, to be touched by work."""

    region: Region
    offset: int

    def now(self) -> int:
        """Returns where they lie in this process. Raises AssertionError if they are given back."""
        if not self.region.is_there:
            raise AssertionError(f"{self.region.kind} was given back before a stream had come to its use")
        return self.region.inside + self.offset


def is_shared(address: int) -> bool:
    """Returns True if a file with a name is mapped there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            if start <= address < stop:
                return "/mpidl-" in line
    return False
