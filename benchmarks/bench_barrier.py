"""Times how the ranks of a node meet: by numbers in shared memory (collectives.memory.counters), and by MPI's barrier.

    mpirun -n 2 python benchmarks/bench_barrier.py

"barrier" is the time of one when all come at once. "late" is how long after the last rank, which comes 2 ms late, the
slowest one goes on. Microseconds, medians of --rounds, in each of which the two take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from mpi4py import MPI

import mpidl
from collectives.memory.counters import Barrier
from collectives.memory.shared_memory import Allocator
from collectives.process.topology import discover
from mpidl.cli import ArgumentParser, at_least

_LATE = 2e-3  # seconds


def time_of(meet: Callable[[], object], calls: int) -> float:
    """Microseconds a call, the first of which all ranks begin together."""
    meet()
    begin = time.perf_counter()
    for _ in range(calls):
        meet()
    return (time.perf_counter() - begin) / calls * 1e6


def time_after_the_last(meet: Callable[[], object], node: MPI.Intracomm) -> float:
    """Microseconds from when the last rank comes to when the slowest goes on."""
    node.Barrier()
    if node.rank == 0:
        time.sleep(_LATE)
    came = time.monotonic()
    meet()
    gone = time.monotonic()
    return (node.allreduce(gone, MPI.MAX) - node.allreduce(came, MPI.MAX)) * 1e6


def main() -> None:
    """Measures and prints."""
    comm = mpidl.init()
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=31, help="of which the medians are taken")
    parser.add_argument("--calls", type=at_least(1), default=1000, help="of a barrier in a round")
    options = parser.parse_on_all_ranks(lambda _: None)
    place = discover(comm.mpi, [])
    memory = Allocator(place.node).allocate(Barrier.nbytes(place.local_size), shared=True)
    if memory is None:
        raise SystemExit("the node has no room for shared memory")
    barrier = Barrier(
        memory, 0, place.local_rank, place.local_size, oversubscribed=place.oversubscribed, fence=place.node.Barrier
    )
    ways: dict[str, Callable[[], object]] = {"counters": barrier, "MPI": place.node.Barrier}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, meet in ways.items():
            found[name].append((time_of(meet, options.calls), time_after_the_last(meet, place.node)))
    if place.local_rank == 0:
        print(f"# {place.local_size} ranks{', more than cores' if place.oversubscribed else ''}")
        for name, pairs in found.items():
            at_once, late = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"{name:>10}: barrier {at_once:7.2f} us   late {late:7.1f} us", flush=True)


if __name__ == "__main__":
    main()
