"""Times collectives: python -m collectives.bench --help.

Rank 0 reads the options, all ranks measure case after case, and rank 0 prints each line as soon as it is known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from ..communicator import Communicator
from ..process.about import about_mpi
from . import gpu_limits
from .device import BenchDevice
from .fresh import measure_core_to_core_copies
from .measurement import Row, measure
from .options import BenchOptions, read_together
from .report import Table, lines_of, summary

Say = Callable[[str], Any]


def main() -> int:
    """Measures, prints, writes; returns the exit status, the same on every rank."""
    comm = Communicator()
    options = read_together(comm)
    say: Say = (lambda text: print(text, flush=True)) if comm.rank == 0 else lambda text: None
    torch.set_num_threads(1)
    meets = {"gloo", "nccl"} & set(options.sides) and comm.size > 1
    if meets:
        from .peers import start_gloo, stop_gloo

        start_gloo(comm)
    device = (
        BenchDevice.of_gpu(comm, options.sides) if options.device == "cuda" else BenchDevice.of_cpu(comm, options.sides)
    )
    for line in _about(comm, options, device):
        say(line)
    rows: list[Row] = []
    table = Table(options, on_gpu=device.is_gpu)
    for operation in options.operations:
        rows += _operation(comm, device, options, operation, table, say)
    if comm.rank == 0:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot and rows:
            from .plot import plot

            plot(rows, options.plot)
    if meets:
        stop_gloo()
    return 1 if any(row.wrong for row in rows) else 0


def _operation(
    comm: Communicator, device: BenchDevice, options: BenchOptions, operation: str, table: Table, say: Say
) -> list[Row]:
    """Measures one operation at all sizes, and prints its table. Collective."""
    say(f"# {operation}")
    for line in table.head():
        say(line)
    rows: list[Row] = []
    for case in options.series(operation):
        absent: dict[str, None] = {}
        for size in options.sizes():
            of_case: list[Row] = []
            for found in measure(comm, device, options, replace(case, size=size)):
                if isinstance(found, str):
                    absent[found] = None
                else:
                    of_case.append(found)
            for line in [table.line(same) for same in lines_of(of_case)]:
                say(line)
            for line in gpu_limits.limit_lines(of_case) if device.is_gpu else ():
                say(line)
            rows += of_case
        if absent:
            what = f"{case.dtype}" if case.op in ("none", "sum") else f"{case.op} of {case.dtype}"
            say(f"# {operation} of {what}: not served by {', '.join(absent)}")
    for line in summary(rows, operation):
        say(line)
    return rows


def _about(comm: Communicator, options: BenchOptions, device: BenchDevice) -> list[str]:
    """The lines before the first table. Collective."""
    step = f"{options.step_bytes}(bytes)" if options.step_bytes else f"{options.step_factor}(factor)"
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks on {comm.nodes} node(s)"
    lines = [
        f"# minBytes {options.min_bytes} maxBytes {options.max_bytes} step: {step} "
        f"warmup iters: {options.warmup_iters} iters: {options.iters or 'by size'} agg iters: {options.agg_iters} "
        f"validation: {options.check}",
        f"# {ranks}, {comm.node_cores} core(s) for those of a node, {about_mpi()['library']}",
    ]
    if comm.size == 1:
        lines.append("# One rank sends nothing: mpirun -n 2 python -m collectives.bench measures two.")
    if options.cold:
        lines.append(f"# cold: calls rotate through more than the {options.cache} bytes that a core's caches hold")
    if options.fresh and comm.local_size > 1:
        own, read, written = measure_core_to_core_copies(comm)
        lines.append(
            f"# GB/s of a copy: in its own cache {own:.1f}, of what another rank has written {read:.1f}, onto what it "
            f"has read {written:.1f}"
        )
    if device.bandwidth is not None:
        lines.append(
            f"# {device.sharing} rank(s) on a GPU, which copies {device.bandwidth / 1e9:.0f} GB/s (read and written)"
        )
    return [*lines, "#"]


if __name__ == "__main__":
    sys.exit(main())
