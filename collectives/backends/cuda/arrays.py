"""DeviceBuffers of arrays on GPUs, without a copy: torch tensors, and objects with `__cuda_array_interface__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...base.buffers import DTYPES, DeviceBuffer, DType, check_tensor, unowned
from ...errors import ArgumentError, ArgumentTypeError
from . import driver


def recognises(array: Any) -> bool:
    """Returns whether it is an array on a GPU."""
    if isinstance(array, torch.Tensor):
        return bool(array.is_cuda)
    return hasattr(array, "__cuda_array_interface__")


def signature(array: Any) -> tuple[Any, ...] | None:
    """Implements `ArrayKind.signature`."""
    if isinstance(array, torch.Tensor):
        if not array.is_cuda or array.layout is not torch.strided or not array.is_contiguous() or array.is_complex():
            return None
        pointer = array.data_ptr()
        return (pointer, array.numel(), array.dtype, array.get_device()) if pointer else None
    if not hasattr(array, "__cuda_array_interface__"):
        return None
    seen = array.__cuda_array_interface__
    pointer, read_only = seen["data"]
    if seen.get("strides") is not None or not pointer:
        return None
    return pointer, tuple(seen["shape"]), array.dtype, read_only


def inspect(array: Any, name: str, *, writable: bool) -> DeviceBuffer:
    """Implements `ArrayKind.inspect`."""
    if isinstance(array, torch.Tensor):
        if array.layout != torch.strided:
            raise ArgumentTypeError(
                f"{name}: got a {array.layout} tensor on {array.device}; needs a dense (strided) one"
            )
        dtype, index = check_tensor(array, name), array.get_device()
        return _buffer(array.data_ptr(), array.numel(), dtype, array, index, name)
    seen = array.__cuda_array_interface__
    pointer, read_only = seen["data"]
    shape, strides = tuple(seen["shape"]), seen.get("strides")
    dtype = _element_type(array, seen["typestr"], name)
    if seen.get("mask") is not None:
        raise ArgumentTypeError(f"{name}: got a masked array; needs one without a mask")
    if strides is not None and tuple(strides) != _packed(shape, dtype.itemsize) and 0 not in shape:
        raise ArgumentError(
            f"{name}: got a non-contiguous array of shape {shape} and strides {tuple(strides)}; "
            "needs a C-contiguous one (cupy.ascontiguousarray copies it into one)"
        )
    if writable and read_only:
        raise ArgumentError(f"{name}: got a read-only array; needs one that may be written")
    size = int(np.prod(shape, dtype=np.int64))
    return _buffer(pointer, size, dtype, array, _index(array, pointer), name)


def _buffer(pointer: int, size: int, dtype: DType, array: Any, index: int, name: str) -> DeviceBuffer:
    why = driver.unusable_reason()
    if why:
        raise ArgumentTypeError(f"{name}: got an array on GPU {index}, which is out of reach: {why}")
    return DeviceBuffer(unowned(pointer, size, dtype.storage), dtype, array, index)


def _element_type(array: Any, typestr: str, name: str) -> DType:
    """The element type by the array's own dtype, as the interface has no name for bfloat16."""
    found = DTYPES.get(str(getattr(array, "dtype", "")).removeprefix("torch."))
    if found is None or np.dtype(typestr).itemsize != found.itemsize or np.dtype(typestr).byteorder == ">":
        raise ArgumentTypeError(
            f"{name}: got dtype {getattr(array, 'dtype', typestr)!r}; needs one of {', '.join(DTYPES)}, "
            "in native byte order"
        )
    return found


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array in C order, in bytes."""
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _index(array: Any, pointer: int) -> int:
    """The number of the GPU that it is on."""
    device = getattr(array, "device", None)
    number = getattr(device, "id", None)
    return int(number) if number is not None else driver.index_of(pointer)


def gpu_index(operation: str, device: Any) -> int | None:
    """Returns the number of the GPU that a torch device names; None for the CPU."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", driver.TORCH):
        raise ArgumentError(f"{operation}: got device {device!r}; needs a CPU or CUDA device")
    if found.type == "cpu":
        return None
    why = driver.unusable_reason()
    if why:
        raise ArgumentError(f"{operation}: got device {device!r}, and no GPU can be used here: {why}")
    return driver.current_index() if found.index is None else found.index
