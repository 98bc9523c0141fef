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
from .advice import Finding, by_host, bytes_in_words, counted, findings
from .facts import facts_of_rank
from .speed import measure


def main() -> int:
    """Gathers facts, measures and prints; returns the exit status."""
    comm = init()
    parser = ArgumentParser(comm, prog="python -m mpidl.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the facts, the speeds and the findings as JSON")
    parser.add_argument(
        "--mesh", type=mesh_of.sizes, metavar="dp=2,tp=2", help="draw the ranks on a mesh of these sizes"
    )

    def check(_: argparse.Namespace) -> None:
        """Accepts any combination of options."""

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
            report: dict[str, Any] = {"ranks": facts, "speed": speed, "findings": [asdict(f) for f in found]}
            if layout is not None:
                report["mesh"] = {"sizes": layout.sizes, "coordinates": list(map(layout.coordinates, range(comm.size)))}
            print(json.dumps(report, indent=1))
        else:
            picture_lines = [] if layout is None else mesh_of.picture(layout, [fact["host"] for fact in facts])
            print("\n".join([*picture_lines, *lines(facts, speed, found)]))
        sys.stdout.flush()
    return int(any(finding.problem for finding in found))


def lines(facts: list[dict[str, Any]], speed: dict[str, Any], found: list[Finding]) -> list[str]:
    """Returns the lines of the report."""
    first = facts[0]
    mpi, versions = first["mpi"], first["versions"]
    aware = {True: "aware of CUDA", False: "not aware of CUDA", None: "does not tell of CUDA"}[mpi["cuda_aware"]]
    text = [
        f"MPI       {mpi['library']}, MPI {mpi['standard']}, threads: {mpi['threads']}, {aware}",
        f"Python    {versions['python']}, torch {versions['torch']}; the part in C is "
        f"{'compiled' if first['compiled'] else 'not compiled'}",
        f"job       {counted(len(facts), 'rank')} on {counted(first['nodes'], 'node')}",
    ]
    for fact, ranks in by_host(facts):
        cores = sorted({len(rank["cores"]) for rank in ranks})
        shared = fact["shared_memory"]
        text += [
            f"{fact['host']:9} {counted(len(ranks), 'rank')}; {counted(fact['threads'], 'torch thread')} each; cores a "
            f"rank may use: "
            f"{'-'.join(map(str, cores))} of {fact['cores_of_machine']}",
            f"{'':9} memory {bytes_in_words(fact['memory'])}; {shared['directory']} {bytes_in_words(shared['bytes'])}, "
            f"{bytes_in_words(shared['free'])} free; symmetric memory "
            f"{'works' if fact['symmetric'] else 'does not work'}; GPUs: {len(fact['gpus'])}",
        ]
    copy = bytes_in_words(speed["copy"])
    text.append(f"speed     each rank copies memory at {copy}/s, all at once; the rest is measured by that")
    between = expected.links(speed, first["host"]).values()
    for rate in filter(None, (expected.speed_on_a_node(speed), expected.speed_over_nodes(speed), *between)):
        typical = "" if rate.typical is None else f"about {bytes_in_words(rate.typical)}/s, "
        text.append(
            f"{'':9} {rate.what}: {bytes_in_words(rate.measured)}/s, {'low' if rate.is_low else 'good'} "
            f"(expected: {typical}at least {bytes_in_words(rate.lowest_good)}/s, {rate.why})"
        )
    for finding in found:
        text += [f"{'problem' if finding.problem else 'remark':9} {finding.what}", f"{'':9} -> {finding.advice}"]
    return text + ([] if any(finding.problem for finding in found) else ["no problem found"])


if __name__ == "__main__":
    sys.exit(main())
