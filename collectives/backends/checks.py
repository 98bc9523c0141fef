"""With MPIDL_DEBUG=1: before an operation the ranks compare what they are about to do.

Where that differs the same MismatchError comes on all of them, and nothing is sent that nobody takes. It costs a
message round more for each operation. What one rank alone can see is checked always, by `arguments`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from ..buffers import Buffer, DeviceBuffer, DType
from ..cuda.memory import DeviceMemory
from ..cuda.task import Task
from ..errors import MismatchError
from ..partition import Splits
from ..reduction import Reduction
from ..symmetric.meeting import differences
from ..symmetric.shared_memory import SharedMemory
from ..topology import Topology
from .dispatch import Dispatch

DEBUG = "MPIDL_DEBUG"


def wanted() -> bool:
    """Whether the environment asks for checks."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


class Signature(NamedTuple):
    """What a rank is about to do, in words that can be compared."""

    number: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"operation {self.number}, {self.operation}{self.what}"


class CheckedDispatch(Dispatch):
    """A Dispatch whose ranks compare signatures first."""

    def __init__(self, comm: MPI.Intracomm, place: Topology, made: list[MPI.Intracomm]) -> None:
        super().__init__(comm, place, made)
        self._number = 0

    def prepare(self, operation: str, algorithm: str, *arguments: Any) -> Callable[[], None] | Task:
        """See Dispatch."""
        if any(isinstance(given, DeviceBuffer) for given in arguments):
            return super().prepare(operation, algorithm, *arguments)
        return partial(getattr(self, operation), algorithm, *arguments)

    def _before(self, operation: str, algorithm: str, arguments: tuple[Any, ...]) -> None:
        """See Dispatch; what the host does of it is compared once more, part by part."""
        data = next(given for given in arguments if isinstance(given, DeviceBuffer))
        elements = f"{data.size} " if operation in ("all_reduce", "reduce", "broadcast") else ""
        others = [given.name if isinstance(given, Reduction) else given for given in arguments]
        alike = [str(given) for given in others if isinstance(given, (str, int, list))]
        told = f" with {', '.join(alike)}" if alike else ""
        self._compare(operation, f" of {elements}{data.dtype.name} on a GPU{told} by {algorithm}")

    def all_reduce(self, algorithm: str, x: Buffer, op: Reduction) -> None:
        """See Dispatch."""
        self._compare("all_reduce", f" {op.name} of {_array(x)} by {algorithm}")
        super().all_reduce(algorithm, x, op)

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> None:
        """See Dispatch; one by one, so that each is compared."""
        self._compare("partitioned_all_reduce", f" {op.name} of {len(parts)} arrays")

    def reduce_scatter(self, algorithm: str, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> None:
        """See Dispatch."""
        self._compare("reduce_scatter", f" {op.name} of {_array(x)} in parts of {list(counts)} by {algorithm}")
        super().reduce_scatter(algorithm, out, x, op, counts)

    def reduce(self, algorithm: str, x: Buffer, root: int, op: Reduction) -> None:
        """See Dispatch."""
        self._compare("reduce", f" {op.name} of {_array(x)} to root {root} by {algorithm}")
        super().reduce(algorithm, x, root, op)

    def all_gather(self, algorithm: str, out: Buffer, x: Buffer, counts: Sequence[int]) -> None:
        """See Dispatch."""
        self._compare("all_gather", f" of {_array(out)} in parts of {list(counts)} by {algorithm}")
        super().all_gather(algorithm, out, x, counts)

    def all_to_all(self, algorithm: str, out: Buffer, x: Buffer, splits: Splits) -> None:
        """See Dispatch."""
        self._compare("all_to_all", f" of {x.dtype.name} by {algorithm}")
        cuts = self.comm.allgather(splits)
        for giver in range(self.size):
            for taker in range(self.size):
                given, taken = cuts[giver].leaving[taker], cuts[taker].coming[giver]
                if given != taken:
                    raise MismatchError(
                        f"all_to_all: rank {giver} gives {given} elements to rank {taker}, which takes {taken}"
                    )
        super().all_to_all(algorithm, out, x, splits)

    def broadcast(self, algorithm: str, x: Buffer, root: int) -> None:
        """See Dispatch."""
        self._compare("broadcast", f" of {_array(x)} from root {root} by {algorithm}")
        super().broadcast(algorithm, x, root)

    def gather(self, algorithm: str, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> None:
        """See Dispatch."""
        self._compare("gather", f" of {x.dtype.name} in parts of {list(counts)} to root {root} by {algorithm}")
        super().gather(algorithm, out, x, root, counts)

    def scatter(self, algorithm: str, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> None:
        """See Dispatch."""
        self._compare("scatter", f" of {out.dtype.name} in parts of {list(counts)} from root {root} by {algorithm}")
        super().scatter(algorithm, out, x, root, counts)

    def barrier(self) -> None:
        """See Dispatch."""
        self._compare("barrier", "")
        super().barrier()

    def split(self, color: int, key: int) -> MPI.Comm:
        """See Dispatch."""
        self._compare("split", "")
        return super().split(color, key)

    def allocate(self, nbytes: int, dtype: DType, *, shared: bool, reserved: bool = True) -> SharedMemory | None:
        """See Dispatch."""
        self._compare(("shared" if shared else "empty") if reserved else "pages", f" of {dtype.name}")
        return super().allocate(nbytes, dtype, shared=shared, reserved=reserved)

    def allocate_on_gpu(self, index: int, nbytes: int, dtype: DType, *, shared: bool) -> DeviceMemory:
        """See Dispatch."""
        self._compare("shared" if shared else "empty", f" of {dtype.name} on a GPU")
        return super().allocate_on_gpu(index, nbytes, dtype, shared=shared)

    def _compare(self, operation: str, what: str) -> None:
        self._number += 1
        signatures: list[Any] = self.comm.allgather(Signature(self._number, operation, what))
        if any(signature != signatures[0] for signature in signatures):
            raise MismatchError(differences(signatures))


def _array(data: Buffer) -> str:
    return f"{data.size} {data.dtype.name}"
