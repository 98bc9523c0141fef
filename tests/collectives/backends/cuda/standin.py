"""A GPU made of a host's threads and files, on which the logic of `collectives.backends.cuda` runs as on a real one.

    memory     a memfd that is mapped twice: its "device address" is a mapping that may be neither read nor written, so
               that a host that touches it dies; copies and reductions go through the other
    streams    a thread each, that works off its queue in order and concurrently with everything else
    export     the memfd's path below /proc, which other processes open and map likewise

Only copies from and to pinned host memory are taken. With a seed, streams pause at random between two pieces of work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import mmap
import os
import queue
import random
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from collectives.backends.cuda import device
from collectives.base.buffers import Buffer, DType, describe, unowned
from collectives.base.reduction import Reduction

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Event(device.Event):
    def __init__(self, gpu: Gpu) -> None:
        self._passed, self._gpu = threading.Event(), gpu

    def wait(self) -> None:
        self._passed.wait()
        self._gpu.raise_errors()

    def is_done(self) -> bool:
        self._gpu.raise_errors()
        return self._passed.is_set()

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
    """Another process's."""

    def __init__(self, gpu: Gpu, handle: bytes) -> None:
        assert not handle.startswith(f"/proc/{os.getpid()}/".encode()), "CUDA does not open the process's own"
        file = os.open(handle, os.O_RDWR)
        self.numbers = np.frombuffer(mmap.mmap(file, mmap.PAGESIZE), np.int64)[:2]
        os.close(file)
        self._gpu = gpu

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
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pauses = None if gpu.seed is None else random.Random(gpu.seed + self.number)
        threading.Thread(target=_work_off, args=(self._queue, gpu.errors, pauses), daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def queue(self, work: Any) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = Event(self._gpu)
        self.queue(event._passed.set)
        return event

    def wait(self, event: device.Event) -> None:
        assert isinstance(event, Event)
        self.queue(event.waiting())

    @property
    def is_capturing(self) -> bool:
        return self.capturing


def _work_off(works: queue.SimpleQueue[Any], errors: list[BaseException], pauses: random.Random | None) -> None:
    while (work := works.get()) is not None:
        if pauses is not None and pauses.random() < 0.3:
            time.sleep(pauses.random() * 1e-3)
        try:
            work()
        except BaseException as error:
            errors.append(error)
        del work


def _is_shared(address: int) -> bool:
    """Returns True if a file with a name is mapped there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            if start <= address < stop:
                return "/mpidl-" in line
    return False


class _Mapping:
    """One piece of device memory in this process. address: where it may not be touched. inside: where it may."""

    def __init__(self, file: int, nbytes: int) -> None:
        self.file, self.nbytes = file, nbytes
        self.inside = mmap.mmap(file, nbytes)
        found = _libc.mmap(None, nbytes, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0, mmap.MAP_SHARED, file, 0)
        assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        self.address: int = found

    def close(self) -> None:
        _libc.munmap(self.address, self.nbytes)
        os.close(self.file)


class Gpu(device.Device):
    """A stand-in. seed: of the streams' pauses. exports: whether other processes can open its memory.

    aware: whether the MPI library reaches its memory: "yes", "no", or it says so and "lies". events: likewise whether
    streams wait for other processes' events. pins: what host memory of files can be pinned.
    """

    def __init__(self, index: int = 0, *, seed: int | None = None, exports: bool = True) -> None:
        self.index, self.seed, self.exports = index, seed, exports
        self.aware, self.events, self.pins = "no", "yes", "any"
        self.island = 0  # memory is opened on the same one alone
        self.errors: list[BaseException] = []
        self.copies: list[str] = []  # kinds of all copies so far: "to host", "to device", "inside"
        self._maps: dict[int, _Mapping] = {}
        self._starts: list[int] = []
        self._pinned: dict[int, int] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._default = Stream(self)

    def raise_errors(self) -> None:
        """Raises the first error of queued work. As on a GPU it comes late, and is raised by all later calls."""
        if self.errors:
            raise RuntimeError(f"the stand-in failed: {self.errors[0]!r}") from self.errors[0]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        before, self._local.current = getattr(self._local, "current", False), True
        try:
            yield
        finally:
            self._local.current = before

    def _must_be_current(self) -> None:
        assert getattr(self._local, "current", False), "this thread works on another GPU"

    def stream(self) -> Stream:
        return Stream(self)

    def stream_of(self, array: Any) -> Stream:
        assert isinstance(array, (Array, Tensor))
        self._must_be_current()
        return self.current_stream

    def torch_stream(self) -> Stream:
        return self.current_stream

    @property
    def current_stream(self) -> Stream:
        found: Stream = getattr(self._local, "stream", self._default)
        return found

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Inside, it is this thread's current stream."""
        before, self._local.stream = self.current_stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self) -> None:
        self._default.record().wait()

    # ---- work on a stream -------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: device.Stream) -> None:
        assert isinstance(stream, Stream)
        self._must_be_current()
        if not nbytes:
            return
        (to, into_device), (from_, from_device) = self._reach(target, nbytes), self._reach(source, nbytes)
        self.copies.append({(1, 1): "inside", (1, 0): "to device", (0, 1): "to host"}[into_device, from_device])
        stream.queue(lambda: ctypes.memmove(to, from_, nbytes))

    def combine(
        self,
        op: Reduction,
        dtype: DType,
        inputs: Sequence[int],
        outputs: Sequence[int],
        size: int,
        factors: Sequence[float],
        stream: device.Stream,
    ) -> None:
        assert isinstance(stream, Stream)
        self._must_be_current()
        if not size or not outputs:
            return
        read = [self._view(place, size, dtype) for place in inputs]
        written = [self._view(place, size, dtype.wide if op.partial else dtype) for place in outputs]
        stream.queue(lambda: op.combine(read, written, dtype, factors))

    def finish(
        self, op: Reduction, dtype: DType, accumulated: int, out: int, size: int, ranks: int, stream: device.Stream
    ) -> None:
        assert isinstance(stream, Stream)
        self._must_be_current()
        if not size:
            return
        read, written = self._view(accumulated, size, dtype.wide), Buffer(self._view(out, size, dtype), dtype)
        stream.queue(lambda: op.finish(read, ranks, written))

    def _view(self, place: int, size: int, dtype: DType) -> np.ndarray:
        return unowned(self._reach(place, size * dtype.itemsize, device=True)[0], size, dtype.storage)

    def _reach(self, place: int, nbytes: int, device: bool = False) -> tuple[int, bool]:
        """Returns the address of the bytes in this process, and True for device memory."""
        with self._lock:
            found = bisect_right(self._starts, place) - 1
            if found >= 0:
                mapping = self._maps[self._starts[found]]
                offset = place - mapping.address
                if offset < mapping.nbytes:
                    assert offset + nbytes <= mapping.nbytes, "past the end of device memory"
                    return np.frombuffer(mapping.inside, np.uint8).ctypes.data + offset, True
            pinned = any(start <= place and place + nbytes <= start + size for start, size in self._pinned.items())
        assert pinned, "host memory that is not pinned"
        assert not device, "a kernel on host memory"
        return place, False

    # ---- memory -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self._must_be_current()
        file = os.memfd_create("stand-in")
        os.ftruncate(file, max(nbytes, 1))
        return self._map(file, max(nbytes, 1))

    def _map(self, file: int, nbytes: int) -> int:
        mapping = _Mapping(file, nbytes)
        with self._lock:
            self._maps[mapping.address] = mapping
            self._starts = sorted(self._maps)
        return mapping.address

    def free(self, address: int) -> None:
        self._must_be_current()
        self._unmap(address)

    def _unmap(self, address: int) -> None:
        with self._lock:
            mapping = self._maps.pop(address)
            self._starts = sorted(self._maps)
        mapping.close()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        self._pinned[made.data_ptr()] = max(nbytes, 1)
        weakref.finalize(made.untyped_storage(), self._pinned.pop, made.data_ptr()).atexit = False
        return made[:nbytes]

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def identity(self) -> str:
        return "stand-in"

    def pin(self, address: int, nbytes: int) -> None:
        self._must_be_current()
        assert address not in self._pinned, "pinned twice"
        if self.pins == "none that is shared" and _is_shared(address):
            raise OSError("the stand-in pins no shared memory")
        self._pinned[address] = nbytes

    def shared_event(self) -> SharedEvent:
        self._must_be_current()
        if self.events == "no":
            raise OSError("the stand-in shares no events")
        return SharedEvent(self)

    def open_event(self, handle: bytes) -> Event:
        self._must_be_current()
        opened = OpenedEvent(self, handle)
        if self.events == "lies":
            opened.waiting = lambda: lambda: None  # type: ignore[method-assign]
        return opened

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def export(self, address: int) -> bytes:
        if not self.exports:
            raise OSError("the stand-in exports nothing")
        mapping = self._maps[address]
        return json.dumps([f"/proc/{os.getpid()}/fd/{mapping.file}", mapping.nbytes, self.island]).encode()

    def open(self, handle: bytes) -> int:
        path, nbytes, island = json.loads(handle)
        if island != self.island:
            raise OSError("the stand-in does not reach the memory of another island")
        assert not path.startswith(f"/proc/{os.getpid()}/"), "CUDA does not open what the process has exported itself"
        return self._map(os.open(path, os.O_RDWR), nbytes)

    close = free

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        kind = describe(dtype)
        if not isinstance(dtype, torch.dtype):
            return Array(self, address, shape, kind.name, owner)
        size = int(np.prod(shape, dtype=np.int64))
        if not size:
            return torch.empty(shape, dtype=dtype).as_subclass(Tensor)
        memory = unowned(address, size * kind.itemsize, np.dtype(np.uint8))
        made = torch.from_numpy(memory).view(dtype).view(shape).as_subclass(Tensor)
        made.keeps = owner  # type: ignore[attr-defined]
        return made

    def is_mpi_aware(self) -> bool:
        return self.aware != "no"

    def for_mpi(self, address: int, nbytes: int) -> Any:
        assert self.is_mpi_aware()
        if self.aware == "lies":
            return bytearray(nbytes)
        place = self._reach(address, nbytes, device=True)[0] if nbytes else 0
        return MPI.memory.fromaddress(place, nbytes)

    # ---- for the tests ----------------------------------------------------------------------------------------

    def put(self, values: torch.Tensor, kind: str = "array") -> Any:
        """A new array with these values, once the current stream has come to it. kind: "array" or "tensor"."""
        nbytes = values.numel() * values.element_size()
        memory = Memory(self, nbytes)
        dtype = values.dtype if kind == "tensor" else str(values.dtype).removeprefix("torch.")
        if kind == "tensor":
            made = self.array(memory.address, tuple(values.shape), dtype, memory)
        else:
            made = Array(self, memory.address, tuple(values.shape), str(dtype), memory)
        self.fill(made, values)
        return made

    def fill(self, array: Any, values: torch.Tensor) -> None:
        """Queues array = values on the current stream."""
        nbytes = values.numel() * values.element_size()
        if not nbytes:
            return
        kept = values.clone().contiguous()
        place = array.data_ptr() if isinstance(array, Tensor) else array.address
        to = self._reach(place, nbytes)[0]
        self.current_stream.queue(lambda: ctypes.memmove(to, kept.data_ptr(), nbytes))

    def get(self, array: Any) -> torch.Tensor:
        """Returns the array's values, once the current stream has computed them."""
        self.raise_errors()
        if isinstance(array, Tensor):
            place, shape, dtype = array.data_ptr(), tuple(array.shape), array.dtype
        else:
            place, shape, dtype = array.address, array.shape, getattr(torch, array.dtype)
        made = torch.empty(shape, dtype=dtype)
        nbytes = made.numel() * made.element_size()
        if nbytes:
            from_ = self._reach(place, nbytes)[0]
            self.current_stream.queue(lambda: ctypes.memmove(made.data_ptr(), from_, nbytes))
        self.current_stream.record().wait()
        return made


