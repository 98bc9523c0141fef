"""Compares ways to use the cores of one node for one model, each in turn.

    python benchmarks/bench_parallelism.py --shapes 1x32x512x8,4x128x512x8
    python benchmarks/bench_parallelism.py --show table,generate,all-reduce,batches --plot batches.png

--show says what, by commas:
    shapes      a step of training by each engine, for each of --shapes
    table       the same for the shapes with targets, and a table that compares tp with these
    generate    tokens a second of a GPT-2 at batch 1, greedily, with a cache of keys and values: threads and tp
    all-reduce  the sum of [batch, time, width] as a row-parallel layer makes it, and bare, in symmetric memory
    batches     throughput and peak memory of training for each of --batches, also as a figure (--plot)

Engines:
    threads        one process with as many threads as there are ranks, and no communication
    tp, tp-sp      this project's tensor parallelism; with sequence parallelism
    parts          each rank computes tp's part of every layer in plain torch and sums nothing: what tp would take if
                   communication were free; its loss is that of a smaller model
    ddp, zero3     this project's data parallelism, each rank with its part of the batch
    torch-tp       PyTorch's tensor parallelism (DTensor) over gloo
    megatron       the column- and row-parallel layers of Megatron-Core over gloo, where it is installed

Megatron-Core is no part of the extras, as each Python has another version of it: pip install --no-deps megatron-core.
What of it runs on CPUs is said in `peer_tensor_parallel.py`.

Every engine trains on the same batches of all ranks together, from the same weights, in fp32 with AdamW. Each runs in a
job of its own, whose ranks sleep while another one makes a step, and every turn has another order, as in
`bench_in_turn.py`. A ratio is the median over all turns of the ratios within them. A shape is batch x time x width x
layers. peak MiB is what the ranks hold together (proportional set sizes), the most at the ends of forward passes and
steps, of the first steps. Each rank of ddp and zero3 needs as many sequences: other batches are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallelism_report as report
from parallel_inference import PROMPT, generate, sum_activations
from parallel_training import DATA, ENGINES, HEAD_WIDTH, MEGATRON, PARTS, Shape, has_megatron, train
from turns import Job, JobFailed

JOBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "train": train,
    "generate": generate,
    "all-reduce": sum_activations,
}


def in_turn(
    job: str, engines: Sequence[str], own: Sequence[Any], options: argparse.Namespace, orders: random.Random
) -> report.Found:
    """Starts a job for each engine and has all take their turns, as many launches as --launches says.

    job: of JOBS.
    own: its options besides the common ones.

    Returns by engine the slowest rank's seconds of all turns, and the answer to the last one. Raises JobFailed.
    """
    found: report.Found = {name: {"seconds": []} for name in engines}
    for _ in range(options.launches):
        with _started(job, engines, own, options) as jobs:
            for turn in range(options.warmup + options.steps):
                for one in orders.sample(jobs, len(jobs)):
                    slowest = max(answer["seconds"] for answer in one.turn())
                    if turn >= options.warmup:
                        found[one.name]["seconds"].append(slowest)
            for one in jobs:
                found[one.name] |= one.turn()[0]
                one.end()
    return found


@contextlib.contextmanager
def _started(job: str, engines: Sequence[str], own: Sequence[Any], options: argparse.Namespace) -> Any:
    with contextlib.ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="mpidl-turns-")))
        jobs = []
        for name in engines:
            ranks = 1 if name == "threads" else options.ranks
            common = ["--job", job, "--engines", name, "--ranks", options.ranks, "--steps", options.steps]
            command = [*options.mpirun.split(), "-n", ranks, sys.executable, __file__, *common]
            command += ["--warmup", options.warmup, *own]
            jobs.append(running.enter_context(Job(name, [str(word) for word in command], directory)))
        for one in jobs:
            one.begin()
        yield jobs


def compare(shape: Shape, engines: Sequence[str], options: argparse.Namespace, orders: random.Random) -> report.Found:
    """Trains by every engine in turn."""
    able = [name for name in engines if name not in DATA or shape.batch % options.ranks == 0]
    return in_turn("train", able, ["--shapes", shape], options, orders)


# ---- what --show names ---------------------------------------------------------------------------------------------


def show_shapes(options: argparse.Namespace, orders: random.Random) -> list[dict[str, Any]]:
    """Trains each of --shapes."""
    rows = []
    for shape in options.shapes:
        rows += report.shape_rows(shape, compare(shape, options.engines, options, orders), options.launches)
    return rows


def show_table(options: argparse.Namespace, orders: random.Random) -> list[dict[str, Any]]:
    """Trains the shapes with targets, or --table-shapes."""
    rows, found = [], {}
    for shape in options.table_shapes:
        found[shape] = compare(shape, options.table_engines, options, orders)
        rows += report.shape_rows(shape, found[shape], options.launches)
    print("\n".join(report.table(found)), flush=True)
    return rows


def show_generate(options: argparse.Namespace, orders: random.Random) -> list[dict[str, Any]]:
    """Generates with each of --models."""
    rows = []
    for width, layers in options.models:
        own = ["--models", f"{width}x{layers}", "--tokens", options.tokens]
        found = in_turn("generate", ("threads", "tp"), own, options, orders)
        rows += report.text_rows((width, layers), options.tokens, found, options.launches)
    return rows


def show_all_reduce(options: argparse.Namespace, orders: random.Random) -> list[dict[str, Any]]:
    """Sums activations of the table's shapes."""
    rows = []
    print("# all-reduce of [batch, time, width], us; layers of bare, and the target at 2 ranks")
    print(f"# {'sizes':>12} {'KiB':>8} {'bare':>9} {'layers':>9} {'ratio':>7}")
    for shape in options.table_shapes:
        own = ["--shapes", shape, "--repetitions", options.repetitions]
        with _started("all-reduce", ("tp",), own, options) as (job,):
            rows += report.sum_rows(shape, job.turn())
            job.end()
    return rows


