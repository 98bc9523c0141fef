"""A GPU made of a host's threads and files, on which the logic of `collectives.backends.cuda` runs as on a real one.

    memory     a memfd that is mapped twice: its "device address" is a mapping that may be neither read nor written, so
               that a host that touches it dies; copies and reductions go through the other
    streams    a thread each, that works off its queue in order and concurrently with everything else
    export     the memfd's path below /proc, which other processes open and map likewise

Only copies from and to pinned host memory are taken. With a seed, streams pause at random between two pieces of work.

What would be a rare crash on a GPU is an error with a name here, told by all later calls:
    - accesses on several streams that no event orders, and memory that is freed, unmapped or unpinned while a stream
      may still use it; both whatever the timing (`order`)
    - work that a stream comes to when its memory is not there any more: it is not done
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import threading
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
from tests.collectives.backends.cuda.order import Order
from tests.collectives.backends.cuda.regions import Mapping, Place, Region, is_shared
from tests.collectives.backends.cuda.streams import Event, Line, OpenedEvent, SharedEvent, Stream


class Gpu(device.Device):
    """A stand-in. seed: of the streams' pauses. exports: whether other processes can open its memory.

    aware: whether the MPI library reaches its memory: "yes", "no", or it says so and "lies". events: likewise whether
    streams wait for other processes' events. pins: what host memory of files can be pinned.
    """

    mapping = Mapping

    def __init__(self, index: int = 0, *, seed: int | None = None, exports: bool = True) -> None:
        self.index, self.seed, self.exports = index, seed, exports
        self.aware, self.events, self.pins = "no", "yes", "any"
        self.island = 0  # memory is opened on the same one alone
        self.own = False  # each rank has one of its own, and they reach each other
        self.errors: list[BaseException] = []
        self.order, self.lines = Order(self.errors), set[Line]()
        self.copies: list[str] = []  # kinds of all copies so far: "to host", "to device", "inside"
        self.reductions = 0  # kernels that reduce, so far
        self._maps: dict[int, Mapping] = {}
        self._pinned: dict[int, Region] = {}
        self._local = threading.local()
        self._default = self.stream()

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
        clock = self.order.of_all_streams()
        self.wait_for_all_lines()
        self.order.host_waits(clock)
        self.raise_errors()

    def wait_for_all_lines(self) -> None:
        """Blocks until all that is queued now is done; what is ordered after it is so no more than before."""
        for line in list(self.lines):
            line.wait_for_end()

    # ---- work on a stream -------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: device.Stream) -> None:
        assert isinstance(stream, Stream)
        self._must_be_current()
        if not nbytes:
            return
        to, from_ = self._reach(target, nbytes), self._reach(source, nbytes)
        way = to.region.on_device, from_.region.on_device
        self.copies.append({(True, True): "inside", (True, False): "to device", (False, True): "to host"}[way])
        self.order.access(stream.number, [(source, source + nbytes)], [(target, target + nbytes)])
        stream.queue(lambda: ctypes.memmove(to.now(), from_.now(), nbytes))

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
        result = dtype.wide if op.partial else dtype
        read, written = self._for_kernel(inputs, outputs, size, dtype, result, stream)
        self.reductions += 1

        def work() -> None:
            op.combine([_view(p, size, dtype) for p in read], [_view(p, size, result) for p in written], dtype, factors)

        stream.queue(work)

    def finish(
        self, op: Reduction, dtype: DType, accumulated: int, out: int, size: int, ranks: int, stream: device.Stream
    ) -> None:
        assert isinstance(stream, Stream)
        self._must_be_current()
        if not size:
            return
        (read,), (written,) = self._for_kernel([accumulated], [out], size, dtype.wide, dtype, stream)
        stream.queue(
            lambda: op.finish(_view(read, size, dtype.wide), ranks, Buffer(_view(written, size, dtype), dtype))
        )

    def _for_kernel(
        self, inputs: Sequence[int], outputs: Sequence[int], size: int, dtype: DType, result: DType, stream: Stream
    ) -> tuple[list[Place], list[Place]]:
        """The arrays of a kernel, which must be on the device."""
        sizes = size * dtype.itemsize, size * result.itemsize
        found = [self._reach(at, sizes[0]) for at in inputs], [self._reach(at, sizes[1]) for at in outputs]
        assert all(place.region.on_device for places in found for place in places), "a kernel on host memory"
        read, written = [(at, at + sizes[0]) for at in inputs], [(at, at + sizes[1]) for at in outputs]
        self.order.access(stream.number, read, written)
        return found

    def _reach(self, place: int, nbytes: int) -> Place:
        """Returns where bytes lie that a stream is to use."""
        region = self._region(place)
        assert region is not None, "memory that is not of the device, nor pinned"
        assert place + nbytes <= region.address + region.nbytes, f"past the end of {region.kind}"
        assert not region.dropped, f"{region.kind} whose last array has gone"
        return Place(region, place - region.address)

    def _region(self, place: int) -> Region | None:
        """Returns the region that an address lies in."""
        return self._find(self._maps, place) or self._find(self._pinned, place)

    @staticmethod
    def _find(regions: dict[int, Any], place: int) -> Region | None:
        starts = sorted(regions)
        found = bisect_right(starts, place) - 1
        region = regions.get(starts[found]) if found >= 0 else None
        return region if region is not None and place < region.address + region.nbytes else None

    # ---- memory -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self._must_be_current()
        file = os.memfd_create("stand-in")
        os.ftruncate(file, max(nbytes, 1))
        return self._map(file, max(nbytes, 1))

    def _map(self, file: int, nbytes: int) -> int:
        mapping = self.mapping(file, nbytes)
        self.order.forget(*mapping.range)
        self._maps[mapping.address] = mapping
        return mapping.address

    def free(self, address: int) -> None:
        self._must_be_current()
        self.order.give_back(self._maps[address].range)
        self._maps.pop(address).close()

    def free_in_order(self, address: int, stream: Stream) -> None:
        """Frees memory once the stream has come there; may be called by a finalizer."""
        mapping = self._maps[address]
        mapping.dropped = True
        self.order.give_back(mapping.range, [stream.number])
        stream.queue(lambda: self._maps.pop(address).close())

    def host_memory(self, nbytes: int) -> torch.Tensor:
        pages = mmap.mmap(-1, max(nbytes, 1))
        made = torch.frombuffer(pages, dtype=torch.uint8)
        self._pin(made.data_ptr(), len(pages)).pages = pages
        weakref.finalize(made.untyped_storage(), self.unpin, made.data_ptr()).atexit = False
        return made[:nbytes]

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def identity(self) -> str:
        return f"stand-in of {os.getpid()}" if self.own else "stand-in"

    def pin(self, address: int, nbytes: int) -> None:
        self._must_be_current()
        assert address not in self._pinned, "pinned twice"
        if self.pins == "none that is shared" and is_shared(address):
            raise OSError("the stand-in pins no shared memory")
        self._pin(address, nbytes)

    def _pin(self, address: int, nbytes: int) -> Region:
        region = Region(address, nbytes)
        self.order.forget(*region.range)
        self._pinned[address] = region
        return region

    def unpin(self, address: int) -> None:
        self.order.give_back(self._pinned[address].range)
        self._pinned.pop(address).is_there = False

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
        place = self._reach(address, nbytes).now() if nbytes else 0
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
        to, stream = self._reach(place, nbytes), self.current_stream
        self.order.access(stream.number, [], [(place, place + nbytes)])
        stream.queue(lambda: ctypes.memmove(to.now(), kept.data_ptr(), nbytes))

    def assign(self, target: Array, source: Array) -> None:
        """Queues target = source on the current stream."""
        nbytes = math.prod(source.shape) * getattr(torch, source.dtype).itemsize
        with self.current():
            self.copy(target.address, source.address, nbytes, self.current_stream)

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
            from_, stream = self._reach(place, nbytes), self.current_stream
            self.order.access(stream.number, [(place, place + nbytes)], [])
            stream.queue(lambda: ctypes.memmove(made.data_ptr(), from_.now(), nbytes))
        self.current_stream.record().wait()
        return made


def _view(place: Place, size: int, dtype: DType) -> np.ndarray:
    return unowned(place.now(), size, dtype.storage)


class Memory:
    """Device memory that is freed with its last array, in the order of the stream that was current when it was made.

    So do the allocators of torch and cupy: what other streams still do with it then, they do with memory of others.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        with gpu.current():
            self.address = gpu.allocate(nbytes)
        weakref.finalize(self, gpu.free_in_order, self.address, gpu.current_stream).atexit = False


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
