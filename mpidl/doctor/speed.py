"""Measures speeds for a second: copies of memory, the all-reduce of the whole job, and the links between nodes.

Copies are the measure of everything else: all ranks copy at once, each its own memory, so that what the ranks share,
cores and memory channels, is shared in the reference too.

    an all-reduce of n bytes inside a node    each rank reads n bytes of its peers' and writes n, as a copy of n does
    a link between two nodes                  n bytes there and back between the nodes' first ranks, while others wait

Every rank runs the same measurements in the same order; the ranks agree after each repetition whether another follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives import Communicator

_BYTES = 16 << 20
_BUDGET = 0.25  # seconds of each measurement
_LINK_BYTES = 2 << 20


def measure(comm: Communicator, hosts: Sequence[str]) -> dict[str, Any]:
    """Bytes a second of copies and of all-reduces, and for each further node its link. Collective. hosts: of each rank.

    copy: the slowest rank's.
    all-reduces: n bytes over the time.
    links: by host, bytes a second in one direction, and the seconds that a short message takes.
    """
    source, target = np.ones(_BYTES // 4, np.float32), np.empty(_BYTES // 4, np.float32)
    nodes = list(dict.fromkeys(hosts))
    within = comm.split(nodes.index(hosts[comm.rank]))
    assert within is not None
    x = within.empty(_BYTES // 4, np.float32)
    x[:] = 0.0
    copy = _seconds(comm, lambda: np.copyto(target, source))
    reduced = _seconds(comm, lambda: within.all_reduce(x)) if comm.size > len(nodes) else None
    target[:] = 0.0
    everywhere = _seconds(comm, lambda: comm.all_reduce(target)) if len(nodes) > 1 else None
    links = {host: _link(comm, hosts.index(host)) for host in nodes[1:]}
    within.close()
    return {
        "copy": _BYTES / copy,
        "all_reduce_on_a_node": None if reduced is None else _BYTES / reduced,
        "all_reduce_over_nodes": None if everywhere is None else _BYTES / everywhere,
        "links": links,
    }


def _link(comm: Communicator, other: int) -> dict[str, float]:
    """Measures messages from rank 0 to another and back. Collective, as all must know the times."""
    found = {}
    for name, nbytes in (("latency", 8), ("bytes_per_second", _LINK_BYTES)):
        data = np.zeros(nbytes, np.uint8)

        def exchange(data: np.ndarray[Any, Any] = data) -> None:
            if comm.rank == 0:
                comm.send(data, other)
                comm.recv(data, other)
            elif comm.rank == other:
                comm.recv(data, 0)
                comm.send(data, 0)

        one_way = _seconds(comm, exchange) / 2
        found[name] = one_way if name == "latency" else nbytes / one_way
    return found


def _seconds(comm: Communicator, call: Callable[[], Any]) -> float:
    """The median over repetitions of the slowest rank's seconds. Collective."""
    call()
    times: list[float] = []
    another, spent = np.ones(1), 0.0
    while another[0]:
        comm.barrier()
        start = time.perf_counter()
        call()
        slowest = np.array([time.perf_counter() - start])
        comm.all_reduce(slowest, "max")
        times.append(float(slowest[0]))
        spent += times[-1]
        another[0] = len(times) < 5 or (spent < _BUDGET and len(times) < 100)
    return float(np.median(times))
