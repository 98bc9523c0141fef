"""Flat, typed, contiguous views of the memory of arrays of any kind, without a copy.

numpy knows no bfloat16, so a bf16 tensor's flat view holds its bits as uint16; `DType` remembers what they mean. Arrays
on a GPU are recognised by `backends.cuda.arrays`, which is registered here as an `ArrayKind`; here is only the Buffer
that they become. A new dtype begins in `DTYPES` (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from mpi4py import MPI

from ..errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True, eq=False)  # there is one of each, and to hash five fields for every call takes a microsecond
class DType:
    """An element type. kind: "f" float, "i" signed, "u" unsigned, "b" bool, "c" complex.

    storage: the numpy dtype of the flat view.
    accumulate: the numpy dtype in which reductions run.
    """

    name: str
    kind: str
    storage: np.dtype[Any]
    accumulate: np.dtype[Any]
    torch: torch.dtype | None

    @cached_property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.storage.itemsize

    @cached_property
    def widened(self) -> bool:
        """Returns whether reductions run in a wider type than the data's (fp16 and bf16 in fp32)."""
        return self.accumulate != self.storage

    @property
    def wide(self) -> DType:
        """The element type of `accumulate`."""
        return DTYPES[self.accumulate.name] if self.widened else self


def _dtype(name: str, accumulate: str | None = None) -> DType:
    storage = np.dtype("uint16" if name == "bfloat16" else name)
    kind = "f" if name == "bfloat16" else storage.kind
    return DType(name, kind, storage, np.dtype(accumulate or storage), getattr(torch, name, None))


_FLOATS = [_dtype("float64"), _dtype("float32"), _dtype("float16", "float32"), _dtype("bfloat16", "float32")]
_INTEGERS = [_dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
_OTHERS = [_dtype("bool"), _dtype("complex64"), _dtype("complex128")]
DTYPES: dict[str, DType] = {d.name: d for d in [*_FLOATS, *_INTEGERS, *_OTHERS]}
_BY_TORCH = {d.torch: d for d in DTYPES.values() if d.torch is not None}
_BY_NUMPY = {d.storage: d for d in DTYPES.values() if d.name != "bfloat16"}
_NAMES = ", ".join(DTYPES)
_TENSOR, _STRIDED = torch.Tensor, torch.strided  # for `signature`, which every call asks
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True, eq=False)
class Buffer:
    """The memory of one array.

    flat: a 1-D numpy view of all its elements, in C order.
    owner: keeps it alive.
    """

    flat: np.ndarray[Any, Any]
    dtype: DType
    owner: Any = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.flat.size

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.flat.nbytes

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return address(self.flat)

    def unowned(self) -> Buffer:
        """A copy of this description that does not keep the memory alive."""
        return Buffer(unowned(self.address, self.size, self.flat.dtype), self.dtype)

    def part(self, start: int, stop: int) -> Buffer:
        """The elements start <= i < stop."""
        return Buffer(self.flat[start:stop], self.dtype, self.owner)

    def span(self) -> tuple[int, int]:
        """Address of the first byte and of the byte after the last."""
        start = self.address
        return start, start + self.flat.nbytes

    def as_torch(self) -> torch.Tensor:
        """Views the memory as a 1-D tensor of the element type."""
        if self.dtype.torch is None:
            raise ArgumentTypeError(f"torch has no {self.dtype.name}")
        bits = self.flat.view(np.int16) if self.dtype.name == "bfloat16" else self.flat
        return torch.from_numpy(bits).view(self.dtype.torch)


@dataclass(slots=True, eq=False)
class DeviceBuffer(Buffer):
    """The memory of an array on a GPU. Sizes and addresses of `flat` are right; what is there, the host cannot touch.

    device: the GPU's number in this process.
    """

    device: int = 0

    def unowned(self) -> DeviceBuffer:
        """A copy of this description that does not keep the memory alive."""
        return DeviceBuffer(unowned(self.address, self.size, self.flat.dtype), self.dtype, None, self.device)

    def part(self, start: int, stop: int) -> DeviceBuffer:
        """The elements start <= i < stop."""
        return DeviceBuffer(self.flat[start:stop], self.dtype, self.owner, self.device)


class ArrayKind(Protocol):
    """Arrays in memory that is not the host's: how they are recognised, and seen as Buffers."""

    def recognises(self, array: Any) -> bool:
        """Returns whether the array is of this kind."""

    def signature(self, array: Any) -> tuple[Any, ...] | None:
        """The array's `signature`; None also for an array of another kind."""

    def inspect(self, array: Any, name: str, *, writable: bool) -> Buffer:
        """Describes the array, as `inspect` does."""


_kinds: list[ArrayKind] = []


def register(kind: ArrayKind) -> None:
    """Registers another kind of array for `inspect` and `signature`; once, as the module that knows it is imported."""
    _kinds.append(kind)


def memory_name(data: Buffer) -> str:
    """Names the memory of a buffer, for errors and comparisons."""
    return f"GPU {data.device}" if isinstance(data, DeviceBuffer) else "the host"


def address(flat: np.ndarray[Any, Any]) -> int:
    """The address of an array's first byte."""
    return MPI.Get_address(flat) if flat.size else flat.ctypes.data  # numpy's own way takes ten times as long


