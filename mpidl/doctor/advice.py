"""Advice on what is wrong on a machine: rules that work on the facts alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from . import expected

_SMALL = 1 << 30  # bytes of shared memory

Facts = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A problem or a remark.

    problem: whether trainings would fail or be slow for it; else it is a remark.
    advice: what to do.
    """

    problem: bool
    what: str
    advice: str


def findings(facts: Facts, speed: dict[str, Any]) -> list[Finding]:
    """Lists all findings, problems before remarks.

    facts: of each rank.
    speed: see `speed.measure`.
    """
    rules = (_world, _versions, _mpi, _compiled, _shared_memory, _threads, _pinning, _gpus)
    found = [finding for rule in rules for finding in rule(facts)] + list(_speed(facts, speed))
    return sorted(found, key=lambda finding: not finding.problem)


def _world(facts: Facts) -> Iterator[Finding]:
    launched_processes = max(fact["started"] for fact in facts)
    if launched_processes > len(facts):
        yield Finding(
            True,
            f"the launcher has started {launched_processes} processes, but MPI knows of {len(facts)}",
            f"mpi4py uses {facts[0]['mpi']['library']}, and the launcher is another MPI's: start with the mpirun of "
            "that one (make run MPI=system installs for the mpirun on the PATH), under Slurm with srun --mpi=pmi2 for "
            "MPICH, --mpi=pmix for Open MPI",
        )


def _versions(facts: Facts) -> Iterator[Finding]:
    for name, version in facts[0]["versions"].items():
        others = [fact for fact in facts if fact["versions"][name] != version]
        if others:
            yield Finding(
                True,
                f"{name} is {version} on rank 0 and {others[0]['versions'][name]} on rank {others[0]['rank']} "
                f"({others[0]['host']})",
                "use one environment on all nodes, on a shared file system for example",
            )


def _mpi(facts: Facts) -> Iterator[Finding]:
    level = facts[0]["mpi"]["threads"]
    if level != "multiple":
        yield Finding(
            True,
            f"the MPI library gives threads the level {level!r}; asynchronous operations need 'multiple'",
            "leave mpi4py.rc.thread_level as it is, or use an MPI that is built with MPI_THREAD_MULTIPLE",
        )


def _compiled(facts: Facts) -> Iterator[Finding]:
    without = [fact["rank"] for fact in facts if not fact["compiled"]]
    if without:
        yield Finding(
            False,
            f"the part of mpidl in C is not used on rank {without[0]}: an operation takes some 2 us more",
            "install a C compiler and Python's headers, then mpidl again; and do not set MPIDL_NATIVE=0",
        )


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    for fact in _first_of_each_host(facts):
        shared, where = fact["shared_memory"], f"{fact['shared_memory']['directory']} of {fact['host']}"
        advice = (
            "enlarge it (docker run --shm-size=8g, or mount -o remount,size=50% /dev/shm as root), or name a larger "
            "tmpfs in MPIDL_SHM_DIR"
        )
        if fact["local_size"] > 1 and not fact["symmetric"]:
            yield Finding(True, f"the ranks of {fact['host']} cannot share memory, and send messages instead", advice)
        elif fact["local_size"] > 1 and shared["free"] < _SMALL:
            yield Finding(
                True, f"{where} has {bytes_in_words(shared['free'])} free; parameters and gradients lie there", advice
            )


def _threads(facts: Facts) -> Iterator[Finding]:
    for fact, ranks in by_host(facts):
        usable = len({core for rank in ranks for core in rank["cores"]})
        quota = fact["quota"] or math.inf
        seen, usable = usable, int(min(usable, max(1, quota)))
        threads = sum(rank["threads"] for rank in ranks)
        where = f"{fact['host']}: {counted(len(ranks), 'rank')} of {counted(fact['threads'], 'thread')} each on "
        where += counted(usable, "core")
        if len(ranks) > usable:
            yield Finding(True, where, f"start {usable} there at most: ranks that share a core wait for each other")
        elif threads > usable:
            yield Finding(
                True,
                where,
                f"set OMP_NUM_THREADS={usable // len(ranks)}, or leave it out: mpidl.init divides the cores",
            )
        elif 2 * threads <= usable:
            yield Finding(
                False,
                f"{where}: {counted(usable - threads, 'core')} would be idle",
                f"set OMP_NUM_THREADS={usable // len(ranks)}, or start more ranks",
            )
        if quota < seen:
            yield Finding(
                False,
                f"{fact['host']}: the control group allows {quota:g} cores at a time of those that are seen",
                "count these when you choose ranks and OMP_NUM_THREADS",
            )


