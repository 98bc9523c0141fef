"""The options of `python -m collectives.bench`: those of nccl-tests where there are such, and what is new here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ..command_line import Parser, Refused, at_least, bytes_text, check_writable, names, parse_together
from ..communicator import Communicator
from ..devices import unusable_reason
from .caches import cache_bytes
from .operations import DATATYPES, OPERATIONS, OPERATORS, PLACES, TYPES, USUAL_OPERATIONS, Case, has_average
from .sides import BUFFERS, NAMES

_SIZES = {"cpu": ("1K", "64M"), "cuda": ("64M", "256M")}
_ALGORITHMS = {"cpu": "auto", "cuda": "ipc,aware,staged"}
_FACTOR = 4
_EXAMPLES = """
examples:
  python -m collectives.bench                                  the usual operations on one rank: does it run?
  mpirun -n 4 python -m collectives.bench all_reduce -b 8 -e 128M -f 2
  mpirun -n 4 python -m collectives.bench --compare mpi,gloo   each side in turn, and how many times as long it takes
  mpirun -n 4 python -m collectives.bench all_reduce,all_gather -d bfloat16 --cold --percentiles

The table has nccl-tests' columns, and among them the algorithm, the kind of arrays and the state of the caches.
"busbw" is what each rank's link carries: compare it with the memory's or the network's speed. docs/benchmarks.md
explains all. The exit status is 1 where a result is wrong, and 2 for wrong options.
"""


@dataclass(frozen=True)
class BenchOptions:
    """The options of a command line.

    compare: sides; those in `algorithms` too run once.
    cache: bytes, if cold.
    """

    operations: tuple[str, ...]
    min_bytes: int
    max_bytes: int
    step_factor: int
    step_bytes: int
    op: tuple[str, ...]
    datatype: tuple[str, ...]
    root: tuple[int, ...]
    iters: int | None
    agg_iters: int
    warmup_iters: int
    average: int
    check: int
    device: str
    algorithms: tuple[str, ...]
    compare: tuple[str, ...]
    buffers: tuple[str, ...]
    places: tuple[str, ...]
    cold: bool
    fresh: bool
    cache: int
    percentiles: bool
    json: Path | None
    plot: Path | None

    @property
    def sides(self) -> tuple[str, ...]:
        """Everything that is timed, once."""
        return tuple(dict.fromkeys((*self.algorithms, *self.compare)))

    @property
    def caches(self) -> tuple[str, ...]:
        """The states of the caches that calls are timed in, on the CPU."""
        return ("warm", *(["cold"] if self.cold else []), *(["fresh"] if self.fresh else []))

    def sizes(self) -> Iterator[int]:
        """Bytes, from the smallest to the largest."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size + self.step_bytes if self.step_bytes else size * self.step_factor

    def series(self, operation: str) -> list[Case]:
        """The smallest case of an operation for every type, operator and root that makes sense."""
        kind = OPERATIONS[operation]
        return [
            Case(kind, dtype, op, root, self.min_bytes)
            for dtype in self.datatype
            for op in (self.op if kind.reduces else ("none",))
            for root in (self.root if kind.rooted else (-1,))
            if op != "avg" or has_average(dtype)
        ]


def parser() -> Parser:
    """Makes the parser."""
    made = Parser(
        prog="python -m collectives.bench",
        description="Times collectives, checks their results, and compares them with other libraries' in the same run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "operations",
        nargs="?",
        type=_names_or_all(tuple(OPERATIONS)),
        default=",".join(USUAL_OPERATIONS),
        help=f"with commas between, or all: {', '.join(OPERATIONS)}; by default the first {len(USUAL_OPERATIONS)}",
    )
    add = made.add_argument_group("sizes, of the whole array that an operation works on (8, 64K, 16M, 1G)").add_argument
    default_sizes = {k: f"{_SIZES['cpu'][k]}, on a GPU {_SIZES['cuda'][k]}" for k in (0, 1)}
    add("-b", "--minbytes", type=bytes_text, metavar="SIZE", help=f"smallest; by default {default_sizes[0]}")
    add("-e", "--maxbytes", type=bytes_text, metavar="SIZE", help=f"largest; by default {default_sizes[1]}")
    add("-f", "--stepfactor", type=at_least(2), metavar="N", help=f"from one to the next; by default {_FACTOR}")
    add("-i", "--stepbytes", type=bytes_text, metavar="SIZE", help="from one to the next, in place of a factor")
    add = made.add_argument_group("the operation").add_argument
    add(
        "-d",
        "--datatype",
        type=_names_or_all(DATATYPES, TYPES),
        default="float32",
        metavar="TYPE",
        help=f"with commas between, or all: {', '.join(DATATYPES)}, {', '.join(TYPES)}; by default float32",
    )
    add(
        "-o",
        "--op",
        type=_names_or_all(OPERATORS),
        default="sum",
        metavar="OP",
        help=f"operator of reductions, or all: {', '.join(OPERATORS)}; by default sum",
    )
    add("-r", "--root", default="0", metavar="RANK", help="of operations that have one, or all; by default 0")
    add = made.add_argument_group("sides, arrays and forms").add_argument
    add("--device", choices=list(_SIZES), default="cpu", help="where the arrays are; by default cpu")
    add(
        "--algorithms",
        metavar="NAMES",
        help=f"with commas between: {', '.join(NAMES['cpu'])}; by default {_ALGORITHMS['cpu']}. On a GPU: "
        f"{', '.join(NAMES['cuda'])}; by default {_ALGORITHMS['cuda']}",
    )
    add(
        "--compare",
        metavar="NAMES",
        help="sides to time in turn with these, each with a column of ratios: mpi (the library's own, by mpi4py), gloo "
        "and nccl (by torch.distributed), copy (the memory's limit), or another algorithm",
    )
    add(
        "--buffers",
        type=names(BUFFERS),
        default=",".join(BUFFERS),
        metavar="KINDS",
        help="user: any arrays; symmetric: those of Communicator.empty and shared; by default both",
    )
    add(
        "--places",
        type=names(PLACES),
        default=",".join(PLACES),
        metavar="FORMS",
        help="out: of place; in: in place; by default both",
    )
    add = made.add_argument_group("measuring").add_argument
    add("-n", "--iters", type=at_least(1), metavar="N", help="repetitions; by default fewer for larger sizes")
    add("-m", "--agg_iters", type=at_least(1), default=1, metavar="N", help="calls in a repetition; by default 1")
    add("-w", "--warmup_iters", type=at_least(0), default=3, metavar="N", help="repetitions before; by default 3")
    add("-c", "--check", type=at_least(0), default=1, metavar="N", help="checked calls, 0: none; by default 1")
    add(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=3,
        metavar="N",
        help="a repetition's time: 0: rank 0's, 1: the mean of all ranks', 2: the least, 3: the largest; by default 3",
    )
    add("--percentiles", action="store_true", help="p50, p95, p99 and the largest time, in place of the median alone")
    add("--cold", action="store_true", help="cold caches too: calls rotate through more than they hold")
    add("--fresh", action="store_true", help="fresh arrays too: just written by this rank, their last results read")
    add("--cache", type=bytes_text, metavar="SIZE", help="what they hold; by default what the system says")
    add = made.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    add("--plot", type=Path, metavar="FILE", help="draw time and busbw against bytes there (needs matplotlib)")
    return made


