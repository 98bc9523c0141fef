"""Compares ways to train one model on the cores of one node, a step of each in turn.

    python benchmarks/bench_parallelism.py --ranks 2 --shapes 1x32x512x8,4x128x512x8

    threads        one process with as many threads as there are ranks, and no communication
    tp, tp-sp      this project's tensor parallelism; with sequence parallelism
    ddp, zero3     this project's data parallelism, each rank with its part of the batch
    torch-tp       PyTorch's tensor parallelism (DTensor) over gloo
    megatron       the layers of Megatron-Core over gloo (pip install megatron-core)

Every engine trains on the same batches of all ranks together, from the same weights, in fp32 with AdamW. Each runs in a
job of its own, whose ranks sleep while another one makes a step, and every turn has another order, as in
`bench_in_turn.py`. A ratio is the median over all turns of the ratios within them. A shape is batch x time x width x
layers. peak MiB is what the ranks hold together (proportional set sizes), the most of the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turns import Caller, Job, JobFailed

ENGINES = ("threads", "tp", "tp-sp", "ddp", "zero3", "torch-tp", "megatron")
DATA = ("ddp", "zero3")  # engines of which each rank has a part of the batch
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """Shape of what is trained: sequences a step and their length; the model's width and layers."""

    batch: int
    time: int
    width: int
    layers: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """Reads BATCHxTIMExWIDTHxLAYERS."""
        try:
            shape = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs BATCHxTIMExWIDTHxLAYERS, such as 1x32x512x8"
            ) from None
        if min(shape.batch, shape.time, shape.layers) < 1 or shape.width < HEAD_WIDTH or shape.width % HEAD_WIDTH:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs positive sizes and a multiple of {HEAD_WIDTH} as width"
            )
        return shape

    def __str__(self) -> str:
        return f"{self.batch}x{self.time}x{self.width}x{self.layers}"


# ---- in a job ------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Trains one engine, a step whenever it is called."""
    import torch

    import mpidl
    from linear_gpt import LinearGPT, batch

    shape, name = options.shapes[0], options.engines[0]
    comm = mpidl.init()
    torch.set_num_threads(options.ranks if name == "threads" else 1)
    torch.manual_seed(0)
    model = LinearGPT(shape.width, shape.layers, shape.width // HEAD_WIDTH, shape.time)
    run, optimizer = _engine(name, model, comm)
    peak, losses = 0.0, []
    with Caller(options.called, comm.size) as caller:
        for step in range(options.warmup + options.steps):
            x, y = batch(step, shape.batch, shape.time)
            if name in DATA:
                x, y = (tokens.chunk(comm.size)[comm.rank] for tokens in (x, y))
            with caller.turn() as answer:
                comm.barrier()
                begin = time.perf_counter()
                loss = run(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                answer["seconds"] = time.perf_counter() - begin
                losses.append(loss.item())
            if step < options.warmup:
                peak = max(peak, mpidl.memory.pss_mib())
        with caller.turn() as answer:
            total = np.array([peak, losses[-1] / comm.size])
            comm.all_reduce(total)
            answer |= {"peak": total[0], "loss": total[1], "params": sum(p.numel() for p in model.parameters())}


def _engine(name: str, model: Any, comm: Any) -> tuple[Callable[..., Any], Any]:
    """Makes the engine: what computes the loss, and the optimizer."""
    import torch

    import mpidl

    settings: dict[str, Any] = {"lr": 3e-4}
    if name in ("torch-tp", "megatron"):
        import peer_tensor_parallel
        from peers import start_gloo

        start_gloo(comm)
        (peer_tensor_parallel.by_torch if name == "torch-tp" else peer_tensor_parallel.by_megatron)(model)
    elif name in ("tp", "tp-sp"):
        mpidl.parallelize(model, mpidl.Mesh(tp=comm.size), plan_of(), sequence_parallel=name == "tp-sp")
    elif name == "ddp":
        return mpidl.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), **settings)
    elif name == "zero3":
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, **settings)
    return model, torch.optim.AdamW(model.parameters(), **settings)


def plan_of() -> Any:
    """The plan of `LinearGPT`. A vocabulary of 256 is not worth cutting."""
    from mpidl.tensor import AttentionParallel, FeedForwardParallel, SequenceBegins, SequenceEnds, SequenceParallel

    return {
        "blocks.0": SequenceBegins("x"),
        "blocks.*.norm_1": SequenceParallel(),
        "blocks.*.attention": AttentionParallel(
            query="q", key="k", value="v", output="o", heads="heads", scaled=("heads",), input="x"
        ),
        "blocks.*.norm_2": SequenceParallel(),
        "blocks.*.feed_forward": FeedForwardParallel(inputs=("up",), output="down", input="x"),
        "norm": (SequenceParallel(), SequenceEnds()),
    }