class Memory:
    """Device memory that is freed with its last array, in the order of the stream that was current when it was made.

    So do the allocators of torch and cupy: what other streams still do with it then, they do with memory of others.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        with gpu.current():
            self.address = gpu.allocate(nbytes)
        free = functools.partial(gpu._unmap, self.address)
        weakref.finalize(self, gpu.current_stream.queue, free).atexit = False


class Array:
    """An array like cupy's, with no more than what the collectives look at."""

    def __init__(self, gpu: Gpu, address: int, shape: tuple[int, ...], dtype: str, owner: Any) -> None:
        self.gpu, self.address, self.shape, self.dtype, self.owner = gpu, address, tuple(shape), dtype, owner
        self.strides: tuple[int, ...] | None = None
        self.read_only = False
        self.device = type("Number", (), {"id": gpu.index})()

    @property
    def itemsize(self) -> int:
        return describe(getattr(torch, self.dtype)).itemsize

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __getitem__(self, part: slice) -> Array:
        start, stop, _ = part.indices(self.size)
        place = self.address + start * self.itemsize
        return Array(self.gpu, place, (max(0, stop - start),), self.dtype, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<V2" if self.dtype == "bfloat16" else np.dtype(self.dtype).str
        place = self.address if self.size else 0
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (place, self.read_only),
            "version": 3,
            "strides": self.strides,
        }


class Tensor(torch.Tensor):
    """A torch tensor over device memory, which says that it is on a GPU."""

    keeps: Any
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0