def read(argv: Sequence[str], ranks: int) -> BenchOptions:
    """Reads a command line. Raises Refused."""
    given = parser().parse_args(argv)
    low, high = (bytes_text(text) for text in _SIZES[given.device])
    smallest = given.minbytes or (min(low, given.maxbytes) if given.maxbytes else low)
    largest = given.maxbytes or max(high, smallest)
    if smallest > largest:
        raise Refused(f"--minbytes {smallest} is more than --maxbytes {largest}; needs at most that")
    if given.stepbytes and given.stepfactor:
        raise Refused(f"--stepbytes {given.stepbytes} and --stepfactor {given.stepfactor}: needs one of them")
    if given.cold and given.device != "cpu":
        raise Refused("--cold: on a GPU its cache is always cleared before a call; needs --device cpu")
    if given.fresh and given.device != "cpu":
        raise Refused("--fresh: a GPU has one cache for all that write and read there; needs --device cpu")
    if given.fresh and given.agg_iters > 1:
        raise Refused(
            f"--agg_iters {given.agg_iters}: with --fresh only the first call of a repetition has fresh arrays; needs 1"
        )
    if given.cache and not given.cold:
        raise Refused(f"--cache {given.cache}: needs --cold")
    if given.op == ["avg"] and not any(has_average(dtype) for dtype in given.datatype):
        raise Refused(f"--op avg: got --datatype {','.join(given.datatype)}; an average needs a floating-point type")
    for path in (given.json, given.plot):
        check_writable(path)
    if given.plot and find_spec("matplotlib") is None:
        raise Refused("--plot: matplotlib is not installed (pip install matplotlib)")
    return BenchOptions(
        operations=tuple(given.operations),
        min_bytes=smallest,
        max_bytes=largest,
        step_factor=given.stepfactor or _FACTOR,
        step_bytes=given.stepbytes or 0,
        op=tuple(given.op),
        datatype=tuple(given.datatype),
        root=_roots(given.root, ranks),
        iters=given.iters,
        agg_iters=given.agg_iters,
        warmup_iters=given.warmup_iters,
        average=given.average,
        check=given.check,
        device=given.device,
        algorithms=_sides("--algorithms", given.algorithms or _ALGORITHMS[given.device], given.device),
        compare=_sides("--compare", given.compare, given.device),
        buffers=tuple(given.buffers),
        places=tuple(given.places),
        cold=given.cold,
        fresh=given.fresh,
        cache=given.cache or (cache_bytes() or 0 if given.cold else 0),
        percentiles=given.percentiles,
        json=given.json,
        plot=given.plot,
    )


def read_together(comm: Communicator) -> BenchOptions:
    """Returns rank 0's options on every rank; wrong ones end all of them with one line and status 2. Collective."""

    def check(options: BenchOptions) -> None:
        if options.device == "cuda" and unusable_reason():
            raise Refused(f"--device cuda: {unusable_reason()}")
        if options.cold and not options.cache:
            raise Refused("--cold: the system does not say what the caches hold; needs --cache SIZE")

    return parse_together(comm, lambda: read(sys.argv[1:], comm.size), check)


def _names_or_all(
    allowed: tuple[str, ...], others: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], list[str]]:
    """An argparse type: names with commas between, or "all". others: more names for some of them."""
    convert = names((*allowed, *others, "all"))

    def with_all(text: str) -> list[str]:
        found = convert(text)
        return list(allowed) if "all" in found else list(dict.fromkeys(others.get(name, name) for name in found))

    return with_all


def _sides(option: str, text: str | None, device: str) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        return tuple(names(NAMES[device])(text))
    except argparse.ArgumentTypeError as error:
        raise Refused(f"argument {option}: {error}") from None


def _roots(text: str, ranks: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(ranks))
    if not text.isdecimal() or int(text) >= ranks:
        raise Refused(f"argument -r/--root: got {text!r}; needs a rank from 0 to {ranks - 1}, or all")
    return (int(text),)
