"""The interface of a GPU and its driver. `driver` answers with CUDA; a test may answer with threads and files.

Addresses are integers. Those of GPU memory mean nothing to the host, which reaches it by `copy` alone. Work is queued
on streams: what is queued on one runs in order, and events order streams among each other and before the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...base.buffers import DType
from ...base.reduction import Reduction
from ...process.about import cuda_aware


class Event(ABC):
    """A place in a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until all that was queued before is done."""

    @abstractmethod
    def is_done(self) -> bool:
        """Returns whether that work is done; never blocks."""


class SharedEvent(ABC):
    """A place in a stream for which streams of other processes of this host can wait. handle: lets them open it."""

    handle: bytes

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Moves the event to the end of the stream's queue. Waits that were queued before keep its former place."""

    @abstractmethod
    def close(self) -> None:
        """Frees the event, once no other process uses it; without this call it is never freed."""


class Stream(ABC):
    """A queue of work on a GPU."""

    @abstractmethod
    def record(self) -> Event:
        """The end of what is queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes the stream wait for the event; the host does not wait."""

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """Returns whether a CUDA graph is being made of what is queued, which then does not run."""


class Device(ABC):
    """One GPU, as this process sees it. index: its number in this process."""

    index: int

    @abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """Context in which this thread works on this GPU."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream, which waits for no other by itself."""

    @abstractmethod
    def stream_of(self, array: Any) -> Stream:
        """The current stream of the library that an array is of, in this thread."""

    @abstractmethod
    def torch_stream(self) -> Stream:
        """torch's current stream in this thread. Equal to others of the same stream."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which it is torch's current stream in this thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until all that was queued here by this process is done."""

    # ---- work on a stream -------------------------------------------------------------------------------------

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queues a copy between any two of GPU memory and pinned host memory."""

    @abstractmethod
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
        """Queues outputs[i] = inputs[0] (op) inputs[1] (op) ..., as `Reduction.combine`, in one pass.

        size: elements of each array. An output may be the memory of an input; for a partial reduction too, unless the
        elements' type is not that which is accumulated in.
        """

    @abstractmethod
    def finish(
        self, op: Reduction, dtype: DType, accumulated: int, out: int, size: int, ranks: int, stream: Stream
    ) -> None:
        """Queues out = the complete reduction, as `Reduction.finish`, of `ranks` contributions.

        dtype: of out; what is accumulated is in the one of its `accumulate`. Where these are the same, so may be the
        memory.
        """

    # ---- memory -----------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of new memory of this GPU. Raises MemoryError."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Frees the memory."""

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of the host, uint8. It must live until what was queued on it is done."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> None:
        """Pins the pages of host memory, so that copies run asynchronously. Raises OSError."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Unpins the pages."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """The handle by which other processes of this host open memory from `allocate`."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """The address under which this process reaches memory that another one has exported. Raises OSError."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Unmaps memory that `open` mapped."""

    @abstractmethod
    def shared_event(self) -> SharedEvent:
        """Makes an event that has already passed. Raises OSError."""

    @abstractmethod
    def open_event(self, handle: bytes) -> Event:
        """Opens another process's event; a wait refers to its record at the time of the call. Raises OSError."""

    @abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """An array over memory that exists, keeping `owner` alive: a torch tensor for a torch dtype, else cupy's."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> None:
        """Lets torch's allocator know that torch's current stream uses a tensor's memory."""

    @abstractmethod
    def identity(self) -> str:
        """The name of this GPU, the same in all processes of the host."""

    def is_mpi_aware(self) -> bool:
        """Returns whether the MPI library says that it takes memory of this GPU; it may be wrong."""
        return bool(cuda_aware())

    @abstractmethod
    def for_mpi(self, address: int, nbytes: int) -> Any:
        """Memory of this GPU as a buffer that an MPI library which is aware of GPUs takes."""
