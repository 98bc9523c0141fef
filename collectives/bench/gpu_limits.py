"""GPUs for the benchmarks: one for each rank, a clock of its events, the transports as groups of ranks, and the limit.

    limit of an operation   the bytes that all ranks on a GPU read and write in it if none is copied twice,
                            by what a copy inside that GPU reads and writes a second while the other ranks are idle

It is a limit of memory alone: where ranks have a GPU each, what joins the GPUs may be slower.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..backends.cuda import driver
from ..backends.cuda.transports import TRANSPORTS, VARIABLE
from ..communicator import Communicator
from ..devices import select_gpu
from ..errors import ArgumentError
from ..timing import Clock
from .operations import OPERATIONS

_COPY_BYTES = 256 << 20
_COPIES = 20
_LARGE = 256_000_000  # bytes from which on the bounds hold
# (transport, buffer): at least so much of the limit, and so many times as fast as gloo.
BOUNDS = {("ipc", "symmetric"): (0.6, 10.0), ("staged", "user"): (None, 2.0)}


def moved_bytes(op: str, nbytes: int, ranks: int) -> int | None:
    """Bytes that a rank reads and writes in an operation that copies nothing twice. nbytes: of the larger buffer."""
    written = {"all_reduce": nbytes, "reduce_scatter": nbytes // ranks, "all_to_all": nbytes}.get(op)
    return None if written is None else nbytes + written


class EventClock(Clock):
    """Clock between two events on the current stream, once all work before is done and the caches hold other data.

    l2_bytes: of the cache that this rank is to fill; 0 where another rank on the same GPU does.
    """

    def __init__(self, l2_bytes: int) -> None:
        self._other = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")

    def ready(self) -> None:
        """Implements `Clock.ready`."""
        if self._other.numel():
            self._other.zero_()
        torch.cuda.synchronize()

    def seconds(self, call: Any) -> float:
        """Implements `Clock.seconds`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3  # milliseconds


class Gpu:
    """The GPU of this rank: they take the host's in turn. Collective.

    sharing: how many ranks are on it.
    own: whether every rank has one to itself.
    l2_bytes: of its cache.
    """

    def __init__(self, comm: Communicator) -> None:
        device = select_gpu(comm.local_rank)
        self.index, self.device = device.index, str(device)
        here = platform.node(), driver.open_device(self.index).identity()
        everyone = comm.all_gather_object(here)
        self.sharing, self._turn = everyone.count(here), everyone[: comm.rank].count(here)
        self.own = len(set(everyone)) == comm.size
        found = torch.cuda.get_device_properties(self.index)
        self.name, self.l2_bytes = found.name, int(getattr(found, "L2_cache_size", 0)) or 128 << 20
        self.clock = EventClock(0 if self._turn else self.l2_bytes)

    def copy_bandwidth(self, comm: Communicator) -> float:
        """Bytes that a copy inside the GPU reads and writes a second, alone; that of the fastest GPU. Collective."""
        found = np.zeros(1)
        if self._turn == 0:
            size = max(_COPY_BYTES, 2 * self.l2_bytes)
            source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
            times = []
            for _ in range(_COPIES):
                self.clock.ready()
                times.append(self.clock.seconds(lambda: target.copy_(source)))
            found[0] = 2 * size / float(np.median(times[_COPIES // 4 :]))
        comm.all_reduce(found, "max")  # which the other ranks wait for
        return float(found[0])

    def synchronize(self) -> None:
        """Waits for what this rank has queued."""
        torch.cuda.synchronize()

    def used_mib(self) -> float:
        """Memory in use on the GPU, by all ranks there, as a share of one of them."""
        free, total = torch.cuda.mem_get_info(self.index)
        return (total - free) / 2**20 / self.sharing


@contextmanager
def by_transport(transport: str) -> Iterator[None]:
    """Inside, groups take this transport at their first operation on GPU memory."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = transport
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def groups(comm: Communicator, transports: Sequence[str], device: str) -> dict[str, Communicator]:
    """Makes a group of all ranks for each of the transports that works between all of them. Collective."""
    made = {}
    for transport in transports:
        if transport in TRANSPORTS:
            group = comm.duplicate()
            try:
                with by_transport(transport):
                    group.all_reduce(torch.ones(1, device=device))
            except ArgumentError:  # on all ranks
                continue
            made[transport] = group
    return made


def limit_lines(rows: Sequence[Any]) -> list[str]:
    """Formats a line for each transport and kind of arrays: against the limit and gloo, and the bounds kept or missed.

    rows: those of one operation and size; of an operation that comes in both forms the usual one counts.
    """
    rows = [row for row in rows if row.place == OPERATIONS[row.op].usual]
    gloo = next((row.time_us for row in rows if row.algorithm == "gloo"), None)
    lines = []
    for row in rows:
        if row.algorithm not in TRANSPORTS:
            continue
        bounds = BOUNDS.get((row.algorithm, row.buffer), (None, None)) if row.op == "all_reduce" else (None, None)
        parts = []
        for value, text, least in (
            (row.limit_us / row.time_us if row.limit_us else None, "{:.2f} of the limit", bounds[0]),
            (gloo / row.time_us if gloo else None, "{:.1f} x gloo", bounds[1]),
        ):
            if value is not None:
                parts.append(text.format(value))
                if least is not None and row.bytes >= _LARGE:
                    parts[-1] += f" (at least {least:g}: {'kept' if value >= least else 'MISSED'})"
        what = f"{row.op} of {row.bytes >> 20} MiB of {row.dtype}"
        if parts:
            lines.append(f"# {what}, {row.algorithm}, {row.buffer} arrays: {', '.join(parts)}")
    return lines
