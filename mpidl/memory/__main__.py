"""Bytes a rank by stage of ZeRO, as a table.

    python -m mpidl.memory --params 7.5e9 --ranks 64 --dtype bf16
    python -m mpidl.memory --model gpt2 --ranks 4 --batch 4 --sequence 128
    python -m mpidl.memory --model gpt2 --ranks 8 --nodes 2 --compress int8
    python -m mpidl.memory --model gpt2-xl --ranks 8 --tp 4 --sequence-parallel --batch 4 --sequence 1024

One process that needs neither mpirun nor MPI.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..cli import Parser, print_error
from ..errors import ConfigurationError, UsageError
from ..gradients.compression import COMPRESSORS
from ..gradients.compression.settings import OF_PARAMETERS
from ..models import bert, gpt2, resnet
from ..zero.offload.settings import PLACES
from .activations import DTYPES, RECOMPUTE, activation_bytes, slot_bytes
from .estimate import STAGES, Estimate, estimate

_UNITS = {"GB": 9, "MB": 6, "KB": 3}  # powers of ten
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_LEAST_LARGEST = 10  # of the largest total of a table, in its unit, which so has two digits before the point


def _models() -> dict[str, Callable[[], torch.nn.Module]]:
    """The models that have a name."""
    found: dict[str, Callable[[], torch.nn.Module]] = {}
    for name, sizes in gpt2.SIZES.items():
        found[name] = lambda sizes=sizes: gpt2.GPT2(sizes)  # type: ignore[misc]
    for name, shape in bert.SIZES.items():
        found[name if name.startswith("bert") else f"bert-{name}"] = lambda shape=shape: bert.BERT(shape)  # type: ignore[misc]
    for name in resnet.SIZES:
        found[name] = lambda name=name: resnet.ResNet(name)  # type: ignore[misc]
    return found


def _number(text: str) -> float:
    """7.5e9, 7.5B, 124M."""
    value = float(text[:-1]) * _SUFFIXES[text[-1].upper()] if text[-1:].upper() in _SUFFIXES else float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; needs at least 1")
    return value


_number.__name__ = "number"


def _optimizer(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Raises UsageError."""
    parser = Parser(prog="python -m mpidl.memory", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", type=_number, metavar="N", help="how many parameters: 7.5e9, 7.5B, 124M")
    what.add_argument("--model", help=f"or a model by name: {', '.join(_models())}")
    parser.add_argument("--ranks", type=int, required=True, help="of all nodes together")
    parser.add_argument("--nodes", type=int, default=1, help="that they are on (1)")
    parser.add_argument("--shard-ranks", type=int, metavar="N", help="over which state is cut, of a shard_group (all)")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="of the ranks, how many hold parts of layers (1)"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="with --tp: what lies between the cut layers is cut too"
    )
    parser.add_argument("--stage", default="all", choices=[*map(str, STAGES), "all"], help="0 is DDP (all)")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="of parameters (fp32)")
    parser.add_argument(
        "--reduce-dtype", choices=list(DTYPES), help="of gradients and their buckets, but DDP's (as --dtype)"
    )
    parser.add_argument(
        "--optimizer", type=_optimizer, default="adam", help="a name, or bytes of state a parameter (adam)"
    )
    parser.add_argument("--no-masters", action="store_true", help="16-bit parameters have no fp32 copies")
    parser.add_argument("--offload", choices=PLACES, help="where optimizer state and masters lie, if elsewhere")
    parser.add_argument("--step-in-backward", action="store_true", help="gradients are not kept, but pass by buckets")
    parser.add_argument(
        "--compress", metavar="METHOD", help=f"what gradients are compressed by: {', '.join(COMPRESSORS)}, ..."
    )
    parser.add_argument(
        "--compress-parameters", choices=OF_PARAMETERS, help="how stage 3 gathers parameters, over several nodes"
    )
    parser.add_argument(
        "--unit", type=_number, default=0, metavar="N", help="with --params: parameters of the largest unit"
    )
    parser.add_argument(
        "--prefetch", type=int, default=1, metavar="N", help="units that stage 3 gathers ahead, over several nodes (1)"
    )
    kept = parser.add_argument_group("activations of a transformer")
    kept.add_argument("--batch", type=int, help="sequences a rank a micro-step")
    kept.add_argument("--sequence", type=int, help="tokens of each")
    kept.add_argument("--layers", type=int, help="with --params; so are --hidden and --heads")
    kept.add_argument("--hidden", type=int, help="width")
    kept.add_argument("--heads", type=int, help="of attention")
    kept.add_argument("--no-dropout", action="store_true", help="without the masks of dropout")
    kept.add_argument("--recompute", default="none", choices=RECOMPUTE, help="in backward (none)")
    parser.add_argument("--json", action="store_true", help="bytes as JSON instead of the table")
    return parser.parse_args(arguments)


