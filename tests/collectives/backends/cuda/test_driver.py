"""The driver makes the calls that cupy and CUDA document; on a fake of cupy (`fake_cupy`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from collectives.backends.cuda import driver
from collectives.backends.cuda.driver import CudaDevice, CudaEvent, CudaStream
from collectives.base.buffers import DTYPES, address
from collectives.base.reduction import Reduction
from tests.collectives.backends.cuda import fake_cupy
from tests.collectives.backends.cuda.fake_cupy import CUDARuntimeError, Runtime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    driver.unusable_reason.cache_clear()
    yield fake_cupy.install(monkeypatch)
    driver.unusable_reason.cache_clear()


@pytest.fixture
def gpu(runtime: Runtime) -> CudaDevice:
    return CudaDevice(1)


def test_why_no_gpu_can_be_used(runtime: Runtime) -> None:
    found = []
    for devices, fails in ((2, {}), (0, {}), (2, {"getDeviceCount": 35})):
        driver.unusable_reason.cache_clear()
        runtime.devices, runtime.fails = devices, fails
        found.append(driver.unusable_reason())
    assert found == ["", "cupy sees no GPU", "cupy sees no GPU: error 35"]


def test_what_the_process_asks_of_gpus(runtime: Runtime) -> None:
    runtime.device = 1
    assert (driver.current_index(), driver.index_of(4096), CudaDevice(1).identity()) == (1, 1, "0000:01:00.0")


@pytest.mark.parametrize(("context", "after"), [(None, 1), (0, 1), (123, 0)])
def test_a_thread_goes_back_to_the_gpu_that_it_worked_on(
    runtime: Runtime, gpu: CudaDevice, context: int | None, after: int
) -> None:
    """But not to one on which it has done nothing, where CUDA would make a context."""
    from cupy.cuda import driver as cupy_driver

    cupy_driver.context = context
    with gpu.current():
        assert runtime.device == 1
        with gpu.current():
            pass
        assert runtime.device == 1
    assert runtime.device == after


def test_streams_and_events(runtime: Runtime, gpu: CudaDevice) -> None:
    stream, other = gpu.stream(), gpu.stream()
    assert ("streamCreateWithFlags", 1) in runtime.calls  # cudaStreamNonBlocking
    event = stream.record()
    assert ("eventCreateWithFlags", 2) in runtime.calls  # cudaEventDisableTiming
    assert ("eventRecord", event.handle, stream.ptr) in runtime.calls
    other.wait(event)
    assert runtime.waits == [(other.ptr, event.handle)]
    event.wait()
    assert event.is_done()
    gpu.synchronize()
    del event, stream, other
    assert not runtime.live


def test_an_event_that_has_not_passed_leaves_no_error_behind(runtime: Runtime, gpu: CudaDevice) -> None:
    """CUDA keeps cudaErrorNotReady as the last error, which torch would raise after its next kernel."""
    event = gpu.stream().record()
    runtime.query = 600
    assert not event.is_done()
    assert runtime.forgotten == [600]
    runtime.query = 700
    with pytest.raises(CUDARuntimeError):
        event.is_done()


def test_events_of_other_processes(runtime: Runtime, gpu: CudaDevice) -> None:
    stream, shared = gpu.stream(), gpu.shared_event()
    assert ("eventCreateWithFlags", 2 | 4) in runtime.calls  # and cudaEventInterprocess
    shared.record(stream)
    opened = gpu.open_event(shared.handle)
    stream.wait(opened)
    assert runtime.waits == [(stream.ptr, opened.handle)]
    shared.close()
    for function, call in (
        ("ipcGetEventHandle", gpu.shared_event),
        ("ipcOpenEventHandle", lambda: gpu.open_event(b"")),
    ):
        runtime.fails = {function: 801}
        with pytest.raises(OSError, match="GPU 1 cannot"):
            call()


def test_the_current_streams_of_libraries(runtime: Runtime, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        __cuda_array_interface__: Any

    Other.__cuda_array_interface__ = {"stream": 9}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    array = gpu.array(gpu.allocate(8), (8,), "uint8", None)
    assert [gpu.stream_of(given).ptr for given in (torch.ones(1), array, Other())] == [41, 55, 9]
    Other.__cuda_array_interface__ = {"stream": None}
    assert gpu.stream_of(Other()).ptr == 1  # cudaStreamLegacy


@pytest.mark.parametrize(("fails", "handle", "captured"), [({}, 5, False), ({}, 77, True), (906, 0, True)])
def test_a_capture_is_seen(runtime: Runtime, fails: Any, handle: int, captured: bool) -> None:
    runtime.fails = {"streamIsCapturing": fails} if fails else {}
    assert CudaStream(runtime, handle, owned=False).is_capturing is captured


def test_another_error_is_no_capture(runtime: Runtime) -> None:
    runtime.fails = {"streamIsCapturing": 700}
    with pytest.raises(CUDARuntimeError):
        CudaStream(runtime, 0, owned=False).is_capturing  # noqa: B018


def test_memory_is_copied_exported_and_pinned(runtime: Runtime, gpu: CudaDevice) -> None:
    stream, mine, page = gpu.stream(), gpu.allocate(64), np.arange(8)
    gpu.pin(address(page), page.nbytes)
    gpu.copy(mine, address(page), page.nbytes, stream)
    gpu.copy(mine, 0, 0, stream)
    copies = [call for call in runtime.calls if call[0] == "memcpyAsync"]
    assert copies == [("memcpyAsync", 64, 4, stream.ptr)]  # cudaMemcpyDefault
    there = gpu.open(gpu.export(mine))
    back = np.zeros(8, np.int64)
    gpu.copy(address(back), there, 64, stream)
    assert (back == page).all()
    assert ("hostRegister", address(page), 64, 1) in runtime.calls  # cudaHostRegisterPortable
    gpu.close(there)
    gpu.unpin(address(page))
    assert bytes(gpu.for_mpi(mine, 64)) == page.tobytes()
    gpu.free(mine)
    assert not runtime.memory


@pytest.mark.parametrize(
    ("function", "status", "error"),
    [
        ("malloc", 2, MemoryError),
        ("malloc", 700, CUDARuntimeError),
        ("hostRegister", 801, OSError),
        ("ipcGetMemHandle", 1, OSError),
        ("ipcOpenMemHandle", 400, OSError),
    ],
)
def test_what_cuda_refuses(runtime: Runtime, gpu: CudaDevice, function: str, status: int, error: type) -> None:
    runtime.fails = {function: status}
    calls = {
        "malloc": lambda: gpu.allocate(8),
        "hostRegister": lambda: gpu.pin(4096, 8),
        "ipcGetMemHandle": lambda: gpu.export(4096),
        "ipcOpenMemHandle": lambda: gpu.open(b"x" * 64),
    }
    with pytest.raises(error):
        calls[function]()


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_over_memory(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A torch tensor of any type is one over cupy's bytes; the rest of it is torch's own."""
    monkeypatch.setattr(torch, "as_tensor", lambda made, device: torch.from_numpy(made.host))
    dtype, owner = DTYPES[name], object()
    place = gpu.allocate(6 * dtype.itemsize)
    if dtype.torch is not None:
        made = gpu.array(place, (2, 3), dtype.torch, owner)
        assert (made.dtype, tuple(made.shape), made.data_ptr()) == (dtype.torch, (2, 3), place)
        assert gpu.array(place, (), dtype.torch, owner).shape == ()
    if name != "bfloat16":
        array = gpu.array(place, (2, 3), name, owner)
        assert (array.dtype, array.shape, array.data.ptr) == (np.dtype(name), (2, 3), place)
        assert (array.data.mem.owner, array.data.mem.device_id) == (owner, 1)