def unowned(pointer: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A view of memory by its address, which keeps nothing alive: only to be used while something else does."""
    if not size:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, dtype)


def copy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """target = source, unless they are one memory."""
    if address(source) != address(target):
        np.copyto(target, source)


def signature(array: Any) -> tuple[Any, ...] | None:
    """The properties that `inspect` looks at, at a tenth of its cost: equal signatures mean the same memory and type.

    None where that cannot be told: look again.
    """
    if type(array) is np.ndarray:
        flags = array.flags
        if not array.size or not flags.c_contiguous:
            return None
        return MPI.Get_address(array), array.size, array.dtype, flags.writeable
    if isinstance(array, _TENSOR) and array.is_cpu and array.layout is _STRIDED:
        dtype = array.dtype
        if not array.is_contiguous() or dtype.is_complex or array.is_neg():
            return None
        pointer = array.data_ptr()
        return (pointer, array.numel(), dtype) if pointer else None
    for kind in _kinds:
        found = kind.signature(array)
        if found is not None:
            return found
    return None


def inspect(array: Any, name: str, *, writable: bool) -> Buffer:
    """The Buffer of a numpy or cupy array or a torch tensor; a DeviceBuffer if it is on a GPU.

    name: the argument's name in errors.
    writable: refuse read-only memory. Subclasses of numpy's array are read as plain ones; masked arrays are refused.

    Raises ArgumentTypeError for what is no array or has no numeric elements, ArgumentError for an array whose elements
    do not lie in one piece, or that is read-only and must be written.
    """
    if isinstance(array, np.ndarray):
        return _inspect_numpy(array, name, writable)
    if isinstance(array, torch.Tensor) and not array.is_cuda:
        return _inspect_torch(array, name)
    for kind in _kinds:
        if kind.recognises(array):
            return kind.inspect(array, name, writable=writable)
    raise ArgumentTypeError(f"{name}: got {_kind(array)}; needs a numpy or cupy array or a torch tensor")


def _is_masked(array: np.ndarray[Any, Any]) -> bool:
    """Returns whether the array has a mask; numpy.ma is not imported for it, as without it there is none."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


def _inspect_numpy(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    if type(array) is not np.ndarray and _is_masked(array):
        raise ArgumentTypeError(f"{name}: got a masked array, whose mask would stay behind; needs `.filled(...)` of it")
    array = array.view(np.ndarray)  # a matrix is never flat
    dtype = _BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype!r}; needs one of {_NAMES}, in native byte order")
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name}: got a non-contiguous array of shape {array.shape} and strides {array.strides}; "
            "needs a C-contiguous one (numpy.ascontiguousarray copies it into one)"
        )
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{name}: got a read-only array; needs one that may be written")
    return Buffer(array.reshape(-1), dtype)


def _inspect_torch(tensor: torch.Tensor, name: str) -> Buffer:
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise ArgumentTypeError(
            f"{name}: got a {tensor.layout} tensor on {tensor.device}; needs a dense (strided) tensor on the CPU "
            "or a CUDA GPU"
        )
    dtype = check_tensor(tensor, name)
    if not tensor.numel():  # torch gives it the address 0, and MPI libraries give small addresses a meaning
        return Buffer(np.empty(0, dtype.storage), dtype, tensor)
    # Not tensor.numpy(): that would forbid for ever to free the tensor's memory in place (`resize_`).
    return Buffer(unowned(tensor.data_ptr(), tensor.numel(), dtype.storage), dtype, tensor)


def check_tensor(tensor: torch.Tensor, name: str) -> DType:
    """A dense tensor's element type, if its elements are numbers that lie in one piece; see `inspect`."""
    dtype = _BY_TORCH.get(tensor.dtype)
    if dtype is None:
        raise ArgumentTypeError(f"{name}: got dtype {tensor.dtype}; needs one of {_NAMES}")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"{name}: got a non-contiguous tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "needs a contiguous one (tensor.contiguous() copies it into one)"
        )
    needed = (tensor.storage_offset() + tensor.numel()) * dtype.itemsize
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        raise ArgumentError(f"{name}: got a tensor whose storage was freed or made smaller; needs one with its memory")
    if type(tensor) not in PLAIN_TENSORS and tensor.numel() and not _has_memory(tensor):
        raise ArgumentTypeError(f"{name}: got {_kind(tensor)}, which has no memory of its own; needs a plain tensor")
    return dtype


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether it has memory; subclasses that wrap other tensors, as masked, fake and cut ones do, have not."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors
        return bool(tensor.data_ptr())
    return False


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def describe(dtype: Any) -> DType:
    """The DType of a torch dtype, or of whatever numpy takes for a dtype."""
    found = _BY_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else DTYPES.get(np.dtype(dtype).name)
    if found is None:
        raise ArgumentTypeError(f"dtype: got {dtype!r}; needs one of {_NAMES}")
    return found


def empty(shape: Any, dtype: Any) -> Any:
    """An uninitialised array: a torch tensor for a torch dtype, a numpy array for a numpy one."""
    describe(dtype)
    if isinstance(dtype, torch.dtype):
        return torch.empty(shape, dtype=dtype)
    return np.empty(shape, dtype)


def over(memory: Any, start: int, shape: Any, dtype: Any) -> Any:
    """Makes an array over existing memory, from byte `start` of it; the array keeps it alive."""
    kind = describe(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if 0 in shape:
        return empty(shape, dtype)
    if isinstance(dtype, torch.dtype):
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
    return np.frombuffer(memory, kind.storage, math.prod(shape), start).view(dtype).reshape(shape)
