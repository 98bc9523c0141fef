"""Times how long a job takes to start: from the command to the end of the first training step.

    python benchmarks/bench_startup.py --ranks 2 4

A small model trains by mpidl's DistributedDataParallel under mpirun, and by torch's over gloo under torchrun; the two
take turns. Seconds, medians of --launches with the lowest and highest. "launch" ends when rank 0's program begins,
"import" when its packages are imported, "join" when it knows the other ranks, "wrap" when the model is wrapped, "step"
with its first step; "all" is their sum. "end" is from there until the command is over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("launch", "import", "join", "wrap", "step")
_MARK = "startup: "
_TIME_LIMIT = 300  # seconds a launch
_ATTEMPTS = 5  # of the peer, whose gloo now and then aborts a rank at the end of its program


def train(peer: bool) -> None:
    """One rank's program; rank 0 prints the times at which its stages ended."""
    ends = [time.time()]
    wrap: Callable[[Any], Any]
    if peer:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as wrap

        ends.append(time.time())
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        import torch

        import mpidl
        from mpidl import DistributedDataParallel as wrap

        ends.append(time.time())
        rank = mpidl.init().rank
    ends.append(time.time())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ends.append(time.time())
    wrapped(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    ends.append(time.time())
    if rank == 0:
        print(_MARK + json.dumps(ends), flush=True)
    if peer:
        dist.destroy_process_group()


def launch(peer: bool, ranks: int) -> dict[str, float]:
    """Starts a job; seconds of each stage. Raises SystemExit with what it said if it fails."""
    own = Path(sys.executable).parent
    launcher = str(own / "mpirun") if (own / "mpirun").exists() else shutil.which("mpirun") or "mpirun"
    program = [__file__, "--program", "torch" if peer else "mpidl"]
    if peer:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    else:
        command = [launcher, "-n", str(ranks), sys.executable, *program]
    for attempt in range(_ATTEMPTS if peer else 1):
        begin = time.time()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIME_LIMIT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        end = time.time()
        marks = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
        if done.returncode == 0 and len(marks) == 1:
            break
        print(f"# {command[-1]} ended with status {done.returncode}, attempt {attempt + 1}", file=sys.stderr)
    else:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    times = [begin, *json.loads(marks[0])]
    found = {stage: after - before for stage, before, after in zip(STAGES, times, times[1:], strict=False)}
    return {**found, "all": times[-1] - begin, "end": end - times[-1]}


def measure(ranks: int, launches: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every launch: by program, then stage. One launch of each comes first and does not count."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ("mpidl", "torch")}
    for number in range(launches + 1):
        for name, stages in found.items():
            for stage, seconds in launch(name == "torch", ranks).items():
                if number:
                    stages.setdefault(stage, []).append(seconds)
    return found


def show(ranks: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Prints a table."""
    print(f"# {ranks} ranks, seconds")
    stages = list(found["mpidl"])
    print(f"{'':22}" + "".join(f"{stage:>8}" for stage in stages) + "   all: lowest to highest")
    for name, times in found.items():
        medians = "".join(f"{statistics.median(times[stage]):8.2f}" for stage in stages)
        how = "mpirun, mpidl" if name == "mpidl" else "torchrun, gloo"
        print(f"{how:22}{medians}   {min(times['all']):.2f} to {max(times['all']):.2f}")
    ratio = statistics.median(found["mpidl"]["all"]) / statistics.median(found["torch"]["all"])
    print(f"mpidl of torch: {ratio:.2f}", flush=True)


def main() -> None:
    """Measures and prints; or, with --program, is a rank's program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of a job; several are measured")
    parser.add_argument("--launches", type=int, default=5, help="of each program")
    parser.add_argument("--json", type=Path, help="a file for the seconds of every launch")
    parser.add_argument("--program", choices=["mpidl", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        train(options.program == "torch")
        return
    if min(options.ranks) < 1 or options.launches < 1:
        parser.error("--ranks and --launches: need numbers of at least 1")
    rows = {}
    with contextlib.suppress(KeyboardInterrupt):
        for ranks in options.ranks:
            rows[ranks] = measure(ranks, options.launches)
            show(ranks, rows[ranks])
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
