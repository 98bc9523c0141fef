"""Compares the ranks' arguments before each operation, with MPIDL_DEBUG=1.

Where they differ all ranks raise the same MismatchError, and nothing is sent that no rank would receive. This costs a
message round more for each operation. What one rank alone can see is checked always, by `arguments`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..base.buffers import Buffer, DeviceBuffer
from ..base.partition import Splits
from ..base.reduction import Reduction
from ..errors import MismatchError
from ..process.topology import Topology, reported_ranks
from .backend import Call
from .cuda.task import Task
from .dispatch import Dispatch
from .meeting import UNEVEN, check_parts, differences

DEBUG = "MPIDL_DEBUG"


def is_debugging() -> bool:
    """Returns whether the environment asks for checks."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


class Signature(NamedTuple):
    """The operation that a rank is about to run, in words that can be compared."""

    number: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"operation {self.number}, {self.operation}{self.what}"


class CheckedDispatch(Dispatch):
    """A Dispatch whose ranks compare signatures first, whatever the operation and the backend."""

    def __init__(
        self, comm: MPI.Intracomm, topology: Topology, owned_comms: list[MPI.Intracomm], *, use_scratch: bool = True
    ) -> None:
        self._number = 0
        super().__init__(comm, topology, owned_comms, use_scratch=use_scratch)

    def prepare(self, operation: str, algorithm: str, *arguments: Any) -> Call | Task:
        """Implements `Dispatch.prepare`; what the host does of a Task is compared once more, part by part."""
        made = super().prepare(operation, algorithm, *arguments)
        if isinstance(made, Task):
            return made.after(partial(self.announce, operation, _words_on_gpu(operation, algorithm, arguments)))
        return made

    def call(self, operation: str, algorithm: str, arguments: Sequence[Any]) -> Call:
        """Implements `Dispatch.call`."""
        call = super().call(operation, algorithm, arguments)
        words = _words(operation, algorithm, arguments)
        splits = [given for given in arguments if isinstance(given, Splits)]

        def checked() -> None:
            self.announce(operation, words)
            for own in splits:
                self._compare_splits(operation, own)
            call()

        return checked

    def partitioned(self, parts: Sequence[Buffer], op: Reduction) -> None:
        """Implements `Dispatch.partitioned`; one by one, so that each is compared."""
        self.announce("partitioned_all_reduce", f" {op.name} of {len(parts)} arrays")

    def announce(self, operation: str, what: str = "") -> None:
        """Raises MismatchError on all ranks unless all announce the same."""
        self._number += 1
        signatures: list[Any] = self.comm.allgather(Signature(self._number, operation, what))
        if any(signature != signatures[0] for signature in signatures):
            raise MismatchError(differences(signatures, reported_ranks(self.comm)))

    def _compare_splits(self, operation: str, own: Splits) -> None:
        """Raises MismatchError on all ranks unless each pair of ranks agrees on the elements between them."""
        cuts = self.comm.allgather(own)
        given, taken = np.array([cut.send_counts for cut in cuts]), np.array([cut.recv_counts for cut in cuts]).T
        check_parts(operation, given, taken, reported_ranks(self.comm))


def _words(operation: str, algorithm: str, arguments: Sequence[Any]) -> str:
    """Describes what must be the same on all ranks: " sum of 4 float32 to root 1 by ring"."""
    arrays = [given for given in arguments if isinstance(given, Buffer)]
    if not arrays:
        return ""
    largest = max(data.size for data in arrays)  # the same on all ranks, but where each cuts its own way, or has a part
    elements = "" if operation in UNEVEN else f"{largest} "
    operator = parts = root = ""
    for given in arguments:
        if isinstance(given, Reduction):
            operator = f" {given.name}"
        elif isinstance(given, Sequence):
            parts = f" in parts of {list(given)}"
        elif isinstance(given, int):
            root = f" {'from' if operation in ('broadcast', 'scatter') else 'to'} root {given}"
    return f"{operator} of {elements}{arrays[0].dtype.name}{parts}{root} by {algorithm}"


def _words_on_gpu(operation: str, algorithm: str, arguments: Sequence[Any]) -> str:
    """Describes an operation on GPU memory: " of 4 float32 on a GPU with sum by auto"."""
    data = next(given for given in arguments if isinstance(given, DeviceBuffer))
    elements = f"{data.size} " if operation in ("all_reduce", "reduce", "broadcast") else ""
    others = [given.name if isinstance(given, Reduction) else given for given in arguments]
    told = ", ".join(str(given) for given in others if isinstance(given, (str, int, list)))
    return f" of {elements}{data.dtype.name} on a GPU{' with ' + told if told else ''} by {algorithm}"
