"""torch tensors on the stand-in for a GPU: `torch.device("standin", 0)`, for this process and for good.

    tensor       a wrapper of a CPU tensor, which torch takes for one on another device: it refuses to mix the two, and
                 backward runs in a thread of autograd's for that device, as on a GPU
    operator     runs on the inner tensors at its place in the current stream: after all that this was told to wait for
    collectives  run in the stand-in's own threads, at any time that their streams allow

So a use of a collective's result before the stream has waited reads old values. That is also told without luck: each
operator notes on which stream it reads and writes what memory, and must be ordered after those that wrote and read it
before (`Order`). Memory goes, as by torch's allocator of GPU memory, in the order of the stream in which it was taken,
and of those for which it was kept (`Block`): a use on another one that nothing orders before that is told as well.

The engine of autograd makes its threads when it is first used: this module must be imported before.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from collectives.base.buffers import describe
from tests.collectives.backends.cuda import standin

NAME = "standin"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
_WAITS = frozenset({"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select"})
_MIXES = frozenset({"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"})


class Block(standin.Region):
    """The memory of a storage, from when it comes until it goes. streams: in whose order it goes."""

    kind, on_device = "device memory", True

    def __init__(self, storage: torch.UntypedStorage, stream: Any) -> None:
        super().__init__(storage.data_ptr(), storage.nbytes())
        self.streams = [stream]

    def give_back(self, gpu: Gpu) -> bool:
        """Returns False, and tells it, if others may still use it when the streams have come here."""
        return gpu.order.give_back(self.range, [stream.number for stream in self.streams])

    def end(self, blocks: dict[int, Block]) -> None:
        """The memory is gone."""
        self.is_there = False
        if blocks.get(self.address) is self:
            del blocks[self.address]


def block_of(storage: Any) -> Block | None:
    """The block of a storage; a new one where its memory is new. None where it has none, or another's."""
    found: Block | None = getattr(storage, "block", None)
    if found is not None and found.is_there:
        return found
    if not storage.nbytes() or hasattr(storage, "of_another"):
        return None
    gpu = current()
    made = storage.block = gpu.blocks[storage.data_ptr()] = Block(storage, gpu.current_stream)
    gpu.order.forget(*made.range)
    weakref.finalize(storage, made.end, gpu.blocks).atexit = False
    return made


def _count(inner: torch.Tensor) -> None:
    """Counts one more tensor over the memory. By the list's length, as finalizers run in the midst of anything."""
    storage: Any = inner.untyped_storage()
    block_of(storage)
    if not hasattr(storage, "tensors"):
        storage.tensors = []
    storage.tensors.append(None)


def _drop(gpu: Gpu, inner: torch.Tensor) -> None:
    """A tensor has gone. Its memory goes with the last one, once the streams have come there."""
    storage: Any = inner.untyped_storage()
    storage.tensors.pop()
    block = getattr(storage, "block", None)
    if storage.tensors or block is None or not block.is_there:
        return
    block.dropped = True
    if not block.give_back(gpu):
        gpu.leaked.append(inner)  # an error with a name, and not a crash later
        return
    for stream in block.streams:
        if stream.has_work:
            stream.put(functools.partial(gpu.gone.append, inner))


class Storage:
    """A storage of which memory that comes anew counts as not used yet, and goes once the streams have come there."""

    def __init__(self, of: torch.UntypedStorage) -> None:
        self._of = of
        self._cdata = of._cdata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def resize_(self, nbytes: int) -> None:
        gpu, block = current(), block_of(self._of)
        if block is not None:
            if not block.give_back(gpu):
                gpu.wait_for_all_lines()
            for stream in (gpu.current_stream, *block.streams):
                gpu.come_to_the_end_of(stream)
            block.end(gpu.blocks)
        self._of.resize_(nbytes)
        block_of(self._of)


