"""Prints what this machine and this job look like, and what is wrong with them.

    python -m mpidl.doctor                     this process alone
    mpirun -n 4 python -m mpidl.doctor         started as the training will be: the same ranks, nodes and settings
    mpirun -n 4 python -m mpidl.doctor --json
    mpirun -n 4 python -m mpidl.doctor --mesh dp=2,tp=2     also draws which rank lies where on a Mesh of these sizes

Takes about a second besides the start. Status 0 if there is no problem, 1 if there is one, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from ..cli import ArgumentParser
from ..job.agreement import agree_or_exit
from ..job.objects import all_gather_object
from ..job.runtime import init
from ..mesh.mesh import agreed_layout
from . import expected
from . import mesh as mesh_of
from .advice import Finding, by_host, count, findings, in_bytes
from .facts import facts_of_rank
from .speed import measure


def main() -> int:
    """Gathers, measures, prints; the exit status."""
    comm = init()
    parser = ArgumentParser(comm, prog="python -m mpidl.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the facts, the speeds and the findings as JSON")
    parser.add_argument(
        "--mesh", type=mesh_of.sizes, metavar="dp=2,tp=2", help="draw the ranks on a mesh of these sizes"
    )

    def check(_: argparse.Namespace) -> None:
        """Any combination is right."""

    options = parser.parse_on_all_ranks(check)
    layout = None
    if options.mesh is not None:
        layout = agree_or_exit(comm, lambda: agreed_layout(comm, options.mesh))
    facts = all_gather_object(comm, facts_of_rank(comm))
    speed = measure(comm, [fact["host"] for fact in facts])
    found = findings(facts, speed)
    if layout is not None:
        found += mesh_of.findings(layout)
    if comm.rank == 0:
        if options.json:
            told: dict[str, Any] = {"ranks": facts, "speed": speed, "findings": [asdict(f) for f in found]}
            if layout is not None:
                told["mesh"] = {"sizes": layout.sizes, "coordinates": list(map(layout.coordinates, range(comm.size)))}
            print(json.dumps(told, indent=1))
        else:
            drawn = [] if layout is None else mesh_of.picture(layout, [fact["host"] for fact in facts])
            print("\n".join([*drawn, *lines(facts, speed, found)]))
        sys.stdout.flush()
    return int(any(finding.problem for finding in found))


def lines(facts: list[dict[str, Any]], speed: dict[str, Any], found: list[Finding]) -> list[str]:
    """The report."""
    first = facts[0]
    mpi, versions = first["mpi"], first["versions"]
    aware = {True: "aware of CUDA", False: "not aware of CUDA", None: "does not tell of CUDA"}[mpi["cuda_aware"]]
    text = [
        f"MPI       {mpi['library']}, MPI {mpi['standard']}, threads: {mpi['threads']}, {aware}",
        f"Python    {versions['python']}, torch {versions['torch']}; the part in C is "
        f"{'compiled' if first['compiled'] else 'not compiled'}",
        f"job       {count(len(facts), 'rank')} on {count(first['nodes'], 'node')}",
    ]
    for fact, ranks in by_host(facts):
        cores = sorted({len(rank["cores"]) for rank in ranks})
        shared = fact["shared_memory"]
        text += [
            f"{fact['host']:9} {count(len(ranks), 'rank')}; {count(fact['threads'], 'torch thread')} each; cores a "
            f"rank may use: "
            f"{'-'.join(map(str, cores))} of {fact['cores_of_machine']}",
            f"{'':9} memory {in_bytes(fact['memory'])}; {shared['directory']} {in_bytes(shared['bytes'])}, "
            f"{in_bytes(shared['free'])} free; symmetric memory "
            f"{'works' if fact['symmetric'] else 'does not work'}; GPUs: {len(fact['gpus'])}",
        ]
    copy = in_bytes(speed["copy"])
    text.append(f"speed     each rank copies memory at {copy}/s, all at once; the rest is measured by that")
    between = expected.links(speed, first["host"]).values()
    for rate in filter(None, (expected.on_a_node(speed), expected.over_nodes(speed), *between)):
        usual = "" if rate.usual is None else f"about {in_bytes(rate.usual)}/s, "
        text.append(
            f"{'':9} {rate.what}: {in_bytes(rate.measured)}/s, {'low' if rate.is_low else 'good'} "
            f"(expected: {usual}at least {in_bytes(rate.least)}/s, {rate.why})"
        )
    for finding in found:
        text += [f"{'problem' if finding.problem else 'remark':9} {finding.what}", f"{'':9} -> {finding.advice}"]
    return text + ([] if any(finding.problem for finding in found) else ["no problem found"])


if __name__ == "__main__":
    sys.exit(main())
