"""Times operations on any arrays of one node by each way, on arrays that the program has just written.

    mpirun -n 4 python benchmarks/bench_any_arrays.py

A rank writes its array, runs the operation and reads the result: a core that has just written an array has it in its
cache, from which the others must take it. A loop of the operation alone finds each slice where the last one has left
it, in the cache of the core that reduces it, which no program does.

"direct": the kernel's copies at every size. "auto": what the communicator takes. "MPI": the library's own. "copies":
writing and reading alone. Microseconds without those, the slowest rank's, medians of rounds in which all take turns.

First come the copies that decide: of 256 KiB in a core's own cache, of what another core has just written, and onto
what another has just read, by all ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpidl
from collectives import Communicator
from collectives.backends.symmetric import backend
from collectives.backends.symmetric.group import StagedSizes
from collectives.memory.shared_memory import Allocator
from collectives.process.topology import discover
from mpidl.cli import ArgumentParser, at_least

_SECONDS = 2e-3  # of a repetition
_COPY_BYTES = 256 << 10
Call = Callable[[], Any]


def handover(comm: Communicator, rounds: int) -> tuple[float, float, float]:
    """10^9 bytes a second of copies: own memory, what the next rank has written, onto what the one before has read."""
    memory = Allocator(discover(comm.mpi, []).node).allocate(_COPY_BYTES)
    if memory is None:
        raise SystemExit("the node has no room for shared memory")
    size, dtype = _COPY_BYTES // 4, np.dtype(np.float32)
    given, taken = memory.view(comm.rank, 0, size, dtype), memory.view((comm.rank + 1) % comm.size, 0, size, dtype)
    own, times = np.ones(size, np.float32), np.zeros((rounds, 3))
    for row in times:
        for column, (target, source) in ((2, (given, own)), (1, (own, taken)), (0, (own, taken))):
            if column:
                comm.barrier()
            begin = time.perf_counter()
            np.copyto(target, source)
            row[column] = time.perf_counter() - begin
    own_speed, read, written = (_COPY_BYTES / np.median(times[1:], axis=0) / 1e9).tolist()
    return own_speed, read, written


def call_of(comm: Communicator | None, algorithm: str, operation: str, nbytes: int) -> Call:
    """A call that writes the operation's array, runs it and reads the result. comm: None for MPI's own."""
    world = MPI.COMM_WORLD
    whole, part = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4 // world.size, np.float32)
    x, out = {"all_reduce": (whole, whole), "reduce_scatter": (whole, part), "all_gather": (part, whole)}[operation]
    if comm is None:
        run: Call = {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, x),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, out),
            "all_gather": lambda: world.Allgather(x, out),
        }[operation]
    else:
        arrays = (x,) if operation == "all_reduce" else (out, x)
        run = comm.prepare(operation, *arrays, algorithm=algorithm)
    return fresh(run, x, out)


def fresh(run: Call, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> Call:
    """The call between the program's own writing and reading."""
    source, target = np.zeros_like(x), np.empty_like(out)

    def call() -> None:
        np.copyto(x, source)
        run()
        np.copyto(target, out)

    return call


def times_of(calls: dict[str, Call], comm: Communicator, rounds: int) -> dict[str, float]:
    """Microseconds of each call without what "copies" takes."""
    counts = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        taken = np.array([time.perf_counter() - begin])
        comm.all_reduce(taken, "max")
        counts[name] = max(1, min(500, int(_SECONDS / taken[0])))
    times = np.zeros((rounds, len(calls)))
    for row in times:
        for place, (name, call) in enumerate(calls.items()):
            call()
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(counts[name]):
                call()
            row[place] = (time.perf_counter() - begin) / counts[name]
    comm.all_reduce(times, "max")
    medians = dict(zip(calls, (np.median(times, axis=0) * 1e6).tolist(), strict=True))
    copies = medians.pop("copies")
    return {name: median - copies for name, median in medians.items()}


def main() -> None:
    """Measures and prints."""
    comm = mpidl.init()
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(2), default=41, help="of which the medians are taken")
    parser.add_argument("--max-kib", type=at_least(1), default=4096, help="of the largest array")
    options = parser.parse_on_all_ranks(lambda _: None)
    usual = backend.staged_sizes
    backend.staged_sizes = lambda topology: StagedSizes()
    direct = Communicator()
    backend.staged_sizes = usual
    ways: dict[str, tuple[Communicator | None, str]] = {
        "direct": (direct, "symmetric"),
        "auto": (comm, "auto"),
        "MPI": (None, "mpi"),
    }
    speeds = handover(comm, options.rounds)
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {comm.node_cores} cores, {MPI.Get_library_version().split(',')[0].split()[0]}")
        print(
            "# GB/s of a copy: in its own cache {:.1f}, of what another wrote {:.1f}, onto what it read {:.1f}".format(
                *speeds
            )
        )
        print(f"{'operation':16}{'KiB':>8}" + "".join(f"{name:>10}" for name in ways))
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        kib = 1
        while kib <= options.max_kib:
            calls = {name: call_of(*way, operation, kib << 10) for name, way in ways.items()}
            x = np.ones((kib << 10) // 4 // (comm.size if operation == "all_gather" else 1), np.float32)
            out = np.ones((kib << 10) // 4 // (comm.size if operation == "reduce_scatter" else 1), np.float32)
            calls["copies"] = fresh(lambda: None, x, out)
            found = times_of(calls, comm, options.rounds)
            if comm.rank == 0:
                print(f"{operation:16}{kib:>8}" + "".join(f"{value:>10.1f}" for value in found.values()), flush=True)
            kib *= 4
    direct.close()


if __name__ == "__main__":
    main()
