"""The memory that tensors lie in, the host's or that of one GPU, and what differs by it.

On the host, work is done when its call returns. On a GPU it is queued on streams, and what uses a tensor on another
stream, in another process or on the host has to be ordered after it. Code for tensors of either kind asks their Place
for that, and knows of no GPU itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from .backends.cuda import driver
from .backends.cuda.arrays import gpu_index
from .backends.cuda.copies import Arrival, Copies, GpuCopies
from .backends.cuda.device import Stream
from .backends.cuda.pages import DevicePages
from .backends.cuda.task import refuse_capture
from .memory.pages import Pages

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = [
    "HOST",
    "Arrival",
    "Copies",
    "DevicePages",
    "GpuPlace",
    "Pages",
    "Place",
    "place_at",
    "select_gpu",
    "unusable_reason",
]


class Place:
    """The host's memory: there is nothing to wait for, to order or to keep. device: as torch has it.

    is_asynchronous: work is queued, and the host may be ahead of it.
    keeps_freed: freed memory is kept for the next allocation; else it may come back from the system page by page.
    """

    device = torch.device("cpu")
    is_asynchronous = False
    keeps_freed = False

    def stream(self) -> Stream | None:
        """torch's current stream in this thread; equal to others of the same one."""
        return None

    def wait_for_streams(self, streams: Collection[Stream | None]) -> None:
        """Makes the current stream wait for what these streams hold."""

    def make_wait(self, stream: Stream | None) -> None:
        """Makes another stream wait for what the current one holds."""

    def synchronize(self) -> None:
        """Blocks the host until all that the current stream holds is done, so that other processes see it."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Records that the current stream uses the tensor's memory: if freed, it is not reused before."""

    def refuse_capture(self, what: str) -> None:
        """Raises ArgumentError while a CUDA graph is captured. what: that cannot be in one."""

    def is_same_for_all(self, comm: Communicator) -> bool:
        """Returns whether all ranks have their memory in the same host, or on the same GPU. Collective."""
        return comm.nodes == 1

    def with_own_storage(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor over the memory of a flat one whose storage holds only it, so that its storage has its size."""
        if part.numel() == 0:
            return torch.empty(0, dtype=part.dtype, device=part.device)
        return torch.from_numpy(part.view(torch.uint8).numpy()).view(part.dtype)

    def copies(self) -> Copies:
        """Makes the queue of copies between this memory and the host's."""
        return Copies()


class GpuPlace(Place):
    """The memory of one GPU. index: its number in this process."""

    is_asynchronous = True
    keeps_freed = True  # torch's allocator does

    def __init__(self, index: int) -> None:
        self.device = torch.device(driver.TORCH, index)
        self._gpu = driver.open_device(index)

    def stream(self) -> Stream:
        """Implements `Place.stream`."""
        return self._gpu.torch_stream()

    def wait_for_streams(self, streams: Collection[Stream | None]) -> None:
        """Implements `Place.wait_for_streams`."""
        with self._gpu.current():
            current = self._gpu.torch_stream()
            for stream in streams:
                if stream is not None and stream != current:
                    current.wait(stream.record())

    def make_wait(self, stream: Stream | None) -> None:
        """Implements `Place.make_wait`."""
        with self._gpu.current():
            current = self._gpu.torch_stream()
            if stream is not None and stream != current:
                stream.wait(current.record())

    def synchronize(self) -> None:
        """Implements `Place.synchronize`: waits for the work in the current stream."""
        with self._gpu.current():
            self._gpu.torch_stream().record().wait()

    def record_use(self, tensor: torch.Tensor) -> None:
        """Implements `Place.record_use`."""
        self._gpu.keep(tensor)

    def refuse_capture(self, what: str) -> None:
        """Implements `Place.refuse_capture`."""
        with self._gpu.current():
            refuse_capture(self._gpu.torch_stream(), what)

    def is_same_for_all(self, comm: Communicator) -> bool:
        """Implements `Place.is_same_for_all`."""
        return comm.nodes == 1 and len(set(comm.mpi.allgather(self._gpu.identity()))) == 1

    def with_own_storage(self, part: torch.Tensor) -> torch.Tensor:
        """Implements `Place.with_own_storage`."""
        with self._gpu.current():
            made: torch.Tensor = self._gpu.array(part.data_ptr(), tuple(part.shape), part.dtype, part)
        return made

    def copies(self) -> Copies:
        """Implements `Place.copies`."""
        return GpuCopies(self._gpu)


HOST = Place()


def place_at(device: Any) -> Place:
    """The Place of a device, as torch has it. Raises ArgumentError where it is a GPU that cannot be used."""
    index = gpu_index("device", device)
    return HOST if index is None else GpuPlace(index)


def unusable_reason() -> str:
    """The reason why torch tensors on GPUs cannot be used here; empty if they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
    return driver.unusable_reason()


def select_gpu(local_rank: int) -> torch.device:
    """Makes a GPU torch's current one and returns it; the ranks of a host use the visible GPUs in turn."""
    device = torch.device(driver.TORCH, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