def test_a_kernel_is_made_once_and_launched_on_the_stream(gpu: CudaDevice) -> None:
    stream, op, dtype = gpu.stream(), Reduction("premul_sum", 0.5), DTYPES["float32"]
    for size in (0, 1000, 1000):
        gpu.combine(op, dtype, [4096, 8192], [4096], size, [0.5, 2.0], stream)
    (kernel,) = gpu._kernels.values()
    (grid, block, arguments, where), second = kernel.launched
    assert (grid, block, where) == ((1,), (256,), stream.ptr)
    assert [each.item() for each in arguments] == [4096, 8192, 4096, 0.5, 2.0, 0, 250, 1000]
    assert second[3] == stream.ptr


def test_an_object_that_goes_with_a_failed_gpu_is_silent(runtime: Runtime) -> None:
    runtime.live.add(5)
    runtime.fails = {"eventDestroy": 700, "streamDestroy": 700}
    CudaEvent(runtime, 5).__del__()
    CudaStream(runtime, 5, owned=True).__del__()


def test_the_fake_has_cupy_s_signatures() -> None:
    """Signatures are in the real one's docstrings: `name(type argument, ...) -> type`."""
    pytest.importorskip("cupy", reason="cupy is not installed")
    from cupy.cuda import Device, MemoryPointer, UnownedMemory, function, runtime
    from cupy.cuda import driver as cupy_driver

    assert Device  # what else the driver reaches is there
    for name, fake in inspect.getmembers(Runtime, inspect.isfunction):
        if name.startswith("_"):
            continue
        head = (getattr(runtime, name).__doc__ or "").splitlines()[0]
        listed = re.search(r"\((.*)\)", head)
        assert listed, name
        real = [part.split("=")[0].split()[-1] for part in listed[1].split(",") if part]
        assert real == list(inspect.signature(fake).parameters)[1:], name
    for name, value in vars(Runtime).items():
        if isinstance(value, int):
            assert getattr(runtime, name) == value, name
    assert (runtime.CUDARuntimeError(600).status, "NotReady" in str(runtime.CUDARuntimeError(600))) == (600, True)
    assert "CaptureImplicit" in str(runtime.CUDARuntimeError(906))
    assert cupy_driver.ctxGetCurrent
    assert issubclass(cupy_driver.CUDADriverError, RuntimeError)
    assert hasattr(runtime.PointerAttributes, "device")
    for kind, fake_kind in ((UnownedMemory, fake_cupy.UnownedMemory), (MemoryPointer, fake_cupy.MemoryPointer)):
        head = kind.__doc__.splitlines()[0]
        real = [part.split("=")[0].split()[-1] for part in head.partition("(")[2].rstrip(")").split(",")]
        assert real == list(inspect.signature(fake_kind).parameters), kind
    launcher = function.Function.__new__(function.Function)
    with pytest.raises(TypeError, match="strum"):
        launcher((1,), (1,), (), strum=None)
    with pytest.raises(AttributeError, match="ptr"):  # of the stream, of which it asks nothing else
        launcher((1,), (1,), (), stream=object())