class Tensor(torch.Tensor):
    """inner: the CPU tensor with its values. gone: to be called when these are no longer its values."""

    inner: torch.Tensor
    gone: weakref.finalize[..., Any]
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
        made._show(inner)
        return made

    def _show(self, inner: torch.Tensor) -> None:
        _count(inner)
        self.inner, self.gone = inner, weakref.finalize(self, _drop, current(), inner)
        self.gone.atexit = False

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
        gone = self.gone
        self._show(value.inner)
        gone()

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
    gpu.come_to_the_end_of(gpu.current_stream)
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
            if to_host:
                gpu.order.forget(*_range(fresh))
            else:
                block_of(fresh.untyped_storage())
        read = [_range(tensor.inner) for tensor in ours if tensor.numel()]
        gpu.order.access(gpu.current_stream.number, read, [_range(tensor) for tensor in inner if tensor.numel()])
        if name in _WAITS or to_host or (name == "copy_" and not isinstance(args[0], Tensor)):
            gpu.waits += 1
            gpu.order.host_waits(gpu.order.event(gpu.current_stream.number))
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


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Stream(standin.Stream):
    """last: number of the last work that was queued. seen: of the last of which an operator has waited for the end."""

    def __init__(self, gpu: Gpu) -> None:
        self._works = itertools.count(1)
        self.last = self.seen = 0
        super().__init__(gpu)

    def queue(self, work: Any) -> None:
        self.last = next(self._works)
        super().queue(work)
        self.last = next(
            self._works
        )  # anew, as another thread may have waited in between for the end of what was before

    @property
    def has_work(self) -> bool:
        """Returns whether something was queued of which no operator has waited for the end yet."""
        return self.seen != self.last


class Mapping(standin.Mapping):
    """Memory like that of the collectives' stand-in, but where torch's operators can reach it."""

    def _begin(self) -> int:
        return self.inside

    def _end(self) -> None:
        pass


class Gpu(standin.Gpu):
    """The stand-in for a GPU whose memory torch's operators compute on. waits: how often the host waited for it."""

    mapping = Mapping

    def __init__(self, *, seed: int | None = None, exports: bool = True) -> None:
        super().__init__(seed=seed, exports=exports)
        self.blocks: dict[int, Block] = {}
        self.waits = 0
        # Tensors to which the streams have come that gave them back. Not theirs to free: at the end of the program a
        # thread that is in torch for that ends the process.
        self.gone: deque[torch.Tensor] = deque()
        self.leaked: list[torch.Tensor] = []
        self.name = "stand-in"

    def stream(self) -> Stream:
        return Stream(self)

    def stream_of(self, array: Any) -> Stream:
        return self.current_stream

    @property
    def current_stream(self) -> Any:
        """This thread's; else the one of the main thread, which autograd's threads take over."""
        return getattr(self._local, "stream", self._default)

    def come_to_the_end_of(self, stream: Stream) -> None:
        """Blocks until the stream's work is done; what is ordered after it is so no more than before."""
        last = stream.last
        if stream.has_work:
            done = threading.Event()
            stream.put(done.set)
            done.wait()
            stream.seen = last
            self.raise_errors()
        self.gone.clear()

    def synchronize(self) -> None:
        super().synchronize()
        self.gone.clear()

    def _region(self, place: int) -> standin.Region | None:
        return super()._region(place) or self._find(self.blocks, place)

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64))
        if not size:
            return torch.empty(shape, dtype=dtype, device=DEVICE)
        memory: Any = (ctypes.c_char * (size * describe(dtype).itemsize)).from_address(address)
        memory.owner = owner
        made: Any = torch.frombuffer(memory, dtype=dtype)
        made.untyped_storage().of_another = True
        return Tensor(made.view(shape))

    def raise_errors(self) -> None:
        """In the main thread alone: autograd's threads cannot pass errors on for a device of this kind."""
        if threading.current_thread() is threading.main_thread():
            super().raise_errors()

    def keep(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, Tensor)
        block = block_of(tensor.inner.untyped_storage())
        if block is not None and self.current_stream not in block.streams:
            block.streams.append(self.current_stream)

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
