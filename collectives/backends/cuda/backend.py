"""The backend of arrays on GPUs: one rank's operations there, as Tasks in the order of the caller's stream.

Arrays on a GPU use it instead of the backends of `backends.registry`: `group` chooses a transport by what the ranks'
GPUs and the MPI library can do, and calls the host's backends for the work on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import driver
from .device import Event, Stream
from .group import GpuGroup
from .host import Host
from .task import Compound, Enqueue, Task


class GpuBackend:
    """The operations of one group on GPU memory; each rank uses one GPU. host: the group's other side."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._group: GpuGroup | None = None
        self._branches: dict[int, Stream] = {}

    def prepare(self, operation: str, algorithm: str, arguments: tuple[Any, ...], index: int) -> Task:
        """The operation as a Task, to be issued again and again. index: of the GPU that the arrays are on."""
        made: list[Enqueue] = []

        def run(begin: Event) -> Event:
            group = self.group(index)
            if not made:
                made.append(group.prepare(operation, algorithm, arguments))
            return group.run(made[0], begin)

        return self._task(operation, index, run)

    def prepare_batches(self, operation: str, batches: Sequence[tuple[Any, ...]], index: int) -> Task:
        """All batches of a list of arrays as one operation; each: the arguments of `Dispatch.batch`."""
        return self._task(operation, index, lambda begin: self.group(index).run_batches(batches, begin))

    def compound(self, name: str, parts: Callable[[], None], index: int) -> Task:
        """Operations that are ordered as one among what a GPU does; see `Communicator.compound`."""
        return Compound(name, parts, lambda: self._branch(index), index)

    def group(self, index: int) -> GpuGroup:
        """The memory, streams and transports that the ranks have set up for their GPUs. Collective at first."""
        if self._group is None:
            with driver.open_device(index).current():
                self._group = GpuGroup(self._host, index)
        return self._group

    def takes_device_addresses(self, other: int) -> bool:
        """Returns whether the MPI library moves GPU memory to and from that rank, and nothing better serves."""
        return self._group is not None and self._group.transports.pairs[self._host.rank][other] == "aware"

    def stats(self) -> dict[str, Any] | None:
        """The transports in use, for `Communicator.stats`; None before they are set up."""
        if self._group is None:
            return None
        transports = self._group.transports
        return {
            "transports": list(transports.pairs[self._host.rank]),
            "transport": transports.common,
            "streams_wait": self._group.streams_wait,
        }

    def is_shared(self, address: int) -> bool:
        """Returns whether an array at this address lies in memory that is the same for all ranks."""
        return self._group is not None and self._group.is_shared(address)

    def close(self) -> None:
        """Gives back what the GPUs' drivers have given. Collective."""
        if self._group is not None:
            self._group.close()

    def _task(self, operation: str, index: int, run: Callable[[Event], Event]) -> Task:
        if self._group is not None:
            self._group.check(operation, index)

        def hold(end: Event, arrays: Any) -> None:
            self.group(index).hold(end, arrays)

        return Task(operation, run, hold, index)

    def _branch(self, index: int) -> Stream:
        """The stream on which the parts of compounds follow each other."""
        if index not in self._branches:
            self._branches[index] = driver.open_device(index).stream()
        return self._branches[index]
