"""CUDA, through cupy's runtime API. The only module that imports cupy, at the first array on a GPU."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ...base.buffers import DType, describe
from ...base.reduction import Reduction
from ...errors import OperationError
from . import kernels
from .device import Device, Event, SharedEvent, Stream

TORCH = "cuda"  # what torch calls these devices
_IPC_EXPECTED = 64  # bytes of a CUDA IPC handle
# Errors that are answers, by their numbers in CUDA.
_NO_MEMORY = 2
_NOT_READY = 600
_CAPTURE_IMPLICIT = 906  # the default stream, while one that waits for it is captured


@lru_cache
def unusable_reason() -> str:
    """The reason why no GPU can be used here; empty if one can."""
    try:
        from cupy.cuda import runtime
    except ModuleNotFoundError:
        return "cupy is not installed (pip install mpidl[cuda12] or mpidl[cuda13])"
    except ImportError as error:
        return f"cupy cannot be imported: {' '.join(str(error).split())}"
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
    """The number of the GPU that this thread works on; torch may have one in mind that CUDA has not been told of."""
    from cupy.cuda import runtime

    return int(torch.cuda.current_device() if torch.cuda.is_initialized() else runtime.getDevice())


class CudaEvent(Event):
    """A cudaEvent_t. owned: whether it ends with this object."""

    def __init__(self, runtime: Any, handle: int, owned: bool = True) -> None:
        self._runtime, self.handle, self._owned = runtime, handle, owned

    def wait(self) -> None:
        """Implements `Event.wait`."""
        self._runtime.eventSynchronize(self.handle)

    def is_done(self) -> bool:
        """Implements `Event.is_done`."""
        status = self._runtime.eventQuery(self.handle)
        try:
            self._runtime.check_status(status)  # which has CUDA forget the error: others would take it for theirs
        except self._runtime.CUDARuntimeError as error:
            if error.status != _NOT_READY:
                raise
        return bool(status == 0)

    def __del__(self) -> None:
        if self._owned and not sys.is_finalizing():
            with contextlib.suppress(self._runtime.CUDARuntimeError):  # a GPU that has failed says so elsewhere
                self._runtime.eventDestroy(self.handle)  # CUDA keeps what waits for it


class CudaSharedEvent(SharedEvent):
    """An event for other processes. It is not destroyed with this object: they may still have it open."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._event = runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventInterprocess)
        self.handle = bytes(runtime.ipcGetEventHandle(self._event))

    def record(self, stream: Stream) -> None:
        """Implements `SharedEvent.record`."""
        assert isinstance(stream, CudaStream)
        self._runtime.eventRecord(self._event, stream.ptr)

    def close(self) -> None:
        """Implements `SharedEvent.close`."""
        self._runtime.eventDestroy(self._event)


