"""Memory of a measurement's arrays, the host's or a GPU's, and what depends on it: speed, clock, groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.symmetric.backend import Symmetric
from ..communicator import Communicator
from ..timing import Clock
from . import gpu_limits

KERNEL = "kernel"  # the side in which the kernel copies from array to array


@dataclass
class BenchDevice:
    """The CPU, or with `of_gpu` this rank's GPU.

    name: as torch has it.
    synchronize: waits for queued work.
    groups: on a GPU, by their transport; on the CPU, by the name of a side that needs one.
    nccl: a group of torch.distributed, or None.
    sharing: ranks on a GPU.
    bandwidth: of a copy there, bytes read and written a second.
    """

    name: str = "cpu"
    clock: Clock = field(default_factory=Clock)
    synchronize: Callable[[], None] = lambda: None
    groups: dict[str, Communicator] = field(default_factory=dict)
    nccl: Any = None
    sharing: int = 1
    bandwidth: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Returns whether it is a GPU."""
        return self.bandwidth is not None

    @classmethod
    def of_cpu(cls, comm: Communicator, sides: Sequence[str]) -> BenchDevice:
        """Makes it, with the group of `KERNEL` if that is asked for and the kernel lets ranks do it. Collective."""
        if KERNEL not in sides:
            return cls()
        group = Communicator(comm.mpi, scratch=False)
        backend = group._dispatch.backends.get("symmetric")
        reaches = isinstance(backend, Symmetric) and backend.reaches_arrays
        return cls(groups={KERNEL: group} if reaches else {})

    @classmethod
    def of_gpu(cls, comm: Communicator, sides: Sequence[str]) -> BenchDevice:
        """Makes it, with what these sides need. Collective."""
        gpu = gpu_limits.Gpu(comm)
        groups = gpu_limits.groups(comm, sides, gpu.device)
        nccl = None
        if "nccl" in sides and gpu.own and comm.size > 1:
            from .peers import nccl_group

            nccl = nccl_group()
        return cls(gpu.device, gpu.clock, gpu.synchronize, groups, nccl, gpu.sharing, gpu.copy_bandwidth(comm))

    def limit(self, op: str, nbytes: int, ranks: int) -> float | None:
        """Seconds that the memory needs at least. nbytes: of the operation's whole array."""
        moved = gpu_limits.moved_bytes(op, nbytes, ranks)
        return None if moved is None or self.bandwidth is None else moved * self.sharing / self.bandwidth