def show_batches(options: argparse.Namespace, orders: random.Random) -> list[dict[str, Any]]:
    """Trains --batch-model with each of --batches, and draws it."""
    rows, found = [], {}
    for batch in options.batches:
        shape = replace(options.batch_model, batch=batch)
        found[shape] = compare(shape, options.batch_engines, options, orders)
        rows += report.shape_rows(shape, found[shape], options.launches)
    if options.plot is not None:
        report.plot_batches(found, options.plot)
    return rows


SHOWN = {
    "shapes": show_shapes,
    "table": show_table,
    "generate": show_generate,
    "all-reduce": show_all_reduce,
    "batches": show_batches,
}


# ---- options -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; wrong ones end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--show", type=_names(tuple(SHOWN)), default="shapes", help="what, by commas (shapes)")
    add("--ranks", type=_number, default=2, help="of each job, and threads of `threads` (2)")
    there = [name for name in ENGINES if name != MEGATRON or has_megatron()]
    add(
        "--engines", type=_names(ENGINES), default=",".join(there), help="of shapes, by commas (all that are installed)"
    )
    add("--shapes", type=_each(Shape.of), default="1x32x512x8,4x128x512x8", help="of shapes, by commas")
    peers = [name for name in ("threads", "tp", PARTS, "torch-tp", MEGATRON) if name in there]
    add("--table-engines", type=_names(ENGINES), default=",".join(peers), help=f"of table ({','.join(peers)})")
    targets = ",".join(map(str, report.TARGETS))
    add("--table-shapes", type=_each(Shape.of), default=targets, help="of table and all-reduce (those with targets)")
    add("--models", type=_each(_model), default="512x8,768x12", help="WIDTHxLAYERS of generate (512x8,768x12)")
    add("--tokens", type=_number, default=32, help=f"of generate, behind a prompt of {PROMPT} (32)")
    add("--repetitions", type=_number, default=300, help="of all-reduce (300)")
    add("--batches", type=_each(_number), default="2,4,8,16", help="sequences a step of batches (2,4,8,16)")
    add("--batch-engines", type=_names(ENGINES), default="tp,tp-sp,zero3", help="of batches (tp,tp-sp,zero3)")
    model = "1x128x512x8"
    add("--batch-model", type=Shape.of, default=model, help=f"shape of batches, its batch is not used ({model})")
    add("--steps", type=_number, default=10, help="counted steps of a launch (10)")
    add("--warmup", type=_number, default=2, help="steps before them, of which memory is measured (2)")
    add("--launches", type=_number, default=3, help="times that the jobs are started (3)")
    add("--mpirun", default="mpirun", help="the command that starts a job (mpirun)")
    add("--json", type=Path, metavar="PATH", help="write the rows there, by what --show names")
    add("--plot", type=Path, metavar="PATH", help="draw batches there (PNG)")
    add("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    add("--called", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("engines", "table_engines", "batch_engines"):
        if MEGATRON in getattr(options, name) and not has_megatron():
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: {MEGATRON} is not installed; needs pip install --no-deps megatron-core")
    if options.plot is not None and "batches" not in options.show:
        parser.error(f"--plot: got {options.plot}; needs --show batches")
    return options


def _number(text: str) -> int:
    """An argparse type: at least one."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"got {text}; needs a number of at least 1")
    return found


def _each(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: several of a kind, with commas between."""
    return lambda text: [kind(part) for part in text.split(",")]


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of these names, each once, with commas between."""

    def read(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; needs any of {','.join(known)}")
        return found

    return read


def _model(text: str) -> tuple[int, int]:
    """An argparse type: WIDTHxLAYERS."""
    try:
        width, layers = map(int, text.split("x"))
    except ValueError:
        width = layers = 0
    if width < HEAD_WIDTH or width % HEAD_WIDTH or layers < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs WIDTHxLAYERS, a multiple of {HEAD_WIDTH} as width")
    return width, layers


def main(arguments: Sequence[str]) -> int:
    """Starts the jobs, or is one; the exit status."""
    options = parse(arguments)
    if options.called is not None:
        JOBS[options.job](options)
        return 0
    orders, rows = random.Random(0), {}
    print(f"# {options.ranks} ranks, {options.launches} launches of {options.steps} turns")
    for name in options.show:
        try:
            rows[name] = SHOWN[name](options, orders)
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
