"""torch tensors on the stand-in for a GPU: `torch.device("standin", 0)`, for this process and for good.

    tensor       a wrapper of a CPU tensor, which torch takes for one on another device: it refuses to mix the two, and
                 backward runs in a thread of autograd's for that device, as on a GPU
    operator     runs on the inner tensors at its place in the current stream: after all that this was told to wait for
    collectives  run in the stand-in's own threads, at any time that their streams allow

So a use of a collective's result before the stream has waited reads old values. That is also
told without luck: each operator notes on which stream it reads and writes what memory, and must be ordered after those
that wrote and read it before (`Order`).

The engine of autograd makes its threads when it is first used: this module must be imported before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from collectives.backends.cuda import device
from collectives.base.buffers import DType, describe
from collectives.base.reduction import Reduction
from tests.collectives.backends.cuda import standin

Range = tuple[int, int]  # addresses
NAME = "standin"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
_WAITS = frozenset({"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select"})
_MIXES = frozenset({"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"})


class Storage:
    """A storage of which memory that comes anew counts as not used yet, and goes once the stream has come there."""

    def __init__(self, of: torch.UntypedStorage) -> None:
        self._of = of
        self._cdata = of._cdata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def resize_(self, nbytes: int) -> None:
        current().come_to_the_end_of_the_stream()
        self._of.resize_(nbytes)
        current().order.forget(self._of.data_ptr(), self._of.data_ptr() + nbytes)


class Tensor(torch.Tensor):
    """inner: the CPU tensor with its values."""

    inner: torch.Tensor
    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.inner = inner
        weakref.finalize(made, current().dropped.append, inner).atexit = False
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return Storage(self.inner.untyped_storage())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"standin {self.inner!r}"

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    gpu, name = current(), function._schema.name.partition("::")[2]
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    inside = {**kwargs, "device": torch.device("cpu")} if target is not None else dict(kwargs)
    inside.pop("pin_memory", None)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
    ours = [tensor for tensor in given if isinstance(tensor, Tensor)]
    for tensor in given:
        if not isinstance(tensor, Tensor) and tensor.dim() and name not in _MIXES:
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on {tensor.device}")
    gpu.come_to_the_end_of_the_stream()
    with _disable_current_modes():
        out = function(*_unwrapped(args), **_unwrapped(inside))
    alias = [argument.alias_info for argument in function._schema.arguments]
    views = all(info is None or not info.is_write for info in alias) and any(
        result.alias_info is not None for result in function._schema.returns
    )
    by_inner = {id(tensor.inner): tensor for tensor in ours}

    def wrapped(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or to_host or (name == "copy_" and not isinstance(args[0], Tensor)):
            return leaf
        return by_inner[id(leaf)] if id(leaf) in by_inner else Tensor(leaf)

    if not views:
        written = [
            value
            for argument, value in zip(function._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        results = [leaf for leaf in tree_leaves((out, written, kwargs.get("out"))) if torch.is_tensor(leaf)]
        inner = [result.inner if isinstance(result, Tensor) else result for result in results]
        for fresh in (result for result in inner if id(result) not in by_inner):
            gpu.order.forget(*_range(fresh))
        gpu.order.use([t.inner for t in ours], inner)
        if name in _WAITS or to_host or (name == "copy_" and not isinstance(args[0], Tensor)):
            gpu.waits += 1
            gpu.order.host_knows(gpu.current_stream)
    if name == "copy_" and not isinstance(args[0], Tensor):
        return args[0]
    return tree_map(wrapped, out)


def _unwrapped(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.inner if isinstance(leaf, Tensor) else leaf, tree)


_library = torch.library.Library("aten", "IMPL")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Any:
    return Tensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return Tensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


class Order:
    """Order of accesses to memory, by streams, events, and the host's waits.

    Each piece of work of a stream has a number. clocks: of each stream, what of all streams it comes after. Work that
    the host queues comes after all that any of its threads has waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clocks: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}
        self._accesses: dict[Range, tuple[Any, dict[int, int]]] = {}  # the last write, and reads since
        self._near: dict[int, set[Range]] = {}  # by page: those that lie in it

    def _clock(self, stream: int) -> dict[int, int]:
        clock = self._clocks.setdefault(stream, {stream: 0})
        _join(clock, self._host)
        return clock

    def event(self, stream: int) -> dict[int, int]:
        with self._lock:
            return dict(self._clock(stream))

    def wait(self, stream: int, event: dict[int, int]) -> None:
        with self._lock:
            _join(self._clock(stream), event)

    def host_waits(self, event: dict[int, int]) -> None:
        with self._lock:
            _join(self._host, event)

    def host_knows(self, stream: Any) -> None:
        self.host_waits(self.event(stream.number))

    def use(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """In the current stream."""
        stream = current().current_stream.number
        self.access(stream, [_range(t) for t in read if t.numel()], [_range(t) for t in written if t.numel()])

    def access(self, stream: int, read: Sequence[tuple[int, int]], written: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            clock = self._clock(stream)
            clock[stream] += 1
            writes = set(written)
            for place in {*read, *written}:
                for other in self._overlapping(place):
                    write, reads = self._accesses[other]
                    before = {**(dict([write]) if write else {}), **(reads if place in writes else {})}
                    for who, number in before.items():
                        if clock.get(who, 0) < number:
                            kind = "written" if place in writes else "read"
                            current().errors.append(
                                AssertionError(f"{kind} on stream {stream} while stream {who} still uses it")
                            )
                    if place in writes and place[0] <= other[0] and other[1] <= place[1]:
                        self._remove(other)
                write, reads = self._accesses.get(place, (None, {}))
                for page in _pages(place):
                    self._near.setdefault(page, set()).add(place)
                if place in writes:
                    self._accesses[place] = ((stream, clock[stream]), {})
                else:
                    self._accesses[place] = (write, {**reads, stream: clock[stream]})

    def forget(self, start: int, stop: int) -> None:
        """The memory is given back; what comes to lie there has not been used yet."""
        with self._lock:
            for other in self._overlapping((start, stop)):
                self._remove(other)

    def forget_all(self) -> None:
        """Forgets the accesses to all memory."""
        with self._lock:
            self._accesses.clear()
            self._near.clear()

    def _overlapping(self, place: Range) -> set[Range]:
        near = (o for page in _pages(place) for o in self._near.get(page, ()))
        return {other for other in near if other[0] < place[1] and place[0] < other[1]}

    def _remove(self, place: Range) -> None:
        del self._accesses[place]
        for page in _pages(place):
            self._near[page].discard(place)


def _pages(place: Range) -> range:
    return range(place[0] >> 14, (place[1] - 1 >> 14) + 1)


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Event(standin.Event):
    clock: dict[int, int]

    def wait(self) -> None:
        super().wait()
        self._gpu.order.host_waits(self.clock)  # type: ignore[attr-defined]

    def is_done(self) -> bool:
        done = super().is_done()
        if done:
            self._gpu.order.host_waits(self.clock)  # type: ignore[attr-defined]
        return done


class Stream(standin.Stream):
    """busy: whether something was queued since the host last waited for its end."""

    busy = False

    def queue(self, work: Any) -> None:
        self.busy = True
        super().queue(work)

    def record(self) -> Event:
        event = Event(self._gpu)
        event.clock = self._gpu.order.event(self.number)  # type: ignore[attr-defined]
        busy = self.busy
        self.queue(event._passed.set)
        self.busy = busy
        return event

    def wait(self, event: device.Event) -> None:
        if not isinstance(event, standin.OpenedEvent):  # another process's orders nothing of this one's
            assert isinstance(event, Event)
            self._gpu.order.wait(self.number, event.clock)  # type: ignore[attr-defined]
        super().wait(event)


class _Mapping:
    """Memory like that of the collectives' stand-in, but where torch's operators can reach it."""

    def __init__(self, file: int, nbytes: int) -> None:
        self.file, self.nbytes = file, nbytes
        self.inside = mmap.mmap(file, nbytes)
        self.address: int = np.frombuffer(self.inside, np.uint8).ctypes.data

    def close(self) -> None:
        os.close(self.file)


class Gpu(standin.Gpu):
    """The stand-in for a GPU whose memory torch's operators compute on. waits: how often the host waited for it."""

    def __init__(self, *, seed: int | None = None, exports: bool = True) -> None:
        self.order = Order()
        super().__init__(seed=seed, exports=exports)
        self.waits = 0
        # Their memory goes to others in the order of the stream, as by torch's allocator of GPU memory.
        self.dropped: list[torch.Tensor] = []
        self.name = "stand-in"
        self._default = Stream(self)

    def stream(self) -> Stream:
        return Stream(self)

    def stream_of(self, array: Any) -> Stream:
        return self.current_stream

    @property
    def current_stream(self) -> Any:
        """This thread's; else the one of the main thread, which autograd's threads take over."""
        return getattr(self._local, "stream", self._default)

    def come_to_the_end_of_the_stream(self) -> None:
        stream = self.current_stream
        if stream.busy:
            stream.busy = False
            standin.Event.wait(stream.record())
            stream.busy = False
        self.dropped.clear()

    def copy(self, target: int, source: int, nbytes: int, stream: device.Stream) -> None:
        assert isinstance(stream, Stream)
        if nbytes:
            self.order.access(stream.number, [(source, source + nbytes)], [(target, target + nbytes)])
        super().copy(target, source, nbytes, stream)

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
        if size and outputs:
            written = dtype.wide if op.partial else dtype
            read_ranges = [(place, place + size * dtype.itemsize) for place in inputs]
            self.order.access(
                stream.number, read_ranges, [(place, place + size * written.itemsize) for place in outputs]
            )
        super().combine(op, dtype, inputs, outputs, size, factors, stream)

    def finish(
        self, op: Reduction, dtype: DType, accumulated: int, out: int, size: int, ranks: int, stream: device.Stream
    ) -> None:
        assert isinstance(stream, Stream)
        if size:
            read = (accumulated, accumulated + size * dtype.wide.itemsize)
            self.order.access(stream.number, [read], [(out, out + size * dtype.itemsize)])
        super().finish(op, dtype, accumulated, out, size, ranks, stream)

    def _reach(self, place: int, nbytes: int, device: bool = False) -> tuple[int, bool]:
        with self._lock:
            pinned = any(start <= place and place + nbytes <= start + size for start, size in self._pinned.items())
        return place, not pinned

    def _map(self, file: int, nbytes: int) -> int:
        mapping = _Mapping(file, nbytes)
        with self._lock:
            self._maps[mapping.address] = mapping  # type: ignore[assignment]
        self.order.forget(mapping.address, mapping.address + nbytes)
        return mapping.address

    def _unmap(self, address: int) -> None:
        with self._lock:
            self._maps.pop(address).close()

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64))
        if not size:
            return torch.empty(shape, dtype=dtype, device=DEVICE)
        memory: Any = (ctypes.c_char * (size * describe(dtype).itemsize)).from_address(address)
        memory.owner = owner
        return Tensor(torch.frombuffer(memory, dtype=dtype).view(shape))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        made = super().host_memory(nbytes)
        self.order.forget(made.data_ptr(), made.data_ptr() + nbytes)
        return made

    def raise_errors(self) -> None:
        """In the main thread alone: autograd's threads cannot pass errors on for a device of this kind."""
        if threading.current_thread() is threading.main_thread():
            super().raise_errors()

    def keep(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, Tensor)

    def identity(self) -> str:
        return self.name


_gpus: list[Gpu] = []


def current() -> Gpu:
    """The one that is there."""
    return _gpus[-1]


def plug_in(gpu: Gpu) -> Gpu:
    """From here on it is the one on which tensors are."""
    _gpus.append(gpu)
    return gpu
