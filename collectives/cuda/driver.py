"""CUDA, through cupy's runtime API. The one place that imports cupy, and only when an array on a GPU shows up."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ..buffers import DType, describe
from ..errors import OperationError
from ..reduction import Reduction
from . import kernels
from .device import Device, Event, Stream

_IPC_EXPECTED = 64  # bytes of a CUDA IPC handle


@lru_cache
def missing() -> str:
    """Why no GPU can be used here; empty if one can."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return "cupy is not installed (pip install mpidl[cuda12] or mpidl[cuda13])"
    try:
        return "" if runtime.getDeviceCount() else "cupy sees no GPU"
    except runtime.CUDARuntimeError as error:
        return f"cupy sees no GPU: {error}"


@lru_cache
def open_device(index: int) -> Device:
    """The GPU of that number in this process."""
    return CudaDevice(index)


def index_of(address: int) -> int:
    """The number of the GPU whose memory this is."""
    from cupy.cuda import runtime

    return int(runtime.pointerGetAttributes(address).device)


def current_index() -> int:
    """The number of the GPU that this thread works on."""
    from cupy.cuda import runtime

    return int(runtime.getDevice())


def identity(index: int) -> str:
    """What the GPU of that number is called in every process of this host: its place on the bus."""
    from cupy.cuda import runtime

    return str(runtime.deviceGetPCIBusId(index))


class CudaEvent(Event):
    """A cudaEvent_t without timing."""

    def __init__(self, runtime: Any, stream: int) -> None:
        self._runtime = runtime
        self.handle = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.eventRecord(self.handle, stream)

    def wait(self) -> None:
        """See Event."""
        self._runtime.eventSynchronize(self.handle)

    def is_done(self) -> bool:
        """See Event."""
        return bool(self._runtime.eventQuery(self.handle) == 0)  # cudaSuccess

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._runtime.eventDestroy(self.handle)  # CUDA keeps what waits for it


class CudaStream(Stream):
    """A cudaStream_t. owned: whether it ends with this object."""

    def __init__(self, runtime: Any, handle: int, owned: bool) -> None:
        self._runtime, self.handle, self._owned = runtime, handle, owned

    def record(self) -> CudaEvent:
        """See Stream."""
        return CudaEvent(self._runtime, self.handle)

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, CudaEvent)
        self._runtime.streamWaitEvent(self.handle, event.handle)

    @property
    def is_capturing(self) -> bool:
        """See Stream. The default stream refuses to tell while another one is captured."""
        try:
            return bool(self._runtime.streamIsCapturing(self.handle))
        except self._runtime.CUDARuntimeError:
            return True

    def __del__(self) -> None:
        if self._owned and not sys.is_finalizing():
            self._runtime.streamDestroy(self.handle)  # returns at once; what is queued still runs


class CudaDevice(Device):
    """A CUDA GPU."""

    def __init__(self, index: int) -> None:
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.index = index
        self._kernels: dict[tuple[DType, str, int, int], Any] = {}

    def current(self) -> AbstractContextManager[Any]:
        """See Device."""
        context: AbstractContextManager[Any] = self._cupy.cuda.Device(self.index)
        return context

    def stream(self) -> CudaStream:
        """See Device."""
        return CudaStream(self._runtime, self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking), True)

    def stream_of(self, array: Any) -> CudaStream:
        """See Device. Of other libraries' arrays: the stream that their interface names, else the default one."""
        if isinstance(array, torch.Tensor):
            handle = torch.cuda.current_stream(self.index).cuda_stream
        elif isinstance(array, self._cupy.ndarray):
            handle = self._cupy.cuda.get_current_stream().ptr
        else:
            handle = array.__cuda_array_interface__.get("stream") or self._runtime.streamLegacy
        return CudaStream(self._runtime, handle, False)

    def synchronize(self) -> None:
        """See Device."""
        self._runtime.deviceSynchronize()

    # ---- work on a stream -------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """See Device."""
        assert isinstance(stream, CudaStream)
        if nbytes:
            self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.handle)

    def combine(
        self,
        op: Reduction,
        dtype: DType,
        inputs: Sequence[int],
        outputs: Sequence[int],
        size: int,
        factors: Sequence[float],
        stream: Stream,
    ) -> None:
        """See Device."""
        assert isinstance(stream, CudaStream)
        if not size or not outputs:
            return
        key = dtype, op.name, len(inputs), len(outputs)
        kernel = self._kernels.get(key)
        if kernel is None:
            text = kernels.source(dtype, op, len(inputs), len(outputs))
            kernel = self._kernels[key] = self._cupy.RawKernel(text, "combine", options=kernels.OPTIONS)
        span = kernels.span([*inputs, *outputs], size, dtype.itemsize)
        arguments = (
            *map(np.uint64, inputs),
            *map(np.uint64, outputs),
            *map(np.float64, factors),
            *map(np.uint64, (span.head, span.vectors, span.size)),
        )
        with self._cupy.cuda.ExternalStream(stream.handle, self.index):
            kernel((span.blocks,), (kernels.THREADS,), arguments)

    # ---- memory -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """See Device. Not from a pool: only whole allocations can be exported."""
        try:
            return int(self._runtime.malloc(nbytes))
        except self._runtime.CUDARuntimeError as error:
            raise MemoryError(f"GPU {self.index} has no room for {nbytes} bytes: {error}") from error

    def free(self, address: int) -> None:
        """See Device."""
        self._runtime.free(address)

    def pin(self, address: int, nbytes: int) -> None:
        """See Device."""
        self._runtime.hostRegister(address, nbytes, self._runtime.hostAllocPortable)

    def unpin(self, address: int) -> None:
        """See Device."""
        self._runtime.hostUnregister(address)

    def export(self, address: int) -> bytes:
        """See Device."""
        try:
            handle = bytes(self._runtime.ipcGetMemHandle(address))
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot export its memory: {error}") from error
        if len(handle) != _IPC_EXPECTED:
            raise OperationError(f"a CUDA IPC handle of {len(handle)} bytes; needs {_IPC_EXPECTED}")
        return handle

    def open(self, handle: bytes) -> int:
        """See Device."""
        try:
            return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot open another rank's memory: {error}") from error

    def close(self, address: int) -> None:
        """See Device."""
        self._runtime.ipcCloseMemHandle(address)

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """See Device."""
        kind, nbytes = describe(dtype), math.prod(shape) * describe(dtype).itemsize
        if not nbytes and isinstance(dtype, torch.dtype):
            return torch.empty(shape, dtype=dtype, device=torch.device("cuda", self.index))
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, owner, self.index)
        bits = np.dtype(f"i{kind.itemsize}") if kind.name == "bfloat16" else kind.storage
        if not isinstance(dtype, torch.dtype):
            bits = np.dtype(dtype)
        made = self._cupy.ndarray(shape, bits, self._cupy.cuda.MemoryPointer(memory, 0))
        if not isinstance(dtype, torch.dtype):
            return made
        return torch.as_tensor(made, device=torch.device("cuda", self.index)).view(dtype)

    def for_mpi(self, address: int, nbytes: int) -> Any:
        """See Device."""
        return MPI.memory.fromaddress(ctypes.c_void_p(address).value or 0, nbytes)