def _pinning(facts: Facts) -> Iterator[Finding]:
    for fact, ranks in by_host(facts):
        usable = {core for rank in ranks for core in rank["cores"]}
        bound = [rank for rank in ranks if len(rank["cores"]) < fact["cores_of_machine"]]
        for one, other in combinations(bound, 2):
            both = set(one["cores"]) & set(other["cores"])
            if both and (set(one["cores"]) != usable or len(usable) < len(ranks)):
                yield Finding(
                    True,
                    f"{fact['host']}: ranks {one['rank']} and {other['rank']} are bound to the same core {min(both)}",
                    "bind each to cores of its own: mpirun -bind-to core (MPICH), --map-by ppr:N:node:PE=cores (Open "
                    "MPI), srun --cpu-bind=cores with --cpus-per-task",
                )
                break
        for rank in ranks:
            if rank["threads"] > len(rank["cores"]):
                yield Finding(
                    True,
                    f"{fact['host']}: rank {rank['rank']} has {counted(rank['threads'], 'thread')} on the "
                    f"{counted(len(rank['cores']), 'core')} that it is bound to",
                    "bind ranks to as many cores as they have threads, or to none (mpirun --bind-to none)",
                )
                break


def _gpus(facts: Facts) -> Iterator[Finding]:
    with_gpus = [fact for fact in facts if fact["gpus"]]
    if with_gpus:
        fact = with_gpus[0]
        aware = {True: "takes", False: "does not take", None: "does not say whether it takes"}
        yield Finding(
            False,
            f"{fact['host']} has {len(fact['gpus'])} of {fact['gpus'][0]}; the MPI library "
            f"{aware[fact['mpi']['cuda_aware']]} GPU memory",
            "docs/gpu.md says what uses it",
        )


def _speed(facts: Facts, speed: dict[str, Any]) -> Iterator[Finding]:
    node, everywhere = expected.speed_on_a_node(speed), expected.speed_over_nodes(speed)
    if node is not None and node.is_low:
        yield Finding(
            True,
            _slow(node),
            "first follow the advice on cores and shared memory; else another program (top shows it), or another guest "
            "of the same machine, may take cores or memory bandwidth: measure again, or use other nodes",
        )
    links = expected.links(speed, facts[0]["host"])
    for host, link in links.items():
        if link.is_low:
            yield Finding(
                True,
                f"{_slow(link)}; a message takes {speed['links'][host]['latency'] * 1e6:.0f} us",
                "name the fast network: -iface or FI_TCP_IFACE, UCX_NET_DEVICES (MPICH), --mca btl_tcp_if_include, "
                "UCX_NET_DEVICES (Open MPI)"
                if all(other.is_low for other in links.values())
                else "look at that node's network",
            )
    if everywhere is not None and everywhere.is_low:
        yield Finding(
            False,
            _slow(everywhere),
            "first follow the advice on cores and links; python -m collectives.tune then finds the fastest algorithm",
        )


def _slow(speed: expected.Speed) -> str:
    return (
        f"{speed.what}: {bytes_in_words(speed.measured)}/s is low; at least {bytes_in_words(speed.lowest_good)}/s is "
        f"to be expected ({speed.why})"
    )


def by_host(facts: Facts) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields for each host (facts of its first rank, facts of all its ranks)."""
    for first in _first_of_each_host(facts):
        yield first, [fact for fact in facts if fact["host"] == first["host"]]


def _first_of_each_host(facts: Facts) -> list[dict[str, Any]]:
    return list({fact["host"]: fact for fact in reversed(facts)}.values())[::-1]


def bytes_in_words(nbytes: float) -> str:
    """Writes a number of bytes with a unit, as 1.5 GiB."""
    if nbytes < 1 or math.isinf(nbytes):
        return f"{nbytes:g} B"
    power = min(4, int(math.log(nbytes, 1024)))
    return f"{nbytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def counted(number: int, thing: str) -> str:
    """Writes a number with its noun: 1 core, 2 cores."""
    return f"{number} {thing}{'s' * (number != 1)}"
