"""The ipc transport: the host's one-copy collectives, on GPU memory that all ranks of the node map (`memory`).

They are the host's own (`backends.symmetric`), in which three things are replaced:

    on the host                      here
    symmetric memory of the node     GPU memory that all ranks map (`memory`)
    a processor that copies, adds    one that queues copies and kernels on a stream
    a barrier of the ranks           a barrier of their streams (`barrier`): all that any rank has queued before it
                                     runs before what this rank queues after it

Where each rank has a GPU, the host queues an operation and goes on.

A GPU runs the kernels of one process at a time, and to switch to another process takes 0.15 ms. So where all ranks of
the node are on one GPU, one of them, the leader, reduces for all, and copies for all between symmetric arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...base.buffers import DType, address
from ...base.reduction import PREFIXES, BoundCall, Reduction
from ...process.topology import reported_ranks
from ..meeting import Meetings
from ..symmetric.backend import Symmetric
from ..symmetric.processor import Processor
from .barrier import StreamBarrier
from .device import Device, Event, Stream
from .host import Host
from .memory import DeviceAllocator
from .task import Enqueue

Array = np.ndarray[Any, Any]
CHUNK_BYTES = 32 << 20  # so large that the ranks' meetings cost little compared with the copies


class GpuProcessor(Processor):
    """Queues on a stream of a GPU. leader: as of Processor."""

    def __init__(self, device: Device, stream: Stream, leader: int | None) -> None:
        super().__init__(CHUNK_BYTES, leader)
        self._device, self._stream = device, stream

    def copy(self, target: Array, source: Array) -> None:
        """Implements `Processor.copy`."""
        self._device.copy(address(target), address(source), source.nbytes, self._stream)

    def calls(
        self,
        op: Reduction,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: DType,
        factors: Sequence[float],
    ) -> list[BoundCall]:
        """Implements `Processor.calls`. One kernel, for all inputs and outputs."""
        size = inputs[0].size
        if not size or not outputs:
            return []
        places = [address(array) for array in inputs], [address(array) for array in outputs]
        return [(self._device.combine, (op, dtype, *places, size, list(factors), self._stream))]


class Ipc:
    """The one-copy operations of one group whose ranks map each other's GPU memory. Collective.

    Raises MemoryError where the node's ranks have no memory to meet in.
    """

    def __init__(self, host: Host, device: Device, allocator: DeviceAllocator) -> None:
        topology = host.topology
        self._stream = device.stream()
        rows = host.allocator.allocate(Meetings.nbytes(topology.local_size), shared=True)
        if rows is None:
            raise MemoryError("the node has no room for a page of shared memory")
        gpus = set(topology.node.allgather(device.identity()))
        self._barrier = StreamBarrier(
            device, self._stream, topology.node, allocator, shared=len(gpus) < topology.local_size
        )
        meetings = Meetings(rows, 0, topology.local_rank, reported_ranks(topology.node), self._barrier)
        processor = GpuProcessor(device, self._stream, 0 if len(gpus) == 1 < topology.local_size else None)
        self._symmetric = Symmetric(meetings, allocator, processor=processor)

    @property
    def streams_wait(self) -> bool:
        """Tells if the streams of the ranks' GPUs wait for each other, and not the hosts."""
        return self._barrier.on_gpu

    def serves(self, operation: str, algorithm: str) -> bool:
        """Implements `Transport.serves`."""
        serves = self._symmetric.serves(operation) and operation not in PREFIXES  # the leader would reduce for all
        return serves and algorithm in ("auto", Symmetric.name)

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> Enqueue:
        """Implements `Transport.prepare`."""
        return partial(self._run, getattr(self._symmetric, operation)(*arguments))

    def _run(self, call: Callable[[], None], begin: Event) -> Event:
        self._stream.wait(begin)
        call()
        return self._stream.record()

    def close(self) -> None:
        """Implements `Transport.close`."""
        self._barrier.close()