def estimates(options: argparse.Namespace) -> tuple[list[Estimate], float]:
    """One for each stage, and how many parameters. Raises UsageError or ConfigurationError."""
    model: Any = options.params
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "heads")}
    count = options.params
    if options.model is not None:
        known = _models()
        if options.model not in known:
            raise UsageError(f"--model: got {options.model!r}; needs one of {', '.join(known)}")
        with torch.device("meta"):
            model = known[options.model]()
        count = sum(p.numel() for p in model.parameters())
        config = getattr(model, "config", None)
        if any(sizes.values()):
            raise UsageError(f"--layers, --hidden, --heads: --model {options.model} has its own")
        if config is not None:
            sizes = {"layers": config.layers, "hidden": config.embd, "heads": config.heads}
    sizes |= {"batch": options.batch, "sequence": options.sequence}
    kept = slots = 0
    if options.sequence_parallel and options.tp < 2:
        raise UsageError(f"--sequence-parallel: got --tp {options.tp}; needs at least 2")
    if options.batch is not None or options.sequence is not None:
        missing = [f"--{name}" for name, value in sizes.items() if value is None]
        if missing:
            raise UsageError(f"activations of a transformer need {', '.join(missing)} too")
        over = {"tp": options.tp, "sequence_parallel": options.sequence_parallel}
        masks = {"recompute": options.recompute, "dropout": not options.no_dropout}
        kept = activation_bytes(**sizes, dtype=options.dtype, **masks, **over)
        seen = {name: sizes[name] for name in ("batch", "sequence", "hidden")}
        on_a_node = min(options.tp, max(1, options.ranks // options.nodes)) if options.nodes > 0 else None
        slots = slot_bytes(**seen, dtype=options.dtype, **over, node_ranks=on_a_node)
    stages = STAGES if options.stage == "all" else (int(options.stage),)
    settings = {"dtype": options.dtype, "offload": options.offload or False, "optimizer": options.optimizer}
    settings |= {"masters": not options.no_masters, "activations": kept, "unit": options.unit}
    settings |= {"tp": options.tp, "slots": slots}
    settings |= {"step_in_backward": options.step_in_backward, "compress": options.compress}
    settings |= {"prefetch": options.prefetch, "compress_parameters": options.compress_parameters}
    of_zero = {"shard_ranks": options.shard_ranks, "reduce_dtype": options.reduce_dtype}  # DDP has neither
    rows = [
        estimate(model, options.ranks, options.nodes, stage, **settings, **(of_zero if stage else {}))
        for stage in stages
    ]
    return rows, count


def table(rows: Sequence[Estimate]) -> str:
    """Aligned columns, all in one unit."""
    columns = ["parameters", "gradients", "optimizer", "model state", "buckets"]
    columns += ["compression"] if any(row.compression for row in rows) else []
    columns += ["activations"] if any(row.activations for row in rows) else []
    columns += ["slots"] if any(row.slots for row in rows) else []
    columns += ["total", "node total"] + (["offloaded"] if any(row.offloaded for row in rows) else [])
    largest = max(row.total for row in rows)
    unit = next((unit for unit, power in _UNITS.items() if largest >= _LEAST_LARGEST * 10**power), "KB")
    lines = [["stage", *columns]]
    for row in rows:
        values = [getattr(row, column.replace(" ", "_")) / 10 ** _UNITS[unit] for column in columns]
        lines.append(["0 (DDP)" if row.stage == 0 else str(row.stage), *(f"{value:.1f}" for value in values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([f"{unit} (10^{_UNITS[unit]} bytes) a rank; node total: of a node's ranks together", *texts])


def heading(options: argparse.Namespace, count: float) -> str:
    """Makes the heading of the table."""
    suffix, size = next(((s, v) for s, v in reversed(_SUFFIXES.items()) if count >= v), ("", 1.0))
    named = f"{options.model}, " if options.model else ""
    where = "1 node" if options.nodes == 1 else f"{options.nodes} nodes"
    masters = " with fp32 masters" if options.dtype != "fp32" and not options.no_masters else ""
    state = options.optimizer if isinstance(options.optimizer, str) else f"{options.optimizer:g} bytes of state"
    cut = f", state cut over {options.shard_ranks}" if options.shard_ranks else ""
    reduced = f", gradients of ZeRO in {options.reduce_dtype}" if options.reduce_dtype else ""
    within = ", stepped in backward" if options.step_in_backward else ""
    tp = f", tp={options.tp}{' with sequence parallelism' * options.sequence_parallel}" if options.tp > 1 else ""
    sent = f", gradients sent as {options.compress}" if options.compress else ""
    sent += f", parameters gathered as {options.compress_parameters}" if options.compress_parameters else ""
    how = f"{options.ranks} ranks on {where}{tp}{cut}, {options.dtype}{masters}{reduced}, {state}{within}{sent}"
    return f"{named}{count / size:.4g} {suffix} parameters, {how}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints; the exit status."""
    try:
        options = parse(arguments)
        rows, count = estimates(options)
    except (UsageError, ConfigurationError) as error:
        print_error(error)
        return 2
    if options.json:
        totals = ("model_state", "total", "node_total")
        found = [{**asdict(row), **{name: getattr(row, name) for name in totals}} for row in rows]
        print(json.dumps(found, indent=1))
        return 0
    print(heading(options, count))
    print(table(rows))
    if options.params and not options.unit and any(row.stage == 3 for row in rows):
        print("buckets of stage 3: not known without --unit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