# ---- the program that starts them ----------------------------------------------------------------------------------


def compare(shape: Shape, options: argparse.Namespace, orders: random.Random) -> dict[str, dict[str, Any]]:
    """Trains every engine in turn, in as many launches as --launches says. Raises JobFailed."""
    found: dict[str, dict[str, Any]] = {}
    engines = [name for name in options.engines if name not in DATA or shape.batch % options.ranks == 0]
    for _ in range(options.launches):
        with contextlib.ExitStack() as running:
            directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="mpidl-turns-")))
            jobs = [running.enter_context(Job(name, _command(name, shape, options), directory)) for name in engines]
            for job in jobs:
                job.begin()
            for turn in range(options.warmup + options.steps):
                for job in orders.sample(jobs, len(jobs)):
                    slowest = max(answer["seconds"] for answer in job.turn())
                    if turn >= options.warmup:
                        found.setdefault(job.name, {"seconds": []})["seconds"].append(slowest)
            for job in jobs:
                found[job.name] |= job.turn()[0]
                job.end()
    return found


def _command(name: str, shape: Shape, options: argparse.Namespace) -> list[str]:
    ranks = 1 if name == "threads" else options.ranks
    own = ["--ranks", options.ranks, "--engines", name, "--shapes", shape, "--steps", options.steps, "--warmup"]
    return [*options.mpirun.split(), "-n", str(ranks), sys.executable, __file__, *map(str, [*own, options.warmup])]


def report(shape: Shape, found: dict[str, dict[str, Any]], launches: int) -> list[dict[str, Any]]:
    """Prints the table of a shape, and returns its rows."""
    rows = []
    print(f"# {shape}: batch x time x width x layers")
    heads = f"{'ms a step':>10} {'of threads':>22} {'of torch-tp':>22} {'tokens/s':>9} {'MiB':>6} {'loss':>8}"
    print(f"# {'engine':>9} {heads}")
    times = {name: np.array(one["seconds"]).reshape(launches, -1) for name, one in found.items()}
    for name, one in found.items():
        middle = float(np.median(times[name]))
        told = [_ratio(times[name], times.get(other)) for other in ("threads", "torch-tp")]
        tokens = shape.batch * shape.time / middle
        print(
            f"  {name:>9} {middle * 1e3:>10.1f} {told[0]:>22} {told[1]:>22} {tokens:>9.0f} {one['peak']:>6.0f} "
            f"{one['loss']:>8.4f}",
            flush=True,
        )
        rows.append({"shape": str(shape), "engine": name, **one, "seconds": times[name].tolist()})
    return rows


def _ratio(mine: Any, other: Any) -> str:
    """The median ratio within the turns, and those of the lowest and the highest launch."""
    if other is None or other is mine:
        return "-"
    each = np.median(mine / other, axis=1)
    return f"{np.median(mine / other):.3f} ({each.min():.3f} to {each.max():.3f})"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; wrong ones end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of each job, and threads of `threads` (2)")
    parser.add_argument("--engines", default=",".join(ENGINES[:-1]), help="which, by commas")
    parser.add_argument("--shapes", default="1x32x512x8,4x128x512x8", help="of batch, time, width, layers; by commas")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a launch (10)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, of which memory is measured (2)")
    parser.add_argument("--launches", type=int, default=3, help="times that the jobs are started (3)")
    parser.add_argument("--mpirun", default="mpirun", help="the command that starts a job (mpirun)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--called", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.engines = list(dict.fromkeys(options.engines.split(",")))
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"--engines: got {unknown[0]!r}; needs any of {','.join(ENGINES)}")
    try:
        options.shapes = [Shape.of(text) for text in options.shapes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--shapes: {error}")
    for name in ("ranks", "steps", "warmup", "launches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}; needs at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Starts the jobs, or is one; the exit status."""
    options = parse(arguments)
    if options.called is not None:
        work(options)
        return 0
    orders, rows = random.Random(0), []
    print(f"# {options.ranks} ranks, {options.launches} launches of {options.steps} turns")
    for shape in options.shapes:
        try:
            rows += report(shape, compare(shape, options, orders), options.launches)
        except (JobFailed, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    if options.json is not None:
        options.json.write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
