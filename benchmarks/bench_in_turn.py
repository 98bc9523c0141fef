"""Compares training steps of engines that train in jobs of their own, as their users' do, a step of each in turn.

    python benchmarks/bench_in_turn.py --engines single,ddp,all-reduce,torch-ddp -- \\
        mpirun -n 2 python benchmarks/bench_training.py --batch 1 --block-size 32

For each engine the command is started with `--engines` and that name. While the ranks of one job make a step those of
all others sleep, and every turn has another order, so that a machine whose speed changes within minutes is the same for
all, and none always comes after the same one. A ratio is the median over all turns of the ratios within them.

Two launches of one program do not take the same time either: medians of 16 steps in turn differed by 3.5 % on the
machine of docs/zero.md. So all jobs are started anew, as often as --launches says; next to the median stand the ratios
of the lowest and the highest launch. Memory is measured by `bench_training.py`, where each engine is alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from training_report import ENGINES, Run, compare, rows_of
from turns import Job, JobFailed


def launch(options: argparse.Namespace, orders: random.Random) -> dict[str, dict[str, Any]]:
    """Starts a job for each engine and has all make their steps in turn; what each found. Raises JobFailed."""
    steps = ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    with contextlib.ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="mpidl-turns-")))
        jobs = []
        for name in options.engines:
            job = Job(name, [*options.command, "--engines", name, *steps], directory)
            jobs.append(running.enter_context(job))
        for job in jobs:
            job.begin()
        for _ in range(options.warmup + options.steps):
            for job in orders.sample(jobs, len(jobs)):
                job.turn()
        found = {job.name: job.turn()[0] for job in jobs}
        for job in jobs:
            job.end()
        return found


def positive(text: str) -> int:
    """An argparse type: at least one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; needs at least 1")
    return int(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; wrong ones end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--engines", default="single,ddp,zero1,zero2,zero3,all-reduce,torch-ddp,fsdp2", help="which")
    parser.add_argument("--steps", type=positive, default=8, help="counted steps of each job (8)")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before them (2)")
    parser.add_argument("--launches", type=positive, default=3, help="times that each engine's job is started (3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, and each turn's seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts bench_training.py")
    options = parser.parse_args(arguments)

    def wrong(message: str) -> None:
        print(f"error: {message} (--help lists the options)", file=sys.stderr)
        sys.exit(2)

    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        wrong("there is no command to run")
    options.engines = list(dict.fromkeys(name for name in options.engines.split(",") if name))
    unknown = [name for name in options.engines or [""] if name not in ENGINES]
    if unknown:
        wrong(f"--engines: got {unknown[0]!r}; needs any of {','.join(ENGINES)}")
    if options.json is not None:
        try:
            options.json.open("a").close()
        except OSError as error:
            wrong(f"--json: {options.json}: cannot be written: {error.strerror}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Starts the jobs, prints, writes; the exit status."""
    options = parse(arguments)
    orders = random.Random(0)
    launches: list[dict[str, dict[str, Any]]] = []
    for count in range(1, options.launches + 1):
        try:
            launches.append(launch(options, orders))
        except (JobFailed, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        middle = {name: float(np.median(np.sum(run["seconds"], 1))) * 1e3 for name, run in launches[-1].items()}
        told = ", ".join(f"{name} {ms:.1f}" for name, ms in middle.items())
        print(f"# launch {count} of {options.launches}, ms a step: {told}", flush=True)
    about = launches[0][options.engines[0]]
    print(
        f"# GPT-2 of {about['params'] / 1e6:.2f} M parameters, {about['ranks']} ranks, {options.launches} launches of "
        f"{options.steps} turns"
    )
    runs = {
        name: [Run(np.array(found[name]["seconds"]), math.nan, math.nan, found[name]["loss"]) for found in launches]
        for name in options.engines
    }
    rows = rows_of(runs, about["ranks"], about["params"], about["tokens"], print)
    seconds = {name: np.array([run.seconds.sum(1) for run in runs[name]]) for name in runs}
    compare(seconds, print)
    if options.json is not None:
        written = [asdict(row) | {"seconds": seconds[row.engine].tolist()} for row in rows]
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