class CudaStream(Stream):
    """A cudaStream_t.

    ptr: its handle, by the name that cupy knows.
    owned: whether it ends with this object.
    """

    def __init__(self, runtime: Any, ptr: int, owned: bool) -> None:
        self._runtime, self.ptr, self._owned = runtime, ptr, owned

    def record(self) -> CudaEvent:
        """Implements `Stream.record`."""
        event = CudaEvent(self._runtime, self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
        self._runtime.eventRecord(event.handle, self.ptr)
        return event

    def wait(self, event: Event) -> None:
        """Implements `Stream.wait`."""
        assert isinstance(event, CudaEvent)
        self._runtime.streamWaitEvent(self.ptr, event.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    @property
    def is_capturing(self) -> bool:
        """Implements `Stream.is_capturing`. The default stream cannot tell while another one is captured."""
        try:
            return bool(self._runtime.streamIsCapturing(self.ptr))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _CAPTURE_IMPLICIT:
                raise
        except RuntimeError:  # cupy's, for a capture that has failed
            pass
        return True

    def __del__(self) -> None:
        if self._owned and not sys.is_finalizing():
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._runtime.streamDestroy(self.ptr)  # returns at once; what is queued still runs


class CudaDevice(Device):
    """A CUDA GPU."""

    def __init__(self, index: int) -> None:
        import cupy

        self._cupy, self._runtime, self._driver = cupy, cupy.cuda.runtime, cupy.cuda.driver
        self.index = index
        self._kernels: dict[kernels.Kernel, Any] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Implements `Device.current`. A thread that had no GPU stays on this one: to go back would make a context."""
        before = self._runtime.getDevice()
        if before == self.index:
            yield
            return
        stays = not self._has_context()
        self._runtime.setDevice(self.index)
        try:
            yield
        finally:
            if not stays:
                self._runtime.setDevice(before)

    def _has_context(self) -> bool:
        try:
            return bool(self._driver.ctxGetCurrent())
        except self._driver.CUDADriverError:  # CUDA was not used in this process
            return False

    def stream(self) -> CudaStream:
        """Implements `Device.stream`."""
        return CudaStream(self._runtime, self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking), True)

    def stream_of(self, array: Any) -> CudaStream:
        """Implements `Device.stream_of`: for other libraries' arrays the stream that they name, else the default."""
        if isinstance(array, torch.Tensor):
            return self.torch_stream()
        if isinstance(array, self._cupy.ndarray):
            handle = self._cupy.cuda.get_current_stream().ptr
        else:
            handle = array.__cuda_array_interface__.get("stream") or self._runtime.streamLegacy
        return CudaStream(self._runtime, handle, False)

    def torch_stream(self) -> CudaStream:
        """Implements `Device.torch_stream`."""
        # Not torch.cuda.current_stream, which makes an object of torch's at every call.
        return CudaStream(self._runtime, torch._C._cuda_getCurrentRawStream(self.index), False)

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Implements `Device.using`."""
        assert isinstance(stream, CudaStream)
        made: contextlib.AbstractContextManager[Any] = torch.cuda.stream(
            torch.cuda.ExternalStream(stream.ptr, self.index)
        )
        return made

    def synchronize(self) -> None:
        """Implements `Device.synchronize`."""
        self._runtime.deviceSynchronize()

    # ---- work on a stream -------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Implements `Device.copy`."""
        assert isinstance(stream, CudaStream)
        if nbytes:
            self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.ptr)

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
        """Implements `Device.combine`."""
        kernel = kernels.combining(op, dtype, len(inputs), len(outputs))
        self._launch(kernel, inputs, outputs, size, factors, stream)

    def finish(
        self, op: Reduction, dtype: DType, accumulated: int, out: int, size: int, ranks: int, stream: Stream
    ) -> None:
        """Implements `Device.finish`."""
        self._launch(kernels.finishing(op, dtype, ranks), [accumulated], [out], size, [1.0], stream)

    def _launch(
        self,
        kernel: kernels.Kernel,
        inputs: Sequence[int],
        outputs: Sequence[int],
        size: int,
        factors: Sequence[float],
        stream: Stream,
    ) -> None:
        assert isinstance(stream, CudaStream)
        if not size or not outputs:
            return
        compiled = self._kernels.get(kernel)
        if compiled is None:
            made = self._cupy.RawKernel(kernels.source(kernel), "combine", options=kernels.OPTIONS)
            compiled = self._kernels[kernel] = made
        span = kernel.span(inputs, outputs, size)
        arguments = (
            *map(np.uint64, inputs),
            *map(np.uint64, outputs),
            *map(np.float64, factors),
            *map(np.uint64, (span.head, span.vectors, span.size)),
        )
        compiled((span.blocks,), (kernels.THREADS,), arguments, stream=stream)

    # ---- memory -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Implements `Device.allocate`. Not from a pool: only whole allocations can be exported."""
        try:
            return int(self._runtime.malloc(nbytes))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
            raise MemoryError(f"GPU {self.index} has no room for {nbytes} bytes: {error}") from error

    def free(self, address: int) -> None:
        """Implements `Device.free`."""
        self._runtime.free(address)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Implements `Device.host_memory`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, nbytes: int) -> None:
        """Implements `Device.pin`."""
        try:
            self._runtime.hostRegister(address, nbytes, self._runtime.hostAllocPortable)  # cudaHostRegisterPortable
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"{nbytes} bytes of host memory cannot be pinned for GPU {self.index}: {error}") from error

    def unpin(self, address: int) -> None:
        """Implements `Device.unpin`."""
        self._runtime.hostUnregister(address)

    def export(self, address: int) -> bytes:
        """Implements `Device.export`."""
        try:
            handle = bytes(self._runtime.ipcGetMemHandle(address))
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot export its memory: {error}") from error
        if len(handle) != _IPC_EXPECTED:
            raise OperationError(f"a CUDA IPC handle of {len(handle)} bytes; needs {_IPC_EXPECTED}")
        return handle

    def open(self, handle: bytes) -> int:
        """Implements `Device.open`."""
        try:
            return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot open another rank's memory: {error}") from error

    def close(self, address: int) -> None:
        """Implements `Device.close`."""
        self._runtime.ipcCloseMemHandle(address)

    def shared_event(self) -> CudaSharedEvent:
        """Implements `Device.shared_event`."""
        try:
            return CudaSharedEvent(self._runtime)
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot export an event: {error}") from error

    def open_event(self, handle: bytes) -> CudaEvent:
        """Implements `Device.open_event`."""
        try:
            return CudaEvent(self._runtime, int(self._runtime.ipcOpenEventHandle(handle)))
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"GPU {self.index} cannot open another rank's event: {error}") from error

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """Implements `Device.array`. torch takes cupy's bytes, as cupy's arrays have not all of its element types."""
        nbytes = math.prod(shape) * describe(dtype).itemsize
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, owner, self.index)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        if not isinstance(dtype, torch.dtype):
            return self._cupy.ndarray(shape, np.dtype(dtype), pointer)
        place = torch.device("cuda", self.index)
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=place)
        made = self._cupy.ndarray((nbytes,), np.dtype(np.uint8), pointer)
        return torch.as_tensor(made, device=place).view(dtype).view(shape)

    def keep(self, tensor: torch.Tensor) -> None:
        """Implements `Device.keep`. Memory that is not from torch's allocator is left alone by it."""
        tensor.record_stream(torch.cuda.current_stream(self.index))

    def identity(self) -> str:
        """Implements `Device.identity`."""
        return str(self._runtime.deviceGetPCIBusId(self.index))

    def for_mpi(self, address: int, nbytes: int) -> Any:
        """Implements `Device.for_mpi`."""
        return MPI.memory.fromaddress(address, nbytes)
