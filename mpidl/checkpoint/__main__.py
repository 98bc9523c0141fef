"""Inspects checkpoints, verifies them, and exports one as plain weights.

    python -m mpidl.checkpoint inspect DIR             what is there; with --tensors every tensor
    python -m mpidl.checkpoint verify DIR              reads all of it and compares the checksums
    python -m mpidl.checkpoint export DIR OUT          model.safetensors and config.json, as transformers has them

DIR is a checkpoint, or a directory of them, of which `verify` and `export` take the newest complete one; DIR/latest is
the one that was written last. One process that needs neither mpirun nor MPI.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..cli import Parser, print_error
from ..errors import CheckpointError, ConfigurationError, UsageError
from ..job.ending import INTERRUPTED
from ..mesh import Cut
from . import folder, index, parts
from .exporting import byte_count, export_checkpoint
from .index import Index
from .reading import verify

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options. Raises UsageError."""
    parser = Parser(prog="python -m mpidl.checkpoint", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds, or which there are")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    check = commands.add_parser("verify", help="read all of a checkpoint and compare the checksums")
    export = commands.add_parser("export", help="write plain weights")
    for command in (inspect, check, export):
        command.add_argument("dir", type=Path, metavar="DIR", help="a checkpoint, or a directory of them")
    export.add_argument("out", type=Path, metavar="OUT", help="the directory to write to")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    export.add_argument(
        "--config", type=Path, metavar="DIR", help="a config.json to go with the weights; else as the model had it"
    )
    export.add_argument("--dtype", choices=list(_DTYPES), help="of floating tensors; else as saved")
    options = parser.parse_args(arguments)
    if options.command == "export":
        byte_count(options.max_shard_size)
    return options


def chosen(path: Path) -> tuple[Path, list[str]]:
    """Returns the checkpoint itself, or the newest complete one in a directory, and why newer ones were passed over.

    Checkpoints that are still being written are not named. Raises CheckpointError if there is none.
    """
    found, passed = folder.find(path)
    if found is None:
        why = f": {'; '.join(passed)}" if passed else ""
        lacks = "holds no complete checkpoint" if path.exists() else "no such directory"
        raise CheckpointError(f"{path}: {lacks}{why}")
    return found, [why for why in passed if ".tmp: was not finished" not in why]


def size_of(contents: Iterable[Index]) -> int:
    """Adds up the bytes of all files."""
    return sum(int(file["bytes"]) for content in contents for file in content.files.values())


def summary(content: Index, contents: Sequence[Index]) -> dict[str, Any]:
    """Counts what a checkpoint holds. contents: its own index, or those of its parts, over which counts are summed.

    A tensor that all parts hold is counted in each.
    """
    parameters = [each.tensors.get(f"model/{name}") for each in contents for name in each.about["model"]["parameters"]]
    about, ranks = contents[0].about, content.about["ranks"]
    optimizer = about.get("optimizer")
    states = {name.split("/")[1] for each in contents for name in each.tensors if name.startswith("optimizer/")}
    mesh = ", ".join(f"{axis}={size}" for axis, size in content.about.get("mesh", {}).items())
    return {
        "path": str(content.path),
        "step": content.about["step"],
        "micro_step": content.about["micro_step"],
        "saved_by": f"{content.about['engine']} on {ranks} rank{'s' * (ranks > 1)}{', ' * bool(mesh)}{mesh}",
        **({"parts": f"{len(contents)}, {mesh}"} if "parts" in content.about else {}),
        "model": about["model"]["class"],
        "parameters": sum(entry.count for entry in parameters if entry is not None),
        "dtypes": sorted({str(entry.dtype).removeprefix("torch.") for entry in parameters if entry is not None}),
        "optimizer": optimizer and f"{optimizer['class']} ({', '.join(sorted(states)) or 'no state'})",
        "also": [name for name in ("scheduler", "scaler", "sampler") if name in about],
        "tensors": sum(len(each.tensors) for each in contents),
        "files": sum(len(each.files) for each in contents),
        "bytes": size_of(contents),
    }


def _inspect(options: argparse.Namespace) -> None:
    found_there, _ = folder.find(options.dir)
    if found_there is None or found_there.parent == options.dir:
        _list(options)
        return
    content = index.read(found_there)
    by_part = parts.contents(content)
    found = summary(content, [*by_part.values()])
    if options.tensors:
        found["listed"] = {
            f"{part}{'/' * bool(part)}{name}": {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "slices": [
                    f"{part.start}:{part.stop}{_shown(cut) if entry.cuts else ''} in {part.file}"
                    for cut, slices in entry.pieces
                    for part in slices
                ],
            }
            for part, each in by_part.items()
            for name, entry in each.tensors.items()
        }
    if options.json:
        print(json.dumps(found, indent=1))
        return
    listed = found.pop("listed", {})
    width = max(map(len, found))
    for key, value in found.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else f"{value:,}" if key in _COUNTS else value
        print(f"{key.replace('_', ' '):{width}}  {text if text not in (None, '') else '-'}")
    for name, tensor in listed.items():
        print(f"{name}  {tensor['dtype']} {tuple(tensor['shape'])}  {'; '.join(tensor['slices'])}")


def _shown(cut: Cut) -> str:
    """Formats the runs of a cut, dimension by dimension."""
    return f" of [{', '.join(' '.join(f'{start}:{stop}' for start, stop in runs) for runs in cut.runs)}]"


_COUNTS = ("parameters", "tensors", "bytes")


def _list(options: argparse.Namespace) -> None:
    """Prints all checkpoints of a directory, the newest first."""
    newest, passed = folder.find(options.dir)
    rows: list[dict[str, Any]] = []
    if newest is not None:
        for path in folder.by_age(options.dir):
            try:
                content = index.read(path)
                folder.check_files(content)
            except CheckpointError as error:
                rows.append({"path": str(path), "wrong": str(error)})
                continue
            row = {"path": str(path), "step": content.about["step"], "bytes": size_of(parts.contents(content).values())}
            rows.append({**row, "newest": path == newest})
    rows += [{"path": text.split(": ")[0], "wrong": text} for text in passed if text not in str(rows)]
    if not rows:
        why = "holds no checkpoint" if options.dir.is_dir() else "no such directory"
        raise CheckpointError(f"{options.dir}: {why}")
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        if "wrong" in row:
            print(f"torn      {row['wrong']}")
        else:
            print(f"complete  {row['path']}  step {row['step']}, {row['bytes']:,} bytes{', newest' * row['newest']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status: 2 for wrong use, 1 for a checkpoint that is missing or damaged.

    1 also if `verify` had to pass over a newer checkpoint that is not complete; 130 if interrupted.
    """
    try:
        options = parse(arguments)
    except (UsageError, ConfigurationError) as error:
        return _say(error, 2)
    try:
        if options.command == "inspect":
            _inspect(options)
        elif options.command == "verify":
            path, passed = chosen(options.dir)
            content = verify(path)
            contents = parts.contents(content).values()
            tensors = sum(len(each.tensors) for each in contents)
            print(f"{content.path}: good: {tensors} tensors, {size_of(contents):,} bytes")
            if passed:
                return _say(f"passed over: {'; '.join(passed)}", 1)
        else:
            path, passed = chosen(options.dir)
            dtype = _DTYPES.get(options.dtype)
            size, config = options.max_shard_size, options.config
            export_checkpoint(path, options.out, max_shard_size=size, dtype=dtype, config=config)
            print(f"{path} -> {options.out}{''.join(f'; passed over: {why}' for why in passed)}")
    except (CheckpointError, ConfigurationError, OSError) as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    return 0


def _say(error: Exception | str, status: int) -> int:
    print_error(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
