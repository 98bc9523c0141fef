"""The part of cupy that `driver` calls, with its signatures, on host memory: so that each of the driver's lines runs.

It shows that calls have the names, the arguments and the errors that cupy documents, and no more: streams run at once,
other processes' memory is this one's, and kernels are looked at and not run.
"""

from __future__ import annotations

import ctypes
import re
import sys
import types
from typing import Any

import numpy as np
import pytest


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class CUDADriverError(RuntimeError):
    pass


class Runtime(types.ModuleType):
    """cupy.cuda.runtime. fails: for a function the status with which it fails. query: what eventQuery gives."""

    CUDARuntimeError = CUDARuntimeError
    eventDisableTiming, eventInterprocess, streamNonBlocking, streamLegacy = 2, 4, 1, 1
    memcpyDefault, hostAllocPortable, cudaIpcMemLazyEnablePeerAccess = 4, 1, 1

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.device, self.devices, self.query = 0, 2, 0
        self.fails: dict[str, int] = {}
        self.forgotten: list[int] = []
        self.memory: dict[int, Any] = {}
        self.live: set[int] = set()  # events and streams
        self.waits: list[tuple[int, int]] = []
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.fails:
            raise CUDARuntimeError(self.fails[name])

    def _new(self) -> int:
        self.live.add(handle := 1000 + len(self.calls))
        return handle

    def check_status(self, status: int) -> None:
        if status:
            self.forgotten.append(status)
            raise CUDARuntimeError(status)

    def getDeviceCount(self) -> int:
        self._call("getDeviceCount")
        return self.devices

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, device: int) -> None:
        self._call("setDevice", device)
        self.device = device

    def deviceSynchronize(self) -> None:
        self._call("deviceSynchronize")

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:0{device}:00.0"

    def pointerGetAttributes(self, ptr: int) -> Any:
        return types.SimpleNamespace(device=1)

    def eventCreateWithFlags(self, flags: int) -> int:
        self._call("eventCreateWithFlags", flags)
        return self._new()

    def eventRecord(self, event: int, stream: int) -> None:
        self._call("eventRecord", event, stream)
        assert event in self.live

    def eventSynchronize(self, event: int) -> None:
        self._call("eventSynchronize", event)

    def eventQuery(self, event: int) -> int:
        return self.query

    def eventDestroy(self, event: int) -> None:
        self._call("eventDestroy", event)
        self.live.remove(event)

    def streamCreateWithFlags(self, flags: int) -> int:
        self._call("streamCreateWithFlags", flags)
        return self._new()

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self.waits.append((stream, event))

    def streamIsCapturing(self, stream: int) -> bool:
        self._call("streamIsCapturing", stream)
        return stream == 77

    def streamDestroy(self, stream: int) -> None:
        self._call("streamDestroy", stream)
        self.live.remove(stream)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._call("memcpyAsync", size, kind, stream)
        ctypes.memmove(dst, src, size)

    def malloc(self, size: int) -> int:
        self._call("malloc", size)
        made = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def free(self, ptr: int) -> None:
        del self.memory[ptr]

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self._call("hostRegister", ptr, size, flags)

    def hostUnregister(self, ptr: int) -> None:
        self._call("hostUnregister", ptr)

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        self._call("ipcGetMemHandle", devPtr)
        return devPtr.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        self._call("ipcOpenMemHandle", handle, flags)
        return int.from_bytes(handle, "little")

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        self._call("ipcCloseMemHandle", devPtr)

    def ipcGetEventHandle(self, event: int) -> bytes:
        self._call("ipcGetEventHandle", event)
        return event.to_bytes(64, "little")

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        self._call("ipcOpenEventHandle", handle)
        return self._new()


class Driver(types.ModuleType):
    """cupy.cuda.driver. context: this thread's; None where CUDA was never used."""

    CUDADriverError = CUDADriverError

    def __init__(self) -> None:
        super().__init__("cupy.cuda.driver")
        self.context: int | None = None

    def ctxGetCurrent(self) -> int:
        if self.context is None:
            raise CUDADriverError
        return self.context


class RawKernel:
    """Looks at what it is called with."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        assert isinstance(options, tuple)
        declared = re.search(r"#define PARAMETERS (.*)\n", code)
        assert declared
        assert name == "combine"
        words = {"u64": np.uint64, "double": np.float64}
        self._types = [words[each.split()[0]] for each in declared[1].split(", ")] + [np.uint64] * 3
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], **kwargs: Any) -> None:
        assert isinstance(grid, tuple)
        assert isinstance(block, tuple)
        assert [type(each) for each in args] == self._types
        assert kwargs.keys() == {"stream"}  # which goes on to cupy.cuda.Function
        self.launched.append((grid, block, args, kwargs["stream"].ptr))


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class ndarray:
    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr
        size = int(np.prod(shape)) * self.dtype.itemsize
        assert size == memptr.mem.size
        self.host = np.frombuffer((ctypes.c_char * size).from_address(memptr.ptr), self.dtype).reshape(shape)


def install(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Has `import cupy` find this in a test."""
    cupy, cuda, runtime = types.ModuleType("cupy"), types.ModuleType("cupy.cuda"), Runtime()
    cuda.__dict__.update(runtime=runtime, driver=Driver(), UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer)
    cuda.__dict__["get_current_stream"] = lambda device_id=-1: types.SimpleNamespace(ptr=55)
    cupy.__dict__.update(cuda=cuda, RawKernel=RawKernel, ndarray=ndarray)
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    return runtime
